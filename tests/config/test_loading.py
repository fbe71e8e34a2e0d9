"""Files, flags and environment become settings, and each value keeps its source."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from stretto.config.loading import built_in_pipelines, load_settings, resolve
from stretto.config.overrides import FLAT_NAMES, flag_overrides
from stretto.config.process_specs import OrchestratorSpec
from stretto.config.schema import RANGES
from stretto.config.settings import OrchestratorSettings, ServerSettings, Settings, StageSettings
from stretto.core.graph import EdgeMode, EdgeSpec, Limits, validated
from stretto.errors import ConfigError
from stretto.types import InputName, RunId, StageId

FILE = """\
version: 1
name: two-step
inputs: [text, style]
outputs: {audio: second-stage}
stages:
  first:
    backend: scripted
    slots: 4
    options: {script: {mode: echo}, list: [1, {a: 2}], when: 2024-01-01, answer: no, rate: 1e3}
    inputs:
      text: {from: request.text, mode: full, adapter: "a.b:C", window_chunks: 2}
      style: {from: request.style}
  second-stage:
    backend: my.module:Class
    inputs:
      chunks: {from: first}
server:
  port: 1111
  drain_timeout_s: 3
orchestrator:
  event_log:
  limits: {max_queued: 9}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with two stages, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(FILE)
    return "p.yaml"


def test_a_file_becomes_settings(path: str) -> None:
    """Every part of the file arrives with its type; what it leaves out has its default."""
    settings = load_settings([path], environ={"HOME": "/root"})
    first, second = settings.stages
    assert first == StageSettings(
        id=StageId("first"),
        backend="scripted",
        slots=4,
        options={
            "script": {"mode": "echo"},
            "list": [1, {"a": 2}],
            "when": "2024-01-01",
            "answer": "no",
            "rate": 1000.0,
        },
    )
    assert second == StageSettings(id=StageId("second-stage"), backend="my.module:Class")
    assert settings.server == ServerSettings(port=1111, drain_timeout_s=3.0)
    assert settings.orchestrator == OrchestratorSettings(limits=Limits(max_queued=9))
    (pipeline,) = settings.pipelines
    assert pipeline.edges[0] == EdgeSpec(
        target=StageId("first"),
        name="text",
        request_input=InputName("text"),
        mode=EdgeMode.FULL,
        adapter="a.b:C",
        window_chunks=2,
    )
    assert [edge.id for edge in pipeline.edges] == [
        "request.text->first.text",
        "request.style->first.style",
        "first->second-stage.chunks",
    ]
    validated(settings.deployment())


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(
    path: str,
) -> None:
    """Each level wins over the next, and the source of every value says which level it was."""
    environ = {
        "STRETTO_SERVER__PORT": "2222",
        "STRETTO_SERVER__HOST": "::1",
        "STRETTO_ORCHESTRATOR__LIMITS__MAX_QUEUED": "10",
        "STRETTO_STAGES__SECOND_STAGE__REPLICAS": "2",
        "STRETTO_STAGES__FIRST__OPTIONS__SCRIPT": "{mode: count, delay_s: 0.5}",
        "STRETTO_STAGES__FIRST__REPLICAS": "5",
    }
    flags = flag_overrides(port=3333, restart=False, replicas=["first=3"])
    resolved = resolve([path], environ=environ, overrides=flags)
    settings, sources = resolved.settings, resolved.sources
    first, second = settings.stages

    assert (settings.server.port, sources["server.port"]) == (3333, "--port")
    assert (settings.server.host, sources["server.host"]) == ("::1", "STRETTO_SERVER__HOST")
    assert (settings.server.drain_timeout_s, sources["server.drain_timeout_s"]) == (
        3.0,
        "p.yaml:19",
    )
    assert sources["server.max_body_bytes"] == "default"
    assert (settings.orchestrator.restart, sources["orchestrator.restart"]) == (
        False,
        "--no-restart",
    )
    assert settings.orchestrator.limits.max_queued == 10
    assert sources["orchestrator.limits.max_queued"] == "STRETTO_ORCHESTRATOR__LIMITS__MAX_QUEUED"
    assert (first.replicas, sources["stages.first.replicas"]) == (3, "--replicas first=3")
    assert first.options["script"] == {"mode": "count", "delay_s": 0.5}
    assert first.options["list"] == [1, {"a": 2}]
    assert sources["stages.first.options.script.mode"] == "STRETTO_STAGES__FIRST__OPTIONS__SCRIPT"
    assert sources["stages.first.options.list"] == "p.yaml:9"
    assert second.replicas == 2
    assert sources["stages.second-stage.replicas"] == "STRETTO_STAGES__SECOND_STAGE__REPLICAS"
    edge = "pipelines.two-step.stages.first.inputs.text"
    assert sources[f"{edge}.from"] == sources[f"{edge}.mode"] == "p.yaml:11"
    assert sources[f"{edge}.window_bytes"] == "default"
    assert sources["pipelines.two-step.outputs.audio"] == "p.yaml:4"


