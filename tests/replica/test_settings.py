"""What a replica's runtime is told."""

from __future__ import annotations

import os

import pytest

from stretto.errors import ConfigError
from stretto.replica.settings import VISIBLE_GPUS, RuntimeSettings, hide_devices
from stretto.types import IncarnationNumber, LaunchSpec, ReplicaId, RunId, StageId


def test_keys_that_concern_others_are_passed_over() -> None:
    """The orchestrator may pass a stage's settings on as they are."""
    settings = RuntimeSettings.of({"slots": 3, "start_timeout_s": 5.0})
    assert (settings.slots, settings.max_batch) == (3, 8)


@pytest.mark.parametrize(
    ("runtime", "text"),
    [
        ({"slots": 0}, "slots is 0, use 1 or more"),
        ({"max_batch": -1}, "max_batch is -1"),
        ({"threads": "two"}, r"\$\.threads"),
        ({"recovery": "perhaps"}, r"\$\.recovery"),
    ],
)
def test_a_wrong_value_is_named(runtime: dict[str, object], text: str) -> None:
    """The error says which setting, and what it may be."""
    with pytest.raises(ConfigError, match=text):
        RuntimeSettings.of(runtime)


def spec(**environment: str) -> LaunchSpec:
    """Return what a replica is told."""
    return LaunchSpec(
        replica=ReplicaId(StageId("a"), 0, IncarnationNumber(1)),
        run=RunId("run"),
        address="unix:/nowhere",
        shared_memory_dir=None,
        nonce="n",
        backend="scripted",
        options={},
        runtime={},
        environment=environment,
    )


@pytest.mark.parametrize(
    ("device", "seen", "expected"),
    [
        ("cpu", None, ""),
        ("cpu", "0,1", ""),
        ("cuda", "0,1", "0,1"),
        ("cuda:1", None, "1"),
        ("cuda:1", "4,7", "7"),
    ],
)
def test_a_replica_sees_only_its_own_device(
    monkeypatch: pytest.MonkeyPatch, device: str, seen: str | None, expected: str
) -> None:
    """A CPU stage sees no GPU; `cuda:N` counts those that the server may see."""
    monkeypatch.setenv(VISIBLE_GPUS, seen or "")  # also so that it is put back afterwards
    if seen is None:
        monkeypatch.delenv(VISIBLE_GPUS)
    hide_devices(spec(), RuntimeSettings(device=device))
    assert os.environ[VISIBLE_GPUS] == expected


def test_the_stages_own_environment_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets the variable knows better."""
    monkeypatch.setenv(VISIBLE_GPUS, "3")
    hide_devices(spec(**{VISIBLE_GPUS: "3"}), RuntimeSettings(device="cpu"))
    assert os.environ[VISIBLE_GPUS] == "3"


def test_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text shows what the process may see."""
    monkeypatch.setenv(VISIBLE_GPUS, "4,7")
    with pytest.raises(ConfigError, match="shows only 2 GPUs"):
        hide_devices(spec(), RuntimeSettings(device="cuda:2"))
