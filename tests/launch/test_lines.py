"""Output on its way to a terminal: nothing waits for it."""

from __future__ import annotations

import os

import pytest

from stretto.launch.lines import LineWriter
from tests.launch.processes import open_descriptors


def test_lines_are_written_in_order_and_before_the_close_returns() -> None:
    """What was handed over is there when the writer is closed."""
    read_fd, write_fd = os.pipe()
    writer = LineWriter(write_fd)
    for number in range(100):
        writer.write(f"line {number} é \udcff")
    writer.close()
    os.close(write_fd)
    with os.fdopen(read_fd, encoding="utf-8") as written:
        assert written.read().splitlines() == [f"line {number} é \\udcff" for number in range(100)]


def test_a_terminal_that_takes_nothing_stops_nobody() -> None:
    """Writing returns although nobody reads; what does not fit is dropped and counted."""
    read_fd, write_fd = os.pipe()
    writer = LineWriter(write_fd)
    for _ in range(10_000):
        writer.write("x")
    with os.fdopen(read_fd) as written:
        seen: list[str] = []
        while writer.is_behind:
            seen.append(written.readline().rstrip())
        writer.write("after")
        writer.close()
        os.close(write_fd)
        seen += written.read().splitlines()
    dropped = [
        int(line[1:].split()[0])
        for line in seen
        if line.endswith("dropped: the terminal is too slow)")
    ]
    assert sum(dropped) > 0
    assert seen.count("x") + sum(dropped) == 10_000
    assert seen[-1] == "after"


def test_closing_waits_for_a_stopped_terminal_only_so_long() -> None:
    """A stopped terminal does not stop the end of the process."""
    read_fd, write_fd = os.pipe()
    writer = LineWriter(write_fd)
    for _ in range(10_000):
        writer.write("x" * 99)
    writer.close(timeout_s=0.05)
    os.close(read_fd)  # the writer's thread sees the end and stops
    os.close(write_fd)


@pytest.mark.parametrize("lines", [0, 3])
def test_a_terminal_that_is_gone_is_no_error(lines: int) -> None:
    """A closed reader ends the writing, silently."""
    before = open_descriptors()
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    writer = LineWriter(write_fd)
    for _ in range(lines):
        writer.write("line")
    writer.close()
    os.close(write_fd)
    assert open_descriptors() == before