def test_every_setting_has_a_source(path: str) -> None:
    """No value of the server, the orchestrator or a stage is without one."""
    sources = resolve([path], environ={}).sources
    expected = {f"server.{field}" for field in ServerSettings.__struct_fields__}
    expected |= {f"orchestrator.limits.{field}" for field in Limits.__struct_fields__}
    expected |= {"orchestrator.event_log", "orchestrator.restart"}
    expected |= {
        f"stages.second-stage.{field}" for field in StageSettings.__struct_fields__ if field != "id"
    }
    assert expected <= set(sources)


def keys_of_every_level() -> list[str]:
    """Return each key that a variable can name, by its dotted path."""
    keys = [f"server.{field}" for field in ServerSettings.__struct_fields__]
    keys += [f"orchestrator.{field}" for field in OrchestratorSettings.__struct_fields__]
    keys += [f"orchestrator.limits.{field}" for field in Limits.__struct_fields__]
    keys += [f"stages.first.{field}" for field in StageSettings.__struct_fields__ if field != "id"]
    return [*keys, "stages.first.inputs", "stages.first.inputs.text.mode"]


@pytest.mark.parametrize("key", keys_of_every_level())
def test_a_misspelt_key_of_any_level_is_refused(path: str, key: str) -> None:
    """A letter too many is never taken for a key that nobody reads."""
    name = f"STRETTO_{key.upper().replace('.', '__')}X"
    with pytest.raises(ConfigError, match="unknown key; did you mean"):
        load_settings([path], environ={name: "1"})


@pytest.mark.parametrize(
    "key", [key for key in keys_of_every_level() if key.rpartition(".")[2] in RANGES]
)
@pytest.mark.parametrize("text", ["-1", ".nan", ".inf", "nan", "10s", '""', "1e300", "[]"])
@pytest.mark.parametrize("way", ["environment", "file"])
def test_situation_J5_no_number_takes_a_value_that_switches_it_off_by_accident(
    path: str, key: str, text: str, way: str
) -> None:
    """Negative, endless, empty and unit-bearing values are refused, with the key's name and its range."""
    environ: dict[str, str] = {}
    if way == "environment":
        environ[f"STRETTO_{key.upper().replace('.', '__')}"] = text.strip('"')
    else:
        Path(path).write_text(with_value(key, text))
    with pytest.raises(ConfigError, match=r"is not a (whole )?number from .* to ") as caught:
        load_settings([path], environ=environ)
    assert key.rpartition(".")[2] in str(caught.value)


