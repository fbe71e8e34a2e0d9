"""What crosses a process boundary: `link` (orchestrator ↔ replica) and `channel` (API ↔ orchestrator).

Each frame's header is a msgpack list of these messages; bytes of inline payloads follow in the
frame's body, in message order, `PayloadRef.size_bytes` each. No pickle, no user text outside payloads.
"""

PROTOCOL_VERSION = 3
"""Raised with every change that an older peer would misread; a hello with another one is refused."""
