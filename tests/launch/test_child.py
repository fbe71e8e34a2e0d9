"""`ChildProcess`: what goes in, what comes out, and that nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress

import pytest

from stretto.launch.child import CLEAN_EXIT, LAST_LINES, ChildProcess, exit_reason
from stretto.launch.lines import MAX_LINE_BYTES
from tests.launch.processes import WAIT_S, Lines, has_children, open_descriptors, python, wait_gone


def ignore(_: str) -> None:
    """Take an exit reason or a line."""


async def run(code: str, spec: bytes = b"{}") -> tuple[str, list[str]]:
    """Run some code to its end; return the exit reason and the lines it wrote."""
    lines = Lines()
    child = ChildProcess(python(code), spec, on_exit=ignore, on_line=lines)
    async with asyncio.timeout(WAIT_S):
        return await child.wait(), lines.seen


async def test_the_specification_arrives_as_one_line() -> None:
    """The child reads what the parent wrote, byte for byte."""
    assert await run("print(sys.stdin.buffer.readline())", b'{"a": "\xc3\xa9"}') == (
        CLEAN_EXIT,
        [repr(b'{"a": "\xc3\xa9"}\n')],
    )


async def test_a_specification_larger_than_the_pipe_does_not_block_the_loop() -> None:
    """The start returns before the child has read, and the child gets all of it."""
    code = """
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        print("up", flush=True)
        signal.sigwait([signal.SIGUSR1])
        print(len(sys.stdin.readline()))
    """
    lines = Lines()
    child = ChildProcess(python(code), b"x" * 1_000_000, on_exit=ignore, on_line=lines)
    assert await lines.next() == "up"
    os.kill(child.pid, signal.SIGUSR1)
    assert await lines.next() == "1000001"
    assert await child.wait() == CLEAN_EXIT


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("pass", "exit code 0"),
        ("sys.exit(3)", "exit code 3"),
        ("os._exit(137)", "exit code 137, as after SIGKILL: out of memory?"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (137): out of memory?"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV (139)"),
    ],
)
async def test_the_reason_says_how_it_ended(code: str, reason: str) -> None:
    """Exit codes and signals have words; 137 is named as what it mostly is."""
    assert (await run(code))[0] == reason


def test_a_signal_without_a_name_is_a_number() -> None:
    """A code that no signal explains is shown as it is."""
    assert exit_reason(200) == "exit code 200"
    assert exit_reason(128) == "exit code 128"


async def test_output_arrives_line_by_line_in_order() -> None:
    """Both outputs are captured, also what ends without newline, is not text, or redraws itself."""
    code = r"""
        print("one", flush=True)
        print("two", file=sys.stderr, flush=True)
        os.write(1, b"caf\xc3\xa9 \xff\n\n10%\r20%\r30%\r\nlast words")
    """
    assert await run(code) == (CLEAN_EXIT, ["one", "two", "café \\xff", "", "30%", "last words"])


async def test_a_very_long_line_arrives_in_pieces() -> None:
    """A line without end takes bounded memory and loses nothing."""
    _, lines = await run(f"os.write(1, b'x' * {3 * MAX_LINE_BYTES + 5} + b'\\ny')")
    assert [len(line) for line in lines] == [MAX_LINE_BYTES] * 3 + [5, 1]


@pytest.mark.slow
async def test_a_flood_of_output_arrives_whole() -> None:
    """Nothing is lost between the last read and the end of the process."""
    _, lines = await run("for n in range(50_000): print(n)")
    assert lines == [str(number) for number in range(50_000)]


async def test_output_that_is_seen_later_than_the_end_is_not_lost() -> None:
    """What the group wrote after the child had ended, and before anybody looked, arrives too."""
    code = """
        ended, held = os.pipe()
        if os.fork() == 0:
            os.close(held)
            os.read(ended, 1)  # returns when the child has ended
            os.write(1, b"late")
        os._exit(0)
    """
    read_fd, write_fd = os.pipe()
    lines = Lines()
    child = ChildProcess(python(code), b"", on_exit=ignore, on_line=lines, pass_fds=[write_fd])
    os.close(write_fd)
    assert os.read(read_fd, 1) == b""  # the loop stands still until all of them have ended
    os.close(read_fd)
    assert await child.wait() == CLEAN_EXIT
    assert lines.seen == ["late"]


async def test_the_last_lines_are_kept() -> None:
    """Only the newest lines are remembered."""
    child = ChildProcess(
        python("for n in range(100): print(n)"), b"", on_exit=ignore, on_line=ignore
    )
    await child.wait()
    assert child.last_lines == tuple(str(number) for number in range(100 - LAST_LINES, 100))


async def test_the_end_is_reported_once_after_the_last_line() -> None:
    """The callback comes once, behind all output, and every waiter gets the same reason."""
    events: list[str] = []
    child = ChildProcess(
        python("print('bye'); sys.exit(4)"), b"", on_exit=events.append, on_line=events.append
    )
    reasons = await asyncio.gather(child.wait(), child.wait())
    child.kill()
    child.terminate()
    await asyncio.sleep(0)
    assert reasons == ["exit code 4", "exit code 4"]
    assert events == ["bye", "exit code 4"]
    assert not child.is_running


async def test_a_cancelled_waiter_does_not_take_the_end_away_from_others() -> None:
    """Giving up one wait leaves the others waiting."""
    child = ChildProcess(python("time.sleep(60)"), b"", on_exit=ignore, on_line=ignore)
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await child.wait()
    child.kill()
    assert await child.wait() == "killed on request"


GRANDCHILD = """
    import json
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('up', flush=True); time.sleep(60)"
    )
    grandchild = subprocess.Popen(
        [sys.executable, "-S", "-c", stubborn], stdout=subprocess.PIPE, {options}
    )
    grandchild.stdout.read(3)
    print(json.dumps([os.getpid(), grandchild.pid]), flush=True)
