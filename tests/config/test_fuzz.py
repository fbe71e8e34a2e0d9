"""Whatever a file, a flag or the environment says, the answer is settings or a `ConfigError`."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stretto.config.loading import load_settings
from stretto.config.overrides import flag_overrides
from stretto.config.settings import ServerSettings, Settings, StageSettings
from stretto.core.graph import EdgeSpec, Limits
from stretto.errors import ConfigError

KEYS = [
    *(
        "version",
        "name",
        "inputs",
        "outputs",
        "stages",
        "server",
        "orchestrator",
        "limits",
        "from",
        "a",
        "b",
    ),
    *StageSettings.__struct_fields__,
    *ServerSettings.__struct_fields__,
    *Limits.__struct_fields__,
    *EdgeSpec.__struct_fields__,
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["a", "b", "request.a", "a.b:C", "scripted", "stream"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)
STAGES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.fixed_dictionaries(
        {
            "backend": st.just("scripted") | VALUES,
            "inputs": st.dictionaries(
                st.sampled_from(["a", "b"]),
                VALUES
                | st.fixed_dictionaries({"from": st.sampled_from(["a", "b", "c", "request.a"])}),
            ),
        },
        optional={key: VALUES for key in StageSettings.__struct_fields__ if key != "backend"},
    )
    | VALUES,
    max_size=3,
)
DOCUMENTS = VALUES | st.fixed_dictionaries(
    {
        "version": st.just(1) | VALUES,
        "name": st.just("p") | VALUES,
        "inputs": st.just(["a"]) | VALUES,
        "outputs": st.just({"o": "a"}) | VALUES,
        "stages": STAGES | VALUES,
    },
    optional={"server": VALUES, "orchestrator": VALUES},
)


def load_text(text: str | bytes, environ: dict[str, str] | None = None) -> Settings | None:
    """Return the settings of a file with this text; a `ConfigError` gives `None`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            return load_settings([str(path)], environ=environ or {})
        except ConfigError:
            return None


@given(DOCUMENTS)
@pytest.mark.slow
@settings(max_examples=60, deadline=None)
def test_any_mapping_gives_settings_or_a_config_error(document: object) -> None:
    """YAML of any content is accepted or refused, and what is accepted survives JSON."""
    loaded = load_text(json.dumps(document))
    if loaded is not None:
        assert msgspec.json.decode(msgspec.json.encode(loaded), type=Settings) == loaded


@given(
    st.text(alphabet="ab:-[]{}&*!|>%@`'\"#,?.~ \n\t\\x0u1", max_size=60) | st.binary(max_size=40)
)
@example('a: "\\U00110000"')
@example('a: "\\ud800"')
@example("a: \x00")
@example("? [a]\n: b")
@example("<<: 1")
@example("--- a\n--- b")
@pytest.mark.slow
@settings(max_examples=60, deadline=None)
def test_any_text_gives_a_config_error(text: str | bytes) -> None:
    """Bytes that are no pipeline are refused, whatever they do to the YAML reader."""
    assert load_text(text) is None


@given(
    st.dictionaries(
        st.lists(
            st.sampled_from([*KEYS, "relay", "tone", "script", ""]), min_size=1, max_size=5
        ).map(lambda parts: "STRETTO_" + "__".join(parts).upper()),
        st.text(alphabet="a1.-{}[]:,&*\"' ", max_size=8),
        max_size=4,
    )
)
@pytest.mark.slow
@settings(max_examples=60, deadline=None)
def test_any_environment_gives_settings_or_a_config_error(environ: dict[str, str]) -> None:
    """No variable gets past the check and none breaks it."""
    with suppress(ConfigError):
        load_settings(["scripted"], environ=environ)


@given(st.lists(st.text(max_size=8), max_size=3), st.integers(), st.floats(), st.text(max_size=5))
@pytest.mark.slow
@settings(max_examples=60, deadline=None)
def test_any_flags_give_settings_or_a_config_error(
    replicas: list[str], port: int, drain_timeout_s: float, host: str
) -> None:
    """A flag's value is checked like one of a file."""
    with suppress(ConfigError):
        load_settings(
            ["scripted"],
            environ={},
            overrides=flag_overrides(
                host=host, port=port, drain_timeout_s=drain_timeout_s, replicas=replicas
            ),
        )
