"""`stretto config`: what is set and by whom, what is wrong, and what a key means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import jsonschema
import pytest
import yaml

from stretto.cli.configuring import check, explain, schema, show
from stretto.config.json_schema import pipeline_schema
from stretto.config.keys import all_keys
from stretto.config.overrides import flag_overrides
from stretto.errors import ConfigError

BUILT_IN = sorted((Path(__file__).parents[2] / "stretto/config/pipelines").glob("*.yaml"))
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def shown(*pipelines: str, resolved: bool = False, **environ: str) -> list[str]:
    """Return the lines of `config show`."""
    lines: list[str] = []
    show(pipelines, environ, flag_overrides(port=9), lines.append, resolved=resolved)
    return lines


def test_only_what_somebody_has_set_is_shown_with_its_source() -> None:
    """A flag, a variable and a line of a file are told apart."""
    lines = shown("scripted", STRETTO_STAGES__TONE__SLOTS="3")
    assert "server.port: 9  # --port" in lines
    assert "stages.tone.slots: 3  # STRETTO_STAGES__TONE__SLOTS" in lines
    assert any(line.endswith("# built-in scripted.yaml:9") for line in lines)
    assert not any(line.endswith("# default") for line in lines)


def test_resolved_shows_every_value_and_is_yaml() -> None:
    """Each key of each section is there once; the whole can be read by a program."""
    lines = shown("speech", "scripted", resolved=True)
    parsed = cast("dict[str, object]", yaml.safe_load("\n".join(lines)))
    assert parsed["orchestrator.limits.max_queued"] == 256
    assert parsed["stages.vocoder.memory_bytes"] is None
    assert parsed["pipelines.speech.outputs.audio"] == "vocoder"
    for key in all_keys():
        if not key.section.startswith("stages"):
            assert key.path in parsed
    assert sum(line.startswith("stages.talker.threads:") for line in lines) == 1


def test_a_secret_is_never_shown() -> None:
    """Neither the join token nor the administrator's key; that they are set is."""
    secret = "0123456789abcdef"  # noqa: S105 - it is none
    lines = shown(
        "scripted",
        resolved=True,
        STRETTO_ORCHESTRATOR__JOIN_TOKEN=secret,
        STRETTO_SERVER__ADMIN_KEY=secret,
    )
    assert not any(secret in line for line in lines)
    assert 'orchestrator.join_token: "(hidden)"  # STRETTO_ORCHESTRATOR__JOIN_TOKEN' in lines


@pytest.mark.parametrize(("token", "what"), [(None, "is missing"), ("short", "is too short")])
def test_nobody_joins_without_a_token(token: str | None, what: str) -> None:
    """The mistake names the next step, and shows no token."""
    environ = {"STRETTO_ORCHESTRATOR__JOIN_ADDRESS": "0.0.0.0:7070"}
    if token is not None:
        environ["STRETTO_ORCHESTRATOR__JOIN_TOKEN"] = token
    with pytest.raises(ConfigError, match="openssl rand") as caught:
        show(("scripted",), environ, (), lambda _: None, resolved=False)
    assert f"the token {what}" in str(caught.value)


@pytest.mark.parametrize("address", ["here", "host:", "::1:7070", "host:700000", "a b:1"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    """An IPv6 number stands in brackets."""
    with pytest.raises(ConfigError, match="is not host:port"):
        shown("scripted", STRETTO_ORCHESTRATOR__JOIN_ADDRESS=address)


def test_check_says_ok_or_names_every_mistake(tmp_path: Path) -> None:
    """All mistakes at once, each with file, line, key and the nearest match."""
    lines: list[str] = []
    check(["speech"], {}, lines.append)
    assert lines == ["ok: speech with 2 stages and 2 replicas"]
    bad = BUILT_IN[0].read_text().replace("backend:", "bakend:").replace("version: 1", "version: 2")
    (tmp_path / "bad.yaml").write_text(bad)
    with pytest.raises(ConfigError) as caught:
        check([str(tmp_path / "bad.yaml")], {}, lines.append)
    mistakes = str(caught.value).splitlines()
    assert len(mistakes) >= 3
    assert any("did you mean 'backend'" in line for line in mistakes)
    assert all("bad.yaml:" in line for line in mistakes)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("server.port", ["server.port", "0 to 65,535", "STRETTO_SERVER__PORT", "--port"]),
        ("port", ["server.port"]),
        ("STRETTO_SERVER__PORT", ["server.port"]),
        ("stages.vocoder.device", ["stages.<name>.device", "cuda:N"]),
        ("stages.talker.inputs.text.mode", ["stream or full"]),
        ("recovery", ["fail or replay or retry"]),
        ("orchestrator", ["orchestrator.restart", "orchestrator.limits.max_queued"]),
        ("", ["server.host", "stages.<name>.inputs.<name>.window_bytes"]),
    ],
)
def test_a_key_is_explained(asked: str, expected: list[str]) -> None:
    """By its path, its last part, its variable, or its section."""
    lines: list[str] = []
    assert explain(asked, lines.append) == 0
    for text in expected:
        assert text in "\n".join(lines)


def test_an_unknown_key_gets_the_nearest_one() -> None:
    """As in a file."""
    with pytest.raises(ConfigError, match=r"did you mean 'server\.port'"):
        explain("server.prot", print)


def test_the_schema_is_one_and_accepts_what_is_shipped() -> None:
    """Built-in pipelines and examples are valid by it."""
    lines: list[str] = []
    schema(lines.append)
    found = json.loads(lines[0])
    jsonschema.Draft202012Validator.check_schema(found)
    validator = jsonschema.Draft202012Validator(found)
    for path in (*BUILT_IN, *EXAMPLES):
        validator.validate(yaml.safe_load(path.read_text()))  # pyright: ignore[reportUnknownMemberType]


GOOD = yaml.safe_load(BUILT_IN[0].read_text())


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ([], {"stagse": {}}),
        ([], {"version": 2}),
        ([], {"server": {"port": 70_000}}),
        ([], {"server": {"prot": 1}}),
        ([], {"orchestrator": {"limits": {"max_queued": 0}}}),
        ([], {"orchestrator": {"limits": {"queue_timeout_s": "10s"}}}),
        (["stages", "tone"], {"device": "gpu"}),
        (["stages", "tone"], {"recovery": "perhaps"}),
        (["stages", "tone"], {"slots": 1.5}),
        (["stages", "tone"], {"memory_bytes": 1}),
    ],
)
def test_the_schema_sees_what_loading_sees(section: list[str], changes: dict[str, object]) -> None:
    """Unknown keys, wrong types and numbers out of range."""
    document = json.loads(json.dumps(GOOD))
    place = document
    for part in section:
        place = place[part]
    place.update(changes)
    validator = jsonschema.Draft202012Validator(pipeline_schema())
    assert list(validator.iter_errors(document))  # pyright: ignore[reportUnknownMemberType]
