"""`stretto simulate`: a load, a search, storms, and mistakes that are named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Never, TypeAlias

import pytest

from stretto.cli.app import run
from stretto.cli.simulating import simulate_storms
from stretto.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Simulate: TypeAlias = "Callable[..., tuple[int, str, str]]"

SPEECH = ["speech", "--duration", "10", "--service", "talker=exponential:0.02"]
LOAD = [*SPEECH, "--service", "vocoder=rtf:0.05", "--rate", "4"]


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Return what runs `stretto simulate` and returns exit code, output and error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["stretto", "simulate", *arguments])
        code = run()
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_a_load_is_told_stage_by_stage(simulate: Simulate) -> None:
    """Percentiles, underruns, utilisation and a histogram."""
    code, text, _ = simulate(*LOAD, "--replicas", "talker=2")
    assert code == 0
    for word in ("4 requests/s", "TTFA", "underruns", "talker", "busy", "time to first audio", "█"):
        assert word in text


@pytest.mark.slow
def test_a_target_is_met_by_the_numbers_that_are_told(simulate: Simulate, tmp_path: Path) -> None:
    """They come as flags; given to a run of their own they give the same times."""
    path = tmp_path / "picture.svg"
    target = ["--target-ttfa-p95", "0.15", "--target-underruns", "0"]
    code, text, _ = simulate(*LOAD, *target, "--picture", str(path))
    assert code == 0
    flags = text.split("replicas: ")[-1].splitlines()[0].split()
    assert path.read_text().startswith("<svg")
    code, again, _ = simulate(*LOAD, *flags, "--json")
    report = json.loads(again)
    assert code == 0
    assert report["ttfa_s"]["p95"] <= 0.15
    assert f"{report['ttfa_s']['p95']:.3f} s" in text


def test_a_target_out_of_reach_is_told(simulate: Simulate) -> None:
    """Exit code 1, and how many replicas were tried."""
    code, text, _ = simulate(*LOAD, "--target-ttfa-p95", "0.001", "--max-replicas", "3")
    assert code == 1
    assert "is not met by 3 replicas of each stage" in text
    code, text, _ = simulate(*LOAD, "--target-ttfa-p95", "0.001", "--max-replicas", "3", "--json")
    assert code == 1
    assert json.loads(text)["is_met"] is False


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["speech"], "--service: how long does a step of talker, vocoder take"),
        (SPEECH, "--service: how long does a step of vocoder take"),
        ([*LOAD, "--service", "vocodr=1"], "no stage 'vocodr'; did you mean 'vocoder'?"),
        ([*LOAD, "--service", "vocoder"], "write STAGE=VALUE; stages: talker, vocoder"),
        ([*LOAD, "--service", "vocoder=fast"], "--service vocoder: 'fast' is no distribution"),
        ([*LOAD, "--chunk", "vocoder=0"], "use 0.001 seconds or more"),
        ([*LOAD, "--batch-cost", "vocoder=2"], "use 0 to 1"),
        ([*LOAD, "--rate", "0"], "--rate: 0 is not possible; use more than 0"),
        ([*LOAD, "--duration", "inf"], "--duration: inf is not possible"),
        ([*LOAD, "--length", "rtf:1"], "--length: 'rtf:1' is no distribution"),
        ([*LOAD, "--length", "0"], "--length: 0 is not possible"),
        ([*LOAD, "--output", "sound"], "--output: no output 'sound'; known: audio"),
        ([*LOAD, "--replicas", "talker=0"], "--replicas: stage talker has none"),
        ([*LOAD, "--target-ttfa-p95", "0"], "--target-ttfa-p95: 0 is not possible"),
        ([*LOAD, "--target-underruns", "0"], "give --target-ttfa-p95 too"),
        (["--storm", "--seeds", "0"], "--seeds: 0 is not possible; use 1 or more"),
        (["speach", "--storm"], "did you mean 'speech'?"),
    ],
)
def test_mistakes_are_named(simulate: Simulate, arguments: list[str], what: str) -> None:
    """The flag, what was given and what may be; exit code 2."""
    code, _, error = simulate(*arguments)
    assert code == 2
    assert what in error


@pytest.mark.slow
def test_storms_are_summed_up(simulate: Simulate) -> None:
    """Over the built-in shapes, or over a pipeline."""
    code, text, _ = simulate("--storm", "--seeds", "4")
    assert code == 0
    assert "4 storms" in text
    assert "the invariants held after each event" in text
    code, text, _ = simulate("scripted", "--storm", "--seeds", "2", "--seed", "7", "--json")
    assert code == 0
    assert json.loads(text)["seen"]["worlds"] == 2


def test_a_failing_seed_is_told_with_what_brings_it_back() -> None:
    """After the trace; exit code 1."""
    lines: list[str] = []

    def breaks(seed: int, _: object) -> Never:
        raise AssertionError(f"seed {seed} is a bad one")

    code = simulate_storms("scripted", {}, lines.append, seeds=3, first=41, run=breaks)
    assert code == 1
    assert lines[-2] == "seed 41 breaks its world: AssertionError: seed 41 is a bad one"
    assert lines[-1] == "again: stretto simulate scripted --storm --seeds 1 --seed 41"
    with pytest.raises(ConfigError, match="--seeds"):
        simulate_storms(None, {}, lines.append, seeds=-1)
