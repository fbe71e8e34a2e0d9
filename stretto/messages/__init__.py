"""What crosses a process boundary: `link` (orchestrator ↔ replica) and `channel` (API ↔ orchestrator).

Each frame's header is a msgpack list of these messages; bytes of inline payloads follow in the
frame's body, in message order, `PayloadRef.size_bytes` each. No pickle, no user text outside payloads.
Arguments and results of calls are msgpack within their messages, `MAX_CALL_BYTES` at most.
"""

PROTOCOL_VERSION = 3
"""Raised with every change that an older peer would misread; a hello with another one is refused."""

MAX_CALL_BYTES = 64 * 1024
"""Largest arguments of a call, and largest result at one replica, encoded."""

MAX_CALL_TIMEOUT_S = 3600.0
"""Longest time that a call may be given."""
