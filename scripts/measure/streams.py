"""Concurrent streams: all complete and byte-exact against one alone; then SIGTERM.

.venv/bin/python -m scripts.measure.streams [STREAMS]
"""

from __future__ import annotations

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from scripts.measure.requests import fetch
from tests.e2e.serving import serving

TEXTS = (
    "The birch canoe slid on the smooth planks.",
    "Please call Stella and ask her to bring these things with her from the store.",
    "The weather in London tomorrow will be cloudy, with a small chance of rain in the afternoon.",
    "She opened the old wooden door slowly. The cold morning light filled the empty room. Nobody spoke.",
)


def main() -> None:
    """Print how many streams were exact, first-audio times, and how the server ended."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    with serving(*sys.argv[2:]) as server:
        alone = {text: fetch(server.url, text) for text in TEXTS}
        with ThreadPoolExecutor(count) as pool:
            texts = [TEXTS[n % len(TEXTS)] for n in range(count)]
            together = list(pool.map(partial(fetch, server.url), texts))
        exact = sum(
            got.digest == alone[text].digest for text, got in zip(texts, together, strict=True)
        )
        first = sorted(got.first_s for got in together)
        began = time.monotonic()
        code = server.stop()
        stop_s = time.monotonic() - began
        bad = [
            line
            for line in server.lines
            if "ERROR" in line or "Traceback" in line or "CRITICAL" in line
        ]
    print(f"{exact} of {count} streams byte-exact against a single client")
    print(
        f"first audio: median {statistics.median(first) * 1e3:.0f} ms, last {first[-1] * 1e3:.0f} ms"
    )
    print(f"SIGTERM: exit code {code} after {stop_s:.2f} s; {len(bad)} error lines in the log")


if __name__ == "__main__":
    main()
