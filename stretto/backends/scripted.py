"""A real backend without a model: it does what a JSON script says.

    {"chunks": 3, "bytes": 960, "delay_s": 0.01, "fail_at": 2}

A stage gets its script from its options (`script:`), and a request may change single fields of it
with its own option `script`: either fields for every stage, or fields by stage id.

    {"relay": {"mode": "echo", "fail_at": 2}, "*": {"cost_s": 0.001}}

`Scripted` is a step backend (form 2), `ScriptedStream` a per-request one (form 1); both do the same.
A chunk of mode `count` is *counter audio*: 16-bit samples that tell their place in the stream and
the stream's tag, so that loss, duplication, reordering and cross-talk are visible in the bytes.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import threading
import time
import zlib
from array import array
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import msgspec

from stretto.backends.contract import (
    Capabilities,
    Chunk,
    Finished,
    Input,
    LoadProgress,
    More,
    Outcome,
    Task,
)
from stretto.errors import InvalidRequest, StageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from stretto.types import CallClass, Payload, Value

LoadFault: TypeAlias = Literal["raise", "exit", "kill", "hang"]

RATE_HZ = 24_000
_SAMPLE_BYTES = 2
_WORD = 1 << 16


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a scripted stage does with one task. Places (`…_at`) count the task's chunks from 0.

    Attributes:
        mode: `count` makes `chunks` chunks of counter audio for each input, `echo` passes each input
            on, `upper` passes it on with its text in upper case.
        chunks: Chunks per input, in mode `count`.
        bytes: Size of each, in mode `count`; an even number.
        tag: Tag of the counter audio; without it the input text's, see `tag_of`.
        delay_s: Wait before each chunk but the first; other tasks go on meanwhile.
        first_delay_s: Wait before the first chunk.
        cost_s: Computing time of each chunk; nothing else is computed meanwhile.
        fail_at: Fail the task instead of making this chunk.
        break_at: Raise out of the step instead; every task of the step fails. Form 1: as `fail_at`.
        exit_at: Exit the process with `exit_code` instead.
        exit_code: See `exit_at`.
        kill_at: The process kills itself with SIGKILL instead.
        hang_at: Never return from the computation instead.
        silent_after: Make so many chunks, then none, and do not end.
        empty_chunks: Chunks carry no samples, in mode `count`.
        bare_terminal: Make no chunk: the task ends without output.
        reports: Each chunk carries metrics, and one that is nothing but metrics goes before the first.
        finish_reason: Each input's last chunk says that the output ends for this reason.
        faulty_attempts: Only so many attempts at the task fail, exit, break, hang or fall silent.
    """

    mode: Literal["count", "echo", "upper"] = "count"
    chunks: int = 10
    bytes: int = 960
    tag: int | None = None
    delay_s: float = 0.0
    first_delay_s: float = 0.0
    cost_s: float = 0.0
    fail_at: int | None = None
    break_at: int | None = None
    exit_at: int | None = None
    exit_code: int = 9
    kill_at: int | None = None
    hang_at: int | None = None
    silent_after: int | None = None
    empty_chunks: bool = False
    bare_terminal: bool = False
    reports: bool = False
    finish_reason: str = ""
    faulty_attempts: int | None = None


_FAULTS = ("fail_at", "break_at", "exit_at", "kill_at", "hang_at", "silent_after")


class ScriptedBreak(Exception):
    """Raised out of a step because the script says so."""


