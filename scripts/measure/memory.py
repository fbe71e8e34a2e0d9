"""Resident memory of each process, fresh and after many requests.

.venv/bin/python -m scripts.measure.memory [REQUESTS]
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from scripts.measure.requests import fetch
from tests.e2e.serving import Server, serving

TEXT = "A streaming engine should send the first audio chunk long before."


def resident_mb(server: Server) -> dict[str, float]:
    """Return the RSS of each process in MB (10^6 bytes)."""
    return {" ".join(p.cmdline()[2:])[:48]: p.memory_info().rss / 1e6 for p in server.tree()}


def main() -> None:
    """Print memory before, after a tenth of the requests, and after all."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with serving() as server, ThreadPoolExecutor(8) as pool:
        steps = [("fresh", resident_mb(server))]
        for name, amount in (("warm", count // 10), ("all", count - count // 10)):
            texts = [f"{TEXT} Number {n}." for n in range(amount)]
            assert all(got.size_bytes for got in pool.map(partial(fetch, server.url), texts))
            steps.append((f"{name}: +{amount}", resident_mb(server)))
        print(f"{'':48s}" + "".join(f"{name:>14s}" for name, _ in steps) + "  MB")
        for process in steps[0][1]:
            print(f"{process:48s}" + "".join(f"{rss.get(process, 0):14.1f}" for _, rss in steps))


if __name__ == "__main__":
    main()
