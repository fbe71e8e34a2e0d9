"""The child's end of the pipe to its parent: it carries the specification and the parent's end.

Standard input carries one line, the specification, and then nothing until the parent closes it or
dies. Entry points call `read_spec_line` and `exit_with_parent` before any heavy import, so this
module imports next to nothing.
"""

import fcntl
import os
import select
import signal

_STDIN = 0


def read_spec_line() -> bytes:
    """Read the specification from standard input; the newline is not part of it.

    Raises:
        EOFError: Standard input ended first: the parent is gone, or a person started the program.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(_STDIN, 65536)
        if not piece:
            raise EOFError(
                "standard input ended before the specification; this program is started by Stretto"
            )
        line += piece
    return bytes(line[:-1])


def exit_with_parent() -> None:
    """Have the kernel kill this process and its group when standard input ends.

    The kernel sends `SIGKILL` by itself (signal-driven input, `F_SETSIG`): a thread that waits for
    the end would need the interpreter lock, which a library may hold for as long as it loads.
    A process that leads no group of its own is killed alone: a shell's pipeline is not ours to end.

    The pipe moves to a descriptor that no child inherits, and standard input becomes `/dev/null`,
    so a library that reads it sees its end instead of waiting for ever.
    """
    pipe = os.dup(_STDIN)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, _STDIN)
    os.close(null)
    process = os.getpid()
    is_leader = os.getpgrp() == process
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -process if is_leader else process)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it had ended before the kernel watched
        os.kill(-process if is_leader else process, signal.SIGKILL)