class Player:
    """One task's state: plays the script, one step at a time."""

    def __init__(self, script: Script, task: Task) -> None:
        self._script = script
        self._task = task
        self._made = 0
        self._made_of_input = 0
        self._sample = 0
        self._tag = script.tag
        self._has_waited = False

    @property
    def attempt(self) -> int:
        """Which attempt at the task this is, from 0."""
        return self._task.key.attempt

    def step(self, item: Input) -> Outcome:
        """Do the next thing with an input; the outcomes are those of the contract."""
        script = self._script
        if not item.payload or not self._chunks_per_input:
            return ()
        if script.silent_after is not None and self._made >= script.silent_after:
            return More(after_s=math.inf)
        delay_s = script.delay_s if self._made else script.first_delay_s
        if delay_s and not self._has_waited:
            self._has_waited = True
            return More(after_s=delay_s)
        self._has_waited = False
        if script.fail_at == self._made:
            return StageError(f"the script fails task {self._task.key} at chunk {self._made}")
        self._act()
        chunk = self._next_chunk(item)
        if script.finish_reason and self._made_of_input == self._chunks_per_input:
            chunk = replace(chunk, finish_reason=script.finish_reason)
        if script.reports:
            chunk = replace(chunk, metrics={"made": float(self._made)})
            alone = Chunk(values={}, length=0, kind="metrics", metrics={"made": 0.0})
            chunks = (chunk,) if self._made > 1 else (alone, chunk)
        else:
            chunks = (chunk,)
        if self._made_of_input < self._chunks_per_input:
            return More(*chunks)
        self._made_of_input = 0
        return chunks

    @property
    def _chunks_per_input(self) -> int:
        if self._script.bare_terminal:
            return 0
        return self._script.chunks if self._script.mode == "count" else 1

    def _act(self) -> None:
        script, made = self._script, self._made
        if script.break_at == made:
            raise ScriptedBreak(
                f"the script breaks the step at chunk {made} of task {self._task.key}"
            )
        if script.exit_at == made:
            sys.stderr.flush()
            os._exit(script.exit_code)
        if script.kill_at == made:
            os.kill(os.getpid(), signal.SIGKILL)
        if script.hang_at == made:
            threading.Event().wait()
        _compute(script.cost_s)

    def _next_chunk(self, item: Input) -> Chunk:
        self._made += 1
        self._made_of_input += 1
        if self._script.mode == "count":
            return self._counted(item.payload)
        values = dict(item.payload)
        if self._script.mode == "upper":
            values |= {
                name: value.upper() for name, value in values.items() if isinstance(value, str)
            }
        return _passed_on(values)

    def _counted(self, payload: Payload) -> Chunk:
        if self._tag is None:
            texts = [value for value in payload.values() if isinstance(value, str)]
            self._tag = tag_of(texts[0] if texts else self._task.key.request)
        samples = 0 if self._script.empty_chunks else self._script.bytes // _SAMPLE_BYTES
        audio = counter_audio(self._tag, self._sample, samples)
        self._sample += samples
        return Chunk(values={"audio": audio}, length=samples, media_s=samples / RATE_HZ)


def _passed_on(values: dict[str, Value]) -> Chunk:
    audio = values.get("audio")
    if isinstance(audio, bytes):
        samples = len(audio) // _SAMPLE_BYTES
        return Chunk(values=values, length=samples, media_s=samples / RATE_HZ)
    return Chunk(values=values)


def _compute(cost_s: float) -> None:
    """Keep the processor busy, as a model would."""
    end = time.perf_counter() + cost_s
    while cost_s and time.perf_counter() < end:
        pass


class _ScriptedBase:
    """What both forms share: the stage's script and how it loads.

    Args:
        script: Fields of the stage's script.
        load_s: How long loading takes.
        load_fault: What happens then instead of becoming ready: `raise`, `exit`, `kill` or `hang`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        unit="samples",
        recovery="replay",
        media={"rate_hz": RATE_HZ, "channels": 1, "format": "s16le"},
        voices=("counter",),
    )
    rpc_methods: ClassVar[Mapping[str, CallClass]] = {
        "echo": "control",
        "wait": "control",
        "compute": "exclusive",
        "kill": "control",
    }

    def __init__(
        self,
        script: Mapping[str, object] | None = None,
        load_s: float = 0.0,
        load_fault: LoadFault | None = None,
    ) -> None:
        self._fields = dict(script or {})
        self._load_s = load_s
        self._load_fault: LoadFault | None = load_fault
        self._is_asleep = False
        _script_of(self._fields)

    def load(self, progress: LoadProgress) -> None:
        """Load nothing, for as long as the options say."""
        progress("script", 0.0)
        if self._load_s:
            time.sleep(self._load_s)
        match self._load_fault:
            case "raise":
                raise RuntimeError("the options say that loading fails")
            case "exit":
                os._exit(9)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                threading.Event().wait()
            case None:
                progress("script", 1.0)

    def sleep(self) -> None:
        """Pretend to give memory back."""
        self._is_asleep = True

    def wake(self) -> None:
        """Pretend to take it again."""
        self._is_asleep = False

    def echo(self, value: object = None) -> object:
        """Return the value."""
        return value

    async def wait(self, seconds: float) -> None:
        """Take so long without computing."""
        await _pause(seconds)

    def compute(self, seconds: float) -> None:
        """Compute for so long."""
        _compute(seconds)

    def kill(self) -> None:
        """Kill the process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _player(self, task: Task) -> Player:
        if self._is_asleep:
            raise StageError(f"task {task.key} was opened while the backend sleeps")
        script = _script_of(self._fields | _requested_fields(task))
        if script.faulty_attempts is not None and task.key.attempt >= script.faulty_attempts:
            script = msgspec.structs.replace(script, **dict.fromkeys(_FAULTS))
        return Player(script, task)


