"""Conformance suites for people who write backends."""
