"""Conformance suites for people who write backends."""

from stretto.testing.backend_suite import BackendCheckFailed, check_backend

__all__ = ["BackendCheckFailed", "check_backend"]
