"""Entry point of a replica process: `python -m stretto.replica`, the specification on standard input.

It exits 0 when drained or when its link ends, 1 when it can't start or its runtime breaks; it is killed
with its process group when its parent is gone, also while it loads. SIGINT is the supervisor's.
"""

import os
import signal
import sys
import traceback

from stretto.transport.parent import exit_with_parent, read_spec_line


def main() -> None:
    """Become the replica that the specification describes; does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        line = read_spec_line()
    except EOFError as error:
        sys.exit(str(error))
    exit_with_parent()

    import msgspec  # noqa: PLC0415 - nothing heavy before the parent is watched

    from stretto.errors import ConfigError  # noqa: PLC0415
    from stretto.replica.settings import RuntimeSettings, cap_threads  # noqa: PLC0415
    from stretto.types import LaunchSpec  # noqa: PLC0415

    spec = msgspec.json.decode(line, type=LaunchSpec)
    try:
        cap_threads(spec, RuntimeSettings.of(spec.runtime))
    except ConfigError as error:
        sys.exit(error.detail)

    import uvloop  # noqa: PLC0415

    from stretto.replica.runtime import Replica  # noqa: PLC0415

    async def live() -> None:
        """Exit from within the loop: neither a computation that hangs nor a library's end delays it."""
        code = 1
        try:
            code = await Replica(spec).live()
        except OSError as error:
            print(f"the orchestrator at {spec.address} can't be reached: {error}", file=sys.stderr)
        except BaseException:  # noqa: BLE001 - the top of the process: report, then exit
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    uvloop.run(live())


if __name__ == "__main__":
    main()
