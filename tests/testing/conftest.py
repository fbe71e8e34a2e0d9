"""Suites on loops of both kinds."""

from __future__ import annotations

import uvloop

# libuv makes one pipe per process with its first loop; it is no leak of the test that comes first.
uvloop.new_event_loop().close()
