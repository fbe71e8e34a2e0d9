"""What outlives a link: the loaded backend, the thread it computes in, and its payload files.

A launched process has one link in its life. One that has joined keeps all this when its link is lost.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from stretto.errors import StartFailed
from stretto.replica.compute import ComputeThread
from stretto.transport.payload_store import PayloadReader, PayloadWriter
from stretto.transport.pulling import PayloadPuller, place_of
from stretto.transport.tcp import Address
from stretto.types import SHARED_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.backends.contract import Backend
    from stretto.replica.settings import RuntimeSettings
    from stretto.types import LaunchSpec


class Resident:
    """Belongs to the process; one replica at a time uses it.

    Attributes:
        compute: Where everything heavy runs.
        writer: Stores outputs.
        reader: Reads inputs in shared memory, if there is any.
        on_progress: Hears how far loading is.
    """

    def __init__(self, spec: LaunchSpec, settings: RuntimeSettings) -> None:
        directory = spec.shared_memory_dir
        owner = settings.payload_owner or spec.nonce
        self.compute = ComputeThread()
        self.writer = PayloadWriter(directory, owner, settings.shared_memory_bytes)
        self.reader = None if directory is None else PayloadReader(directory)
        self._puller: PayloadPuller | None = None
        self.settle(settings)
        self.on_progress: Callable[[str, float], None] = lambda _what, _fraction: None
        self._loading: asyncio.Future[Backend | StartFailed] | None = None
        self._has_loaded = False

    def settle(self, settings: RuntimeSettings, home: str = "") -> None:
        """Learn where payloads are from now on.

        Args:
            settings: They say it.
            home: The orchestrator's host, if it is another one.
        """
        self.writer.place = settings.payload_place
        self.writer.keep_only(settings.payload_keys)
        if self._puller is not None:
            self._puller.close()
        self._puller = PayloadPuller(settings.payload_token) if settings.payload_token else None
        if self.reader is not None:
            self.reader.place = settings.payload_place
            self.reader.puller = self._puller
            if home:
                there = place_of(Address(home, settings.payload_port))
                self.reader.elsewhere = {SHARED_MEMORY: there}

    async def backend(self, load: Callable[[], Backend | StartFailed]) -> Backend | StartFailed:
        """Return the backend, or why there is none; it is loaded once, in the compute thread."""
        if self._loading is None:
            self._loading = self.compute.submit(load)
        backend = await asyncio.shield(self._loading)
        if not self._has_loaded and not isinstance(backend, StartFailed):
            self._has_loaded = True
            gc.collect()
            gc.freeze()  # what a backend has loaded stays; collections need not look at it
        return backend

    def progressed(self, what: str, fraction: float) -> None:
        """Tell whoever uses this now how far loading is."""
        self.on_progress(what, fraction)

    def close(self) -> None:
        """Let the thread end after what it has."""
        self.compute.stop()
        if self._puller is not None:
            self._puller.close()
        if self.reader is not None:
            self.reader.close()
