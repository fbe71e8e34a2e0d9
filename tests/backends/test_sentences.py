"""The sentence adapter: lossless, independent of how the text arrives, and where it cuts."""

from __future__ import annotations

import time
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stretto.backends.sentences import MAX_CHARS, Sentences
from stretto.errors import StageError

LIMIT_S = 2.0
PROSE = st.text(
    st.sampled_from("aB1 .,!?…\n\t\"')—\u0301\u200d👍é") | st.characters(), max_size=900
)


def pieces_of(*parts: str) -> list[str]:
    """Return the texts of the pieces of a text that arrives in parts, and check their numbers."""
    adapter = Sentences()
    payloads = [piece for part in parts for piece in adapter({"text": part}, final=False)]
    payloads += adapter({}, final=True)
    assert [payload["index"] for payload in payloads] == list(range(len(payloads)))
    return [str(payload["text"]) for payload in payloads]


@pytest.mark.slow
@given(text=PROSE, cuts=st.lists(st.integers(0, 900), max_size=8))
@example(text="a" * 299 + " " * 5 + "b" * 299, cuts=[299, 300, 301])
@example(text=" " * 700 + "Hi. " * 100, cuts=[10, 650, 701])
@settings(max_examples=300, deadline=None)
def test_pieces_are_the_text_whatever_the_payloads(text: str, cuts: list[int]) -> None:
    """Joined, they are the text; each is within the bound; how it arrives changes nothing."""
    whole = pieces_of(text)
    assert "".join(whole) == text
    assert all(0 < len(piece) <= MAX_CHARS for piece in whole)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert pieces_of(*(text[a:b] for a, b in pairwise(bounds))) == whole
    assert pieces_of(*text) == whole


@pytest.mark.parametrize(
    "pieces",
    [
        ["Hello there. ", "How are you? ", "Fine!"],
        ["Dr. Smith met J. K. Rowling and Mr. Jones at St. Mary. ", "They left."],
        ["Pi is 3.14 and e is 2.71. ", "Both are irrational."],
        ["He asked “Why?” ", "“Because.” ", "(It was late.) ", "Silence."],
        ["“Why?” he asked. ", "Nobody knew…\n", "End"],
        ["A title\n\n", "wrapped\n", "lines"],
        ["See no. 5 and Fig. 3 of the U.S. report, e.g. Table 2. ", "Done."],
        ["No. ", "He said no. ", "It rained until Dec. ", "Then it froze."],
        ["1. First the list. ", "2. Then its end."],
        ["Wait... what? ", "Wait... ", "What?!  ", "In 1984. ", "Then."],
        ["  Spaces first. ", "Last.  \n "],
        [" \n"],
    ],
)
def test_sentences_end_where_a_reader_would_pause(pieces: list[str]) -> None:
    """Titles, initials, numbers and quotations do not end one; line ends do."""
    assert pieces_of("".join(pieces)) == pieces


def test_a_sentence_leaves_when_the_next_one_begins() -> None:
    """It does not wait for the end of the text, and what is left comes once."""
    adapter = Sentences()
    assert adapter({"text": "One is here. "}, final=False) == []
    assert adapter({"text": "T"}, final=False) == [{"text": "One is here. ", "index": 0}]
    assert adapter({"text": "wo"}, final=True) == [{"text": "Two", "index": 1}]
    assert adapter({}, final=True) == []


def test_a_long_sentence_is_cut_at_a_clause_then_at_a_word() -> None:
    """Clause ends near the start do not count; the last one in reach does."""
    words = "word " * 50
    first, *_ = pieces_of(f"Well, {words.strip()}, {words * 2}")
    assert first == f"Well, {words.strip()}, "
    assert {len(piece) for piece in pieces_of("word " * 200)} == {MAX_CHARS, 100}
    assert (
        len(pieces_of("Well, " + "word " * 100)[0]) == MAX_CHARS - 4
    )  # behind "Well, " and 58 words


@pytest.mark.parametrize("cluster", ["e\u0301", "👩\u200d🚀", "👍\U0001f3fd", "\ud83d\ude00"])
def test_a_cut_without_any_gap_parts_no_character(cluster: str) -> None:
    """Marks, joiners, skin tones and surrogates stay with what they belong to."""
    for shift in range(4):
        for piece in pieces_of("x" * shift + cluster * 300)[1:]:
            assert piece.startswith(cluster)
    assert unicodedata.category(pieces_of("a" + "\u0301" * 800)[1][0]) == "Mn"  # but it always cuts


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["word ", "a", ". ", "\n", " ", '."', "Dr. ", "é\u0301"])
def test_a_hundred_thousand_characters_take_linear_time(unit: str) -> None:
    """No text makes it quadratic, at once or character by character."""
    text = unit * (100_000 // len(unit))
    started = time.thread_time()
    assert "".join(pieces_of(text)) == text
    assert "".join(pieces_of(*text[:20_000])) == text[:20_000]
    assert time.thread_time() - started < LIMIT_S


def test_text_that_is_no_string_is_refused() -> None:
    """The error names the field."""
    with pytest.raises(StageError, match="text"):
        Sentences()({"text": 5}, final=True)
