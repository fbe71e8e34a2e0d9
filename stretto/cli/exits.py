"""Exit codes; documented in `docs/reference/cli.md`."""

OK = 0
FAILED = 1
USAGE = 2
NOT_STARTED = 3
SECOND_SIGNAL = 128
"""Plus the signal's number: 130 for SIGINT, 143 for SIGTERM."""