"""


async def test_kill_takes_the_whole_group() -> None:
    """A grandchild that ignores SIGTERM goes with the child."""
    lines = Lines()
    code = GRANDCHILD.format(options="") + "    time.sleep(60)"
    child = ChildProcess(python(code), b"", on_exit=ignore, on_line=lines)
    pids: list[int] = json.loads(await lines.next())
    assert pids[0] == child.pid
    child.kill()
    assert await child.wait() == "killed on request"
    for pid in pids:
        await wait_gone(pid)


async def test_what_a_child_leaves_behind_in_its_group_ends_with_it() -> None:
    """A child's own end takes its grandchildren along."""
    lines = Lines()
    child = ChildProcess(python(GRANDCHILD.format(options="")), b"", on_exit=ignore, on_line=lines)
    pids: list[int] = json.loads(await lines.next())
    assert await child.wait() == CLEAN_EXIT
    await wait_gone(pids[1])


async def test_a_process_that_left_the_group_with_the_output_pipe_does_not_delay_the_end() -> None:
    """The end is that of the child, even if somebody else still holds its output."""
    lines = Lines()
    options = "stderr=sys.stdout.fileno(), start_new_session=True"
    child = ChildProcess(
        python(GRANDCHILD.format(options=options)), b"", on_exit=ignore, on_line=lines
    )
    pids: list[int] = json.loads(await lines.next())
    async with asyncio.timeout(WAIT_S):
        assert await child.wait() == CLEAN_EXIT
    os.kill(pids[1], signal.SIGKILL)
    await wait_gone(pids[1])


async def test_terminate_lets_the_child_end_in_its_own_way() -> None:
    """SIGTERM reaches the child, which may finish what it does."""
    code = """
        signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), os._exit(5)))
        print("up", flush=True)
        time.sleep(60)
    """
    lines = Lines()
    child = ChildProcess(python(code), b"", on_exit=ignore, on_line=lines)
    await lines.next()
    child.terminate()
    assert await child.wait() == "exit code 5"
    assert lines.seen == ["up", "drained"]


async def test_a_child_inherits_only_what_it_is_given() -> None:
    """Descriptors of the parent stay with the parent, except the named ones."""
    read_fd, write_fd = os.pipe()
    os.set_inheritable(read_fd, True)
    lines = Lines()
    code = "print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
    child = ChildProcess(python(code), b"", on_exit=ignore, on_line=lines, pass_fds=[write_fd])
    await child.wait()
    os.close(read_fd)
    os.close(write_fd)
    fds: list[int] = json.loads(lines.seen[0])
    assert write_fd in fds
    assert read_fd not in fds
    assert len(fds) == 5  # three standard ones, the given one, and that of the listing


async def test_the_environment_is_added_to() -> None:
    """The child sees its own variables and ours."""
    child_lines = Lines()
    code = "print(os.environ['STAGE_COLOUR'], 'PATH' in os.environ)"
    child = ChildProcess(
        python(code), b"", on_exit=ignore, on_line=child_lines, environment={"STAGE_COLOUR": "red"}
    )
    await child.wait()
    assert child_lines.seen == ["red True"]


async def test_a_program_that_does_not_exist_is_an_error_and_leaves_nothing() -> None:
    """A failed start raises, and its pipes are closed."""
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        ChildProcess(["/nonexistent"], b"", on_exit=ignore, on_line=ignore)
    assert open_descriptors() == before


async def test_twenty_lives_leak_no_descriptor_and_no_zombie() -> None:
    """After each end all pipes and the pidfd are closed and the process is reaped."""
    await run("pass")
    before = open_descriptors()
    for number in range(20):
        child = ChildProcess(
            ["/bin/cat"], b"", on_exit=ignore, on_line=ignore if number % 2 else None
        )
        child.kill()
        await child.wait()
    assert open_descriptors() == before
    assert not has_children()
