"""What an idle server costs: voluntary context switches and CPU time of each of its processes.

.venv/bin/python -m scripts.measure.idle [SECONDS] [PIPELINE]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.serving import serving

if TYPE_CHECKING:
    import psutil


def switches(process: psutil.Process) -> int:
    """Return the voluntary context switches of all threads of a process."""
    total = 0
    for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def cpu_ns(process: psutil.Process) -> int:
    """Return the time on a CPU of all threads of a process, from schedstat, in nanoseconds."""
    return sum(
        int(path.read_text().split()[0])
        for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    )


def measure(seconds: float, *arguments: str) -> list[tuple[str, int, float]]:
    """Return, per process, its label, its switches and its CPU share in percent."""
    with serving(*arguments) as server:
        time.sleep(2)
        tree = server.tree()
        before = [(switches(p), cpu_ns(p)) for p in tree]
        began = time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        return [
            (" ".join(p.cmdline()[2:])[:48], switches(p) - s, (cpu_ns(p) - c) / elapsed / 1e7)
            for p, (s, c) in zip(tree, before, strict=True)
        ]


def main() -> None:
    """Print one line per process and the sum."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    rows = measure(seconds, *sys.argv[2:])
    print(f"idle for {seconds:g} s")
    for name, count, share in rows:
        print(f"{count:4d} switches  {share:8.4f} % CPU  {name}")
    print(
        f"sum: {sum(share for _, _, share in rows):.4f} % CPU; most switches: {max(c for _, c, _ in rows)}"
    )


if __name__ == "__main__":
    main()
