"""Observers of `(event, commands)` pairs. No transition calls them; they change nothing."""

from stretto.observe.eventlog import EventLogWriter

__all__ = ["EventLogWriter"]
