"""How long things take: distributions written as `kind:number,number`, and drawn from a given source.

constant:0.02           always 0.02 s; a bare number means the same
uniform:0.01,0.03       anything between two times
exponential:0.02        mean 0.02 s
lognormal:0.02,0.5      mean 0.02 s; the logarithm's standard deviation is 0.5
rtf:0.3                 0.3 s for each second of playback that is made
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random


class Kind(Enum):
    """Which distribution."""

    CONSTANT = "constant"
    UNIFORM = "uniform"
    EXPONENTIAL = "exponential"
    LOGNORMAL = "lognormal"
    RTF = "rtf"


_NUMBERS = {
    Kind.CONSTANT: ("SECONDS",),
    Kind.UNIFORM: ("LOW", "HIGH"),
    Kind.EXPONENTIAL: ("MEAN",),
    Kind.LOGNORMAL: ("MEAN", "SIGMA"),
    Kind.RTF: ("FACTOR",),
}

LENGTHS = (Kind.CONSTANT, Kind.UNIFORM, Kind.EXPONENTIAL, Kind.LOGNORMAL)
"""What may describe the length of a request, which can't be a share of itself."""


class Distribution(msgspec.Struct, frozen=True):
    """A distribution of seconds.

    Attributes:
        kind: Which one.
        numbers: Its parameters, in the order of the module's table.
    """

    kind: Kind
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"{self.kind.value}:{','.join(f'{number:g}' for number in self.numbers)}"

    def draw(self, random: Random, media_s: float = 0.0) -> float:
        """Return a random number of seconds; `media_s` is the playback that is made meanwhile."""
        first, last = self.numbers[0], self.numbers[-1]
        match self.kind:
            case Kind.CONSTANT:
                return first
            case Kind.UNIFORM:
                return random.uniform(first, last)
            case Kind.EXPONENTIAL:
                return random.expovariate(1.0 / first) if first else 0.0
            case Kind.LOGNORMAL:
                return first * math.exp(random.gauss(-last * last / 2.0, last))
            case Kind.RTF:
                return first * media_s

    def mean(self, media_s: float = 0.0) -> float:
        """Return the expected number of seconds."""
        match self.kind:
            case Kind.UNIFORM:
                return sum(self.numbers) / 2.0
            case Kind.RTF:
                return self.numbers[0] * media_s
            case Kind.CONSTANT | Kind.EXPONENTIAL | Kind.LOGNORMAL:
                return self.numbers[0]


def distribution(text: str, where: str, kinds: Iterable[Kind] = tuple(Kind)) -> Distribution:
    """Read a distribution.

    Args:
        text: For example `lognormal:0.02,0.5`.
        where: What is being read, for the error, for example `--service talker`.
        kinds: Which ones may stand here.

    Raises:
        ConfigError: It is none of these; the text names what was given and what may be.
    """
    name, colon, rest = text.partition(":")
    kind = next((kind for kind in kinds if kind.value == name), None)
    if not colon:
        kind, rest = Kind.CONSTANT, text
    numbers = _numbers(rest)
    if kind is None or numbers is None or len(numbers) != len(_NUMBERS[kind]):
        forms = ", ".join(f"{each.value}:{','.join(_NUMBERS[each])}" for each in kinds)
        raise ConfigError(f"{where}: {text!r} is no distribution; use one of {forms}")
    if kind is Kind.UNIFORM and numbers[0] > numbers[1]:
        raise ConfigError(f"{where}: {text!r}: LOW is more than HIGH")
    return Distribution(kind, numbers)


def _numbers(text: str) -> tuple[float, ...] | None:
    """Return finite numbers from 0 on; `None` if the text is anything else."""
    try:
        numbers = tuple(float(each) for each in text.split(","))
    except ValueError:
        return None
    return numbers if all(0.0 <= number < math.inf for number in numbers) else None