class Scripted(_ScriptedBase):
    """The step backend: form 2 of the contract."""

    def open(self, task: Task) -> Player:
        """Read the task's script."""
        return self._player(task)

    def step(self, items: Sequence[tuple[Player, Input]]) -> Sequence[Outcome]:
        """Advance each script by one step."""
        return [player.step(item) for player, item in items]

    def close(self, state: Player) -> None:
        """Forget the task; there is nothing to release."""


class ScriptedStream(_ScriptedBase):
    """The per-request backend: form 1 of the contract."""

    async def run(self, task: Task, inputs: AsyncIterator[Input]) -> AsyncIterator[Chunk]:
        """Play the task's script."""
        player = self._player(task)
        async for item in inputs:
            while True:
                outcome = player.step(item)
                if isinstance(outcome, Exception):
                    raise outcome
                for chunk in outcome.chunks if isinstance(outcome, (More, Finished)) else outcome:
                    yield chunk
                if not isinstance(outcome, More):
                    break
                await _pause(outcome.after_s)


async def _pause(seconds: float) -> None:
    if seconds == math.inf:
        await asyncio.get_running_loop().create_future()
    elif seconds:
        await asyncio.sleep(seconds)


def _requested_fields(task: Task) -> dict[str, object]:
    text = task.options.get("script")
    if text is None:
        return {}
    if not isinstance(text, str):
        raise InvalidRequest("option `script` is JSON text", param="script")
    try:
        fields = msgspec.json.decode(text, type=dict[str, object])
        if any(isinstance(value, dict) for value in fields.values()):
            by_stage = msgspec.convert(fields, dict[str, dict[str, object]])
            return by_stage.get("*", {}) | by_stage.get(task.stage, {})
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"option `script`: {error}", param="script") from error
    return fields


def _script_of(fields: dict[str, object]) -> Script:
    try:
        return msgspec.convert(fields, Script)
    except msgspec.ValidationError as error:
        allowed = ", ".join(Script.__struct_fields__)
        raise InvalidRequest(f"script: {error}; fields are {allowed}", param="script") from error


def tag_of(text: str) -> int:
    """Return the counter audio's tag of a request with this input text."""
    return zlib.crc32(text.encode()) % _WORD


def counter_audio(tag: int, start: int, count: int) -> bytes:
    """Return samples `start` to `start + count` of the stream with this tag, 16-bit little-endian.

    Samples come in pairs: the pair's number, low word, after the tag plus the number's high word.
    """
    first, end = start // 2, (start + count + 1) // 2
    pairs = array("H", bytes(4 * (end - first)))
    number = first
    while number < end:  # once per 65,536 pairs: within such a block the low word just counts
        stop = min(end, (number // _WORD + 1) * _WORD)
        low = number % _WORD
        words = array("H", [(tag + number // _WORD) % _WORD]) * (stop - number)
        pairs[2 * (number - first) : 2 * (stop - first) : 2] = words
        pairs[2 * (number - first) + 1 : 2 * (stop - first) : 2] = _low_words()[
            low : low + stop - number
        ]
        number = stop
    if sys.byteorder == "big":
        pairs.byteswap()
    skip = start % 2
    return pairs[skip : skip + count].tobytes()


@cache
def _low_words() -> array[int]:
    return array("H", range(_WORD))


def check_counter_audio(audio: bytes, tag: int, start: int = 0) -> int:
    """Return how many samples there are if each is the stream's next one from `start` on.

    Raises:
        AssertionError: It names the first wrong sample, what it should be and what it looks like.
    """
    count, odd = divmod(len(audio), _SAMPLE_BYTES)
    expected = counter_audio(tag, start, count)
    if audio == expected:
        return count
    if odd:
        raise AssertionError(f"{len(audio)} bytes are no whole number of samples")
    wrong = next(i for i in range(count) if _sample(audio, i) != _sample(expected, i))
    pair = max(0, wrong - (start + wrong) % 2)
    seen = 2 * _sample(audio, pair + 1)
    raise AssertionError(
        f"sample {start + wrong} of tag {tag} is wrong: it looks like sample {seen} of tag "
        f"{_sample(audio, pair)}"
    )


def _sample(audio: bytes, index: int) -> int:
    return int.from_bytes(audio[_SAMPLE_BYTES * index : _SAMPLE_BYTES * (index + 1)], "little")
