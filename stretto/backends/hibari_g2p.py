"""Text to phonemes with the rules and tables of the package `hibari-tts`, in less memory.

Two things are ours: the part-of-speech tagger's weights are packed while they are read (they take
20 MB instead of 42), and text that the package can't read costs a word instead of the request.
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

OovReader: TypeAlias = Callable[[str], str | None]
"""Phonemes of a word that is in no lexicon."""

_WEIGHT = struct.Struct("<Bd")  # tag number, weight
_LONG_WORD = re.compile(
    r"\S{40}(?=\S)"
)  # the package's time grows with the square of a word's length
_DOTTED_I = (
    "\u0130"  # the one letter that is two in lower case, which the package takes for a fault
)
_CLAUSE_END = re.compile(r"(?<=[,;:.!?…—]) ")
_SPACE = re.compile(" ")


class Phonemizer:
    """Reads English text aloud, on paper: returns phonemes in the voice's alphabet.

    Args:
        assets: The package's folder of tables.
        read_unknown: For words in no lexicon.
    """

    def __init__(self, assets: Path, read_unknown: OovReader) -> None:
        package = importlib.import_module("hibari.g2p")
        # Its constructor would read the tagger's weights into 80,000 dictionaries.
        g2p = package.G2P.__new__(package.G2P)
        g2p.tagger = package.Tagger(_read_tagger(assets / "tagger.json.gz"))
        gold, silver = (
            _read_json(assets / f"lexicon_us_{name}.json.gz") for name in ("gold", "silver")
        )
        g2p.lexicon = package.Lexicon(gold, silver, british=False)
        g2p.tokenizer = package.Tokenizer(
            json.loads((assets / "tokenizer_exceptions.json").read_bytes())
        )
        g2p.unk = ""
        g2p.british = False
        g2p._oov = read_unknown  # noqa: SLF001 - what the constructor's argument `oov` sets
        self._g2p: Callable[[str], str] = g2p

    def __call__(self, text: str) -> str:
        """Return the phonemes of `text`; empty if there is nothing to speak."""
        text = _LONG_WORD.sub(r"\g<0> ", " ".join(text.split())).replace(_DOTTED_I, "I")
        if (phonemes := self._read(text)) is not None:
            return phonemes
        return " ".join(filter(None, map(self._read_word, text.split())))

    def _read_word(self, word: str) -> str | None:
        phonemes = self._read(word)
        return self._read(" ".join(word)) if phonemes is None else phonemes

    def _read(self, text: str) -> str | None:
        try:
            return self._g2p(text)
        except (LookupError, TypeError, ValueError):  # for one, a number of 10^36 or more
            return None


def split_phonemes(phonemes: str, limit: int) -> list[str]:
    """Split phonemes into parts of at most `limit`, at clauses rather than words, near the middle."""
    if len(phonemes) <= limit:
        return [phonemes] if phonemes else []
    middle = len(phonemes) // 2
    for pattern in (_CLAUSE_END, _SPACE):
        gaps = [gap.start() for gap in pattern.finditer(phonemes, 1, len(phonemes) - 1)]
        if gaps:
            at = min(gaps, key=lambda gap: abs(gap - middle))
            return split_phonemes(phonemes[:at], limit) + split_phonemes(phonemes[at + 1 :], limit)
    return split_phonemes(phonemes[:middle], limit) + split_phonemes(phonemes[middle:], limit)


class _PackedWeights:
    """The tagger's weights: feature to (tag to weight), the inner ones packed."""

    def __init__(self, packed: Mapping[str, bytes], tags: list[str]) -> None:
        self._packed = packed
        self._tags = tags

    def get(self, feature: str) -> dict[str, float] | None:
        row = self._packed.get(feature)
        return (
            None
            if row is None
            else {self._tags[tag]: weight for tag, weight in _WEIGHT.iter_unpack(row)}
        )


def _read_tagger(path: Path) -> Mapping[str, object]:
    numbers: dict[str, int] = {}

    def pack(pairs: list[tuple[str, Any]]) -> object:
        if pairs and isinstance(pairs[0][1], float):
            return b"".join(
                _WEIGHT.pack(numbers.setdefault(tag, len(numbers)), weight) for tag, weight in pairs
            )
        return dict(pairs)

    tables: dict[str, Any] = _read_json(path, pack)
    return tables | {"weights": _PackedWeights(tables["weights"], list(numbers))}


def _read_json(
    path: Path, pairs_hook: Callable[[list[tuple[str, Any]]], object] | None = None
) -> Any:  # noqa: ANN401
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file, object_pairs_hook=pairs_hook)
