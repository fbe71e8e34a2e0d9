"""Methods that can be called in a replica from outside: its own, and those that its backend offers.

A control call runs on the loop at once and must not block it. An exclusive one runs in the compute
thread; the orchestrator has let the tasks end before, and opens none until it is answered. Whatever a
method raises fails its call only.

A backend offers a method by naming it, with its class, in the class attribute `rpc_methods`.
"""

from __future__ import annotations

import inspect
import io
import resource
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast, get_args

import msgspec

from stretto.errors import ConfigError, Failure, InternalError, InvalidRequest, StageError
from stretto.messages import MAX_CALL_BYTES, link
from stretto.replica.compute import attempt, failure_of
from stretto.types import CallClass

if TYPE_CHECKING:
    import asyncio
    import cProfile

    from stretto.replica.compute import ComputeThread

BUILT_IN: Mapping[str, CallClass] = {
    "ping": "control",
    "statistics": "control",
    "profile_start": "control",
    "profile_stop": "control",
    "sleep": "exclusive",
    "wake": "exclusive",
}
"""What every replica offers."""

PROFILE_LINES = 200
"""Most lines of a profile's report."""

_KIB = 1024

Counts = Callable[[], Mapping[str, int]]


def checked_methods(name: str, backend: type[object]) -> dict[str, CallClass]:
    """Return what a backend's class offers.

    Raises:
        ConfigError: It offers what can't be called; the text says what to change.
    """
    offered: object = getattr(backend, "rpc_methods", {})
    if not isinstance(offered, Mapping):
        raise ConfigError(f"backend {name!r}: `rpc_methods` is a mapping of names to classes")
    for method, call_class in cast("Mapping[object, object]", offered).items():
        where = f"backend {name!r} offers method {method!r}"
        if not isinstance(method, str) or method.startswith("_"):
            raise ConfigError(f"{where}; a public name is expected")
        if method in BUILT_IN:
            raise ConfigError(f"{where}, which every replica has; take another name")
        if call_class not in get_args(CallClass):
            raise ConfigError(f"{where} as {call_class!r}; use `control` or `exclusive`")
        function = getattr(backend, method, None)
        if not callable(function):
            raise ConfigError(f"{where}, but it has no such method")
        if call_class == "exclusive" and inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"{where} as exclusive, which runs in the compute thread: make it a plain function"
            )
    return dict(cast("Mapping[str, CallClass]", offered))


