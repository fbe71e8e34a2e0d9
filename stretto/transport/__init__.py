"""How bytes travel: frames and connections, payloads as bytes, and the store of large payloads.

This package must not know routing, nor what a message class means.
"""

from stretto.transport.codec import EncodedPayload, decode, encode
from stretto.transport.connection import Connection, ConnectionStatistics, connect_unix, serve_unix
from stretto.transport.frames import FrameError
from stretto.transport.listening import listen_unix, private_directory, socket_base
from stretto.transport.payload_store import (
    Mapped,
    PayloadReader,
    PayloadWriter,
    PayloadWriterStatistics,
    unannounced,
    unlink,
)
from stretto.transport.run_directory import SHARED_MEMORY_BASE, RunDirectory

__all__ = [
    "SHARED_MEMORY_BASE",
    "Connection",
    "ConnectionStatistics",
    "EncodedPayload",
    "FrameError",
    "Mapped",
    "PayloadReader",
    "PayloadWriter",
    "PayloadWriterStatistics",
    "RunDirectory",
    "connect_unix",
    "decode",
    "encode",
    "listen_unix",
    "private_directory",
    "serve_unix",
    "socket_base",
    "unannounced",
    "unlink",
]
