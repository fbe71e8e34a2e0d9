"""`stretto replay`: a log comes out the same, or says where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.cli.replaying import replay_log
from stretto.errors import ConfigError

LOGS = sorted((Path(__file__).parents[1] / "replay").rglob("*.jsonl"))


def replayed(path: Path, **options: object) -> tuple[int, str]:
    """Return the exit code and what was printed."""
    lines: list[str] = []
    code = replay_log(path, lines.append, **options)  # pyright: ignore[reportArgumentType]
    return code, "\n".join(lines)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_every_recorded_log_replays(path: Path) -> None:
    """Counts add up, and the same commands come out."""
    code, text = replayed(path)
    assert code == 0
    assert "the same commands came out" in text
    assert "received" in text


def test_a_log_that_comes_out_differently_says_where(tmp_path: Path) -> None:
    """The line, what was logged, and what came instead; exit code 1."""
    lines = LOGS[0].read_text().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if '"commands":[{' in line)
    lines[at] = lines[at].replace('"commands":[{', '"commands":[{"type":"Exit"},{', 1)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(lines))
    code, text = replayed(path)
    assert code == 1
    assert f"line {at + 1} came out differently" in text


def test_one_request_is_shown_by_its_id_in_time_order() -> None:
    """Events with the commands that concern it, then its story."""
    path = next(path for path in LOGS if b'"RequestSubmitted"' in path.read_bytes())
    line = next(x for x in path.read_text().splitlines() if '"RequestSubmitted"' in x)
    name = line.split('"request":"')[1].split('"')[0]
    code, text = replayed(path, request=name)
    assert code == 0
    assert "RequestSubmitted" in text.splitlines()[0]
    with pytest.raises(ConfigError, match="no request 'nobody'"):
        replayed(path, request="nobody")


def test_a_torn_last_line_and_an_early_stop_are_no_mistakes(tmp_path: Path) -> None:
    """A crash leaves half a line; `--until` asks for less."""
    data = LOGS[0].read_bytes()
    path = tmp_path / "log.jsonl"
    path.write_bytes(data[:-10])
    assert replayed(path)[0] == 0
    code, text = replayed(LOGS[0], until=3)
    assert code == 0
    assert "replayed 2 events" in text


@pytest.mark.parametrize("content", [b"", b"hello\n", b'{"stages": 1}\n', b"\xff\n"])
def test_what_is_no_log_is_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    """With the next step, not with a traceback."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"event log|is empty"):
        replayed(path)
    with pytest.raises(ConfigError, match="can't be read"):
        replayed(tmp_path / "missing.jsonl")