class Calls:
    """Runs calls and answers each of them once.

    Args:
        backend: Whose methods can be called too; it is loaded.
        offered: Its methods, checked.
        compute: The thread in which it computes.
        counts: Figures of the runtime.
        answer: Sends an answer.
        where: The replica's name, for failures.
    """

    def __init__(
        self,
        backend: object,
        offered: Mapping[str, CallClass],
        compute: ComputeThread,
        counts: Counts,
        answer: Callable[[link.CallAnswered], object],
        where: str,
    ) -> None:
        self._backend = backend
        self._compute = compute
        self._counts = counts
        self._answer = answer
        self._where = where
        self._born_at = time.monotonic()
        self._profile: cProfile.Profile | None = None
        self._is_asleep = False
        self.classes: dict[str, CallClass] = {**BUILT_IN, **offered}
        self._methods: dict[str, Callable[..., object]] = {
            **{name: getattr(self, f"_{name}") for name in BUILT_IN},
            **{name: getattr(backend, name) for name in offered},
        }

    @property
    def is_asleep(self) -> bool:
        """Say whether a call has put the backend to sleep."""
        return self._is_asleep

    async def wake(self) -> None:
        """Wake the backend without a call: whoever put it to sleep is gone.

        Raises:
            StrettoError: It can't be woken.
        """
        failure = await self._compute.submit(lambda: attempt(self._wake, self._where))
        if failure is not None:
            raise failure.exception()

    def take(self, message: link.Call, group: asyncio.TaskGroup) -> None:
        """Begin a call; it is answered when it has run."""
        group.create_task(self._hold(message), name=f"call {message.call}")

    async def _hold(self, message: link.Call) -> None:
        outcome: bytes | Failure
        try:
            outcome = await self._run(message)
        except InternalError:
            raise  # the compute thread is not sound: neither is the replica
        except Exception as error:  # noqa: BLE001 - whatever a method raises fails its call only
            outcome = failure_of(error, self._where)
        is_good = isinstance(outcome, bytes)
        self._answer(
            link.CallAnswered(
                message.call,
                outcome if is_good else b"",
                None if is_good else outcome,
                self._is_asleep,
            )
        )

    async def _run(self, message: link.Call) -> bytes | Failure:
        """Run a method where its class says; return its encoded value, or a failure.

        Raises:
            Exception: Whatever a control method raises.
            InvalidRequest: The arguments don't fit.
        """
        method = self._methods[message.method]
        arguments = _arguments(message, method)
        if self.classes[message.method] == "exclusive":
            return await self._compute.submit(
                lambda: attempt(lambda: _encoded(method(**arguments)), self._where)
            )
        value = method(**arguments)
        return _encoded(await value if inspect.isawaitable(value) else value)

    # ------------------------------------------------------------------ what every replica offers

    def _ping(self) -> str:
        return "pong"

    def _statistics(self) -> dict[str, int | float | bool]:
        return {
            **self._counts(),
            "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB,
            "uptime_s": time.monotonic() - self._born_at,
            "is_asleep": self._is_asleep,
        }

    async def _profile_start(self) -> None:
        """Begin to profile the compute thread, while it works."""
        if self._profile is not None:
            raise InvalidRequest(
                f"{self._where} is being profiled; call `profile_stop` first", code="not_possible"
            )
        import cProfile  # noqa: PLC0415 - replicas are seldom profiled

        profile = self._profile = cProfile.Profile()
        failure = await self._compute.submit(lambda: attempt(profile.enable, self._where))
        if failure is not None:
            self._profile = None
            raise failure.exception()

    async def _profile_stop(self, lines: object = 30) -> str:
        """End it; return the functions that took longest, inner calls included."""
        if not isinstance(lines, int) or not 0 < lines <= PROFILE_LINES:
            raise InvalidRequest(
                f"`lines` is {lines!r}; use 1 to {PROFILE_LINES}",
                param="arguments",
                code="invalid_value",
            )
        profile, self._profile = self._profile, None
        if profile is None:
            raise InvalidRequest(
                f"{self._where} is not being profiled; call `profile_start` first",
                code="not_possible",
            )
        report = await self._compute.submit(
            lambda: attempt(lambda: _report(profile, lines), self._where)
        )
        if isinstance(report, Failure):
            raise report.exception()
        return report

    def _sleep(self) -> None:
        sleep, _ = self._naps()
        if not self._is_asleep:
            sleep()
            self._is_asleep = True

    def _wake(self) -> None:
        _, wake = self._naps()
        if self._is_asleep:
            wake()
            self._is_asleep = False

    def _naps(self) -> tuple[Callable[[], object], Callable[[], object]]:
        sleep, wake = (getattr(self._backend, name, None) for name in ("sleep", "wake"))
        if not callable(sleep) or not callable(wake):
            raise InvalidRequest(
                f"the backend of {self._where} does not support it: it has no `sleep()` and `wake()`",
                param="method",
                code="not_supported",
            )
        return sleep, wake


def _arguments(message: link.Call, method: Callable[..., object]) -> dict[str, object]:
    try:
        arguments = msgspec.msgpack.decode(message.arguments, type=dict[str, object])
        inspect.signature(method).bind(**arguments)
    except (msgspec.MsgspecError, TypeError) as error:
        raise InvalidRequest(
            f"method {message.method!r}: {error}", param="arguments", code="invalid_value"
        ) from error
    return arguments


def _encoded(value: object) -> bytes:
    try:
        data = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise StageError(f"the method's result can't be sent: {error}") from error
    if len(data) > MAX_CALL_BYTES:
        raise StageError(f"the method's result has {len(data)} bytes; at most {MAX_CALL_BYTES} do")
    return data


def _report(profile: cProfile.Profile, lines: int) -> str:
    import pstats  # noqa: PLC0415 - replicas are seldom profiled

    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(lines)
    return text.getvalue()
