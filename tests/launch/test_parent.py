"""A process whose parent is gone ends, with all that it started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

from stretto.launch.child import ChildProcess
from tests.launch.processes import IMPORTS, WAIT_S, WATCH, Lines, python, wait_gone, watching_python

BUSY_CHILD = """
    read_spec_line()
    exit_with_parent()
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print([os.getpid(), grandchild.pid], flush=True)
    {load}
"""

PARENT = """
    import asyncio
    from stretto.launch.child import ChildProcess

    async def main():
        child = ChildProcess(
            {command!r}, b"", on_exit=print, on_line=lambda line: print(line, flush=True)
        )
        await child.wait()

    asyncio.run(main())
"""


@pytest.mark.parametrize(
    "load", ["time.sleep(60)", "sum(range(10**11))", "subprocess.run(['sleep', '60'])"]
)
async def test_a_killed_parent_takes_child_and_grandchild_along(load: str) -> None:
    """SIGKILL of the parent ends the whole tree, also while the child computes."""
    lines = Lines()
    code = PARENT.format(command=watching_python(BUSY_CHILD.format(load=load)))
    parent = ChildProcess([sys.executable, "-c", dedent(code)], b"", on_exit=lines, on_line=lines)
    pids: list[int] = json.loads(await lines.next())
    os.kill(parent.pid, signal.SIGKILL)
    for pid in pids:
        await wait_gone(pid)
    await parent.wait()


async def test_a_shells_pipeline_is_not_killed() -> None:
    """A process that leads no group ends alone when its input ends."""
    lines = Lines()
    code = """
        inner = subprocess.Popen(
            [sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        inner.stdin.write(b"spec\\n")
        inner.stdin.flush()
        inner.stdout.readline()
        inner.stdin.close()
        print(inner.wait(), flush=True)
    """
    inner = "read_spec_line(); exit_with_parent(); print('up', flush=True); time.sleep(60)"
    child = ChildProcess(
        [*python(code), IMPORTS + WATCH + inner], b"", on_exit=lines, on_line=lines
    )
    async with asyncio.timeout(WAIT_S):
        await child.wait()
    assert lines.seen == ["-9", "exit code 0"]


def test_a_parent_that_is_gone_before_the_watch_begins_is_noticed() -> None:
    """The end of input between the specification and the watch is not missed."""
    code = "read_spec_line(); exit_with_parent(); time.sleep(60)"
    ended = subprocess.run(watching_python(code), input=b"spec\n", check=False, timeout=WAIT_S)
    assert ended.returncode == -signal.SIGKILL


def test_input_that_ends_before_the_specification_is_an_error() -> None:
    """A person who starts the program by hand is told what starts it."""
    code = "from stretto.transport.parent import read_spec_line; read_spec_line()"
    ended = subprocess.run(
        [sys.executable, "-c", code], input=b"half a line", capture_output=True, check=False
    )
    assert ended.returncode == 1
    assert b"EOFError: standard input ended before the specification" in ended.stderr


def test_a_library_that_reads_standard_input_sees_its_end() -> None:
    """Nothing in the child waits for input that never comes, nor takes the parent's end away."""
    code = "read_spec_line(); exit_with_parent(); print(repr(sys.stdin.read()))"
    with subprocess.Popen(
        watching_python(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"spec\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"''\n"
        child.kill()


def test_watching_the_parent_imports_almost_nothing() -> None:
    """The watch is on before anything heavy is imported."""
    heavy = "{'numpy', 'onnxruntime', 'yaml', 'fastapi', 'uvloop'}"
    code = f"import sys, stretto.transport.parent; print({heavy} & set(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert printed.stdout == "set()\n"
