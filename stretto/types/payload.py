"""Payloads: what a chunk carries, and the reference by which the router knows it."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

Value: TypeAlias = str | int | float | bool | bytes | memoryview | None
"""One named value. Arrays arrive as a C-contiguous `memoryview` with format and shape:
`numpy.asarray(view)` makes an array of it without a copy."""

Payload: TypeAlias = Mapping[str, Value]
"""Named values of one chunk, for example `{"frames": <float32 [frames, 3006]>, "segment_end": True}`."""

MAX_METRICS = 32
"""Most metrics that a backend may report about its replica, and the longest name of one."""

INLINE = "inline"
"""The bytes travel in the frame; the orchestrator keeps them until the last holder is done."""

SHARED_MEMORY = "shm"
"""The bytes lie in a file of the run's shared-memory directory; `key` is its name."""


class PayloadRef(NamedTuple):
    """Where a payload's bytes are. Opaque to the router, which only counts who still holds it.

    Attributes:
        place: `INLINE` or `SHARED_MEMORY`.
        key: Unique within the run and the place.
        size_bytes: Length of the encoded payload.
    """

    place: str
    key: str
    size_bytes: int