def with_value(key: str, text: str) -> str:
    """Return the file with one value set to a text."""
    if key == "stages.first.inputs.text.mode":
        return FILE.replace("mode: full", f"mode: {text}")
    section, _, name = key.rpartition(".")
    lines = [line for line in FILE.splitlines() if not line.strip().startswith(f"{name}:")]
    at, indent = {
        "server": (lines.index("server:"), "  "),
        "orchestrator": (lines.index("orchestrator:"), "  "),
        "orchestrator.limits": (lines.index("orchestrator:"), "  "),
        "stages.first": (lines.index("  first:"), "    "),
    }[section]
    if section == "orchestrator.limits":
        lines = [line for line in lines if not line.strip().startswith("limits:")]
        lines.insert(at + 1, f"  limits: {{{name}: {text}}}")
    else:
        lines.insert(at + 1, f"{indent}{name}: {text}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "cuda:1000", "0"])
def test_a_device_has_a_form(path: str, device: str) -> None:
    """The text says what it may be."""
    with pytest.raises(ConfigError, match="cpu, cuda, or cuda:N"):
        load_settings([path], environ={"STRETTO_STAGES__FIRST__DEVICE": device})


def test_memory_is_a_number_or_nothing(path: str) -> None:
    """`null` is no limit, as nothing at all is."""
    name = "STRETTO_STAGES__FIRST__MEMORY_BYTES"
    for text, expected in (("null", None), ("100000000", 100_000_000)):
        assert load_settings([path], environ={name: text}).stages[0].memory_bytes == expected


def test_modules_are_found_beside_the_files(path: str) -> None:
    """Built-in pipelines have no folder."""
    settings = load_settings([path, "scripted"], environ={})
    assert settings.module_folders == (str(Path.cwd()),)


def test_every_number_has_a_range_that_holds_its_default() -> None:
    """A new setting can't be forgotten in the table of ranges, nor an old one stay in it."""
    numbers: dict[str, object] = {}
    for struct in (StageSettings, ServerSettings, OrchestratorSettings, Limits, EdgeSpec):
        for field in inspect.type_info(struct).fields:  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
            assert isinstance(field, inspect.Field)
            if isinstance(field.type, inspect.IntType | inspect.FloatType):
                low, high = RANGES[field.name]
                assert isinstance(field.default, int | float)
                assert low <= field.default <= high, field.name
                numbers[field.name] = field.default
            elif isinstance(field.type, inspect.UnionType) and any(
                isinstance(kind, inspect.IntType) for kind in field.type.types
            ):
                assert field.default is None
                numbers[field.name] = RANGES[field.name][0]
    assert set(numbers) == set(RANGES)


@pytest.mark.parametrize("name", built_in_pipelines())
def test_a_built_in_pipeline_is_sound(name: str) -> None:
    """Each file shipped with Stretto loads, has a sound graph, and survives the way to a child."""
    settings = load_settings([name], environ={})
    assert [pipeline.name for pipeline in settings.pipelines] == [name]
    validated(settings.deployment())
    spec = OrchestratorSpec(
        run=RunId("r"),
        epoch=1,
        channel_fd=3,
        run_directory="/tmp/r",
        shared_memory_dir=None,
        settings=settings,
    )
    assert msgspec.json.decode(msgspec.json.encode(spec), type=OrchestratorSpec) == spec


def test_speech_is_talker_then_vocoder() -> None:
    """The default pipeline streams text into the talker and frames into the vocoder."""
    (pipeline,) = load_settings(["speech"], environ={}).pipelines
    assert [(edge.id, edge.mode.value) for edge in pipeline.edges] == [
        ("request.text->talker.text", "stream"),
        ("talker->vocoder.frames", "stream"),
    ]
    assert [(output.name, output.stage) for output in pipeline.outputs] == [("audio", "vocoder")]


@pytest.mark.parametrize("name", built_in_pipelines())
def test_the_adapters_of_built_in_pipelines_exist(name: str) -> None:
    """What an edge of a shipped file names can be imported."""
    (pipeline,) = load_settings([name], environ={}).pipelines
    for adapter in filter(None, [edge.adapter for edge in pipeline.edges]):
        module, _, attribute = adapter.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))


def test_several_pipelines_make_one_deployment(path: str) -> None:
    """Each file is a pipeline, their stages are one pool, a stage that is equal counts once."""
    Path("q.yaml").write_text(
        FILE.replace("two-step", "again").replace("port: 1111", "host: localhost")
    )
    settings = load_settings([path, "q.yaml", "scripted"], environ={})
    assert [pipeline.name for pipeline in settings.pipelines] == ["two-step", "again", "scripted"]
    assert [stage.id for stage in settings.stages] == ["first", "second-stage", "relay", "tone"]
    assert (settings.server.port, settings.server.host) == (1111, "localhost")
    validated(settings.deployment())


def test_an_override_of_a_shared_stage_holds_for_both_files(path: str) -> None:
    """A flag does not make two files disagree."""
    Path("q.yaml").write_text(FILE.replace("two-step", "again"))
    flags = flag_overrides(replicas=["first=3"])
    settings = load_settings([path, "q.yaml"], environ={}, overrides=flags)
    assert settings.stages[0].replicas == 3


def test_settings_survive_json(path: str) -> None:
    """What is read can be sent to a child process and is equal there."""
    settings = load_settings([path], environ={})
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


def test_settings_are_loaded_without_heavy_imports() -> None:
    """The orchestrator can read its settings with neither YAML nor numpy loaded."""
    heavy = "{'yaml', 'numpy', 'asyncio'}"
    code = f"import sys, stretto.config.process_specs; print({heavy} & set(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert printed.stdout == "set()\n"


def test_flat_names_have_our_prefix() -> None:
    """The inventory of variables that are no keys holds only our own."""
    assert all(name.startswith("STRETTO_") and "__" not in name for name in FLAT_NAMES)
