"""Payload bytes on the client's side: what a request sends, and what its outputs bring.

A client's own payloads go inline. Output payloads are copied out of shared memory when they are
read, so their values stay valid and the file is given back at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from stretto.errors import InvalidRequest, PayloadLost, StageError
from stretto.transport import codec
from stretto.transport.payload_store import PayloadReader
from stretto.transport.pulling import PayloadPuller
from stretto.types import INLINE, Payload, PayloadRef, Value


class OutputPayloads:
    """Reads output payloads.

    Args:
        directory: The run's shared-memory directory, if it has one.
        token: With which payloads of other hosts are pulled; empty if there are none.
    """

    def __init__(self, directory: str | None, token: str = "") -> None:
        self._directory = directory
        self._puller = PayloadPuller(token) if token else None
        self._reader: PayloadReader | None = None

    def read(self, payload: PayloadRef, inline: bytes | memoryview | None) -> dict[str, Value]:
        """Return the values of a payload; arrays are views of a private copy.

        Raises:
            PayloadLost: The bytes can't be read.
        """
        return codec.decode(self._copied(payload) if inline is None else inline)

    async def pulled(self, payload: PayloadRef) -> bytes | memoryview:
        """Return the bytes of a payload of another host; a thread waits for them.

        Raises:
            PayloadLost: They can't be had in time.
        """
        if self._puller is None:
            raise PayloadLost(
                f"{payload.key} is at {payload.place}, which this channel can't reach."
            )
        return await asyncio.to_thread(self._puller.pull, payload)

    def close(self) -> None:
        """Give up the directory. May be called twice."""
        if self._puller is not None:
            self._puller.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._directory = None

    def _copied(self, payload: PayloadRef) -> bytes:
        if self._reader is None:
            if self._directory is None:
                raise PayloadLost(
                    f"{payload.key} lies in shared memory, which this channel does not have."
                )
            try:
                self._reader = PayloadReader(self._directory)
            except OSError as error:
                raise PayloadLost(
                    f"{self._directory} can't be opened: {error.strerror}."
                ) from error
        mapped = self._reader.open(payload)
        try:
            return bytes(mapped.view)
        finally:
            mapped.close()


def inline_payload(field: str, values: Payload) -> tuple[PayloadRef, bytes]:
    """Encode what a request sends under `field`.

    Raises:
        InvalidRequest: A value can't be carried; `param` names it.
    """
    try:
        data = codec.encode(values).join()
    except StageError as error:
        raise InvalidRequest(
            f"{field}: {error.detail}", param=field, code="unsupported_value"
        ) from error
    return PayloadRef(INLINE, "", len(data)), data


def input_values(name: str, value: Value | Payload) -> Payload:
    """Return an input's named values; a plain value is the value of its own name."""
    return value if isinstance(value, Mapping) else {name: value}
