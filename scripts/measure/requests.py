"""One speech request over a plain socket client, with the times that matter."""

from __future__ import annotations

import hashlib
import http.client
import json
import time
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Fetched:
    """An answer: its status, size, digest, and seconds until the first audio and until the end."""

    status: int
    size_bytes: int
    digest: str
    first_s: float
    total_s: float


def fetch(url: str, text: str, **fields: object) -> Fetched:
    """Ask for PCM speech and read it all.

    Raises:
        http.client.HTTPException: The connection was cut.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    body = json.dumps({"input": text, "response_format": "pcm", "seed": 1, **fields})
    began = time.perf_counter()
    connection.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    digest = hashlib.sha256()
    first_s, size = 0.0, 0
    while piece := response.read1(65536):
        if not size:
            first_s = time.perf_counter() - began
        size += len(piece)
        digest.update(piece)
    total_s = time.perf_counter() - began
    connection.close()
    return Fetched(response.status, size, digest.hexdigest(), first_s, total_s)
