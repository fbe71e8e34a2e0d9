"""The edge adapter that cuts a growing text into sentences, losslessly.

A piece is a sentence with the white space behind it; the pieces joined are the text, character for
character. Where the cuts are depends on the text alone, not on how it was split into payloads.

Rules, in this order, for the text not yet cut:

1. Cut before the first character of the next sentence, if that is within `MAX_CHARS` characters.
2. Else, when there are more than `MAX_CHARS` characters, cut behind the last clause in reach, or
   behind the last word, or just there.
3. Else wait for more text; at its end, take all.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

from stretto.errors import StageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.types import Payload

MAX_CHARS = 300
"""The longest piece."""

_MIN_CLAUSE_CHARS = MAX_CHARS // 3
_GAP = re.compile(r"(?<=\S)\s++(?=\S)")
_LINE_ENDS = frozenset("\n\r\u2028\u2029")
_TERMINATORS = frozenset(".!?…")
_CLOSERS = "\"'’”)]}»"
_OPENERS = "\"'‘“([{«"
_CLAUSE_ENDS = frozenset(",;:—–")
_ABBREVIATION = re.compile(
    "Adm|Capt|Cmdr|Col|Cpl|Dr|Fr|Ft|Gen|Gov|Hon|Lt|Maj|Messrs|Mr|Mrs|Ms|Msgr|Mt|Pres|Prof|Rep|Rev|"
    "Sen|Sgt|St|Supt|approx|cf|vs"
)
_BEFORE_NUMBER = re.compile(
    "[Nn]os?|Figs?|Vol|Sec|Ch|Eq|pp?|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec"
)
_JOINER = "\u200d"
_MAX_CLUSTER_CHARS = 32


class Sentences:
    """Takes payloads with `text`, gives payloads with `text` (one sentence) and `index` (from 0)."""

    def __init__(self) -> None:
        self._rest = ""  # shorter than a piece: what is not cut yet
        self._judged = 0  # gaps in the rest before this offset end no sentence
        self._index = 0

    def __call__(self, payload: Payload, final: bool) -> list[Payload]:  # noqa: FBT001 - the contract
        """Return the sentences that are complete now; with `final`, also what is left."""
        text = self._rest + _text_of(payload)
        pieces: list[Payload] = []
        at = 0
        while end := self._cut(text[at : at + MAX_CHARS + 1], final):
            pieces.append({"text": text[at : at + end], "index": self._index})
            self._index += 1
            self._judged = 0
            at += end
        self._rest = text[at:]
        return pieces

    def _cut(self, window: str, final: bool) -> int:  # noqa: FBT001 - handed through
        """Return the length of the next piece, 0 if that can't be said yet."""
        for gap in _GAP.finditer(window, self._judged):
            if _ends_sentence(window, gap.start(), gap.end()):
                return gap.end()
            self._judged = gap.end()
        if len(window) > MAX_CHARS:
            return _forced_cut(window)
        return len(window) if final else 0


def _text_of(payload: Payload) -> str:
    text = payload.get("text", "")
    if not isinstance(text, str):
        raise StageError(
            f"the sentence adapter takes `text` as a string, not as {type(text).__name__}"
        )
    return text


def _ends_sentence(window: str, start: int, end: int) -> bool:
    """Whether a sentence ends at the white space from `start` to `end`."""
    if not _LINE_ENDS.isdisjoint(window[start:end]):
        return True
    before = window[:start].rstrip(_CLOSERS)
    if not before or before[-1] not in _TERMINATORS or window[end].islower():
        return False
    if before[-1] != "." or before[-2:-1] in _TERMINATORS:
        return True
    words = before.split()
    word = words[-1].lstrip(_OPENERS)[:-1]
    if len(words) == 1 and word.isdecimal():  # "1. First, …": the number of a list's item
        return False
    is_initial = len(word.rpartition(".")[2]) == 1 and word[-1].isalpha()  # also "U.S." and "e.g."
    is_numbered = window[end].isdecimal() and _BEFORE_NUMBER.fullmatch(word)
    return not (is_initial or is_numbered or _ABBREVIATION.fullmatch(word))


def _forced_cut(window: str) -> int:
    ends = [(window[gap.start() - 1], gap.end()) for gap in _GAP.finditer(window)]
    clauses = (
        end for last, end in reversed(ends) if last in _CLAUSE_ENDS and end >= _MIN_CLAUSE_CHARS
    )
    words = (end for _, end in reversed(ends))
    return next(clauses, 0) or next(words, 0) or _cut_between_characters(window)


def _cut_between_characters(window: str) -> int:
    """Return `MAX_CHARS`, or a little less where that would part what is read as one character."""
    return next(_whole_clusters(window), MAX_CHARS)


def _whole_clusters(window: str) -> Iterator[int]:
    for at in range(MAX_CHARS, MAX_CHARS - _MAX_CLUSTER_CHARS, -1):
        if window[at - 1] != _JOINER and not _continues(window[at]):
            yield at


def _continues(char: str) -> bool:
    """Whether a character belongs to the one before it: a mark, a joiner, a modifier, half a pair."""
    is_mark = unicodedata.category(char)[0] == "M"
    return (
        is_mark
        or char == _JOINER
        or "\U0001f3fb" <= char <= "\U0001f3ff"
        or "\udc00" <= char <= "\udfff"
    )
