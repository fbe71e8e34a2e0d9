"""Each mistake in a configuration has one line that names its place and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.config.loading import load_settings
from stretto.config.overrides import flag_overrides
from stretto.errors import ConfigError

GOOD = """\
version: 1
name: voice
inputs: [text]
outputs: {audio: vocoder}
stages:
  talker:
    backend: scripted
    inputs:
      text: {from: request.text}
  vocoder:
    backend: scripted
    replicas: 2
    options: {script: {mode: count}}
    environment: {OMP_NUM_THREADS: "1"}
    inputs:
      frames: {from: talker, mode: stream}
server: {port: 8000}
orchestrator: {limits: {max_queued: 256}}
"""


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of the test's own, so that error texts name short paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mistakes_of(
    text: str, *, environ: dict[str, str] | None = None, replicas: tuple[str, ...] = ()
) -> list[str]:
    """Return the lines of the error that a file with this text gives."""
    Path("p.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(
            ["p.yaml"], environ=environ or {}, overrides=flag_overrides(replicas=replicas)
        )
    return caught.value.detail.splitlines()


def test_the_file_that_the_table_spoils_is_good() -> None:
    """Without a change there is no mistake."""
    Path("p.yaml").write_text(GOOD)
    settings = load_settings(["p.yaml"], environ={})
    assert [stage.replicas for stage in settings.stages] == [1, 2]


TABLE: list[tuple[str, str, list[str]]] = [
    # unknown, missing and repeated keys
    (
        "replicas: 2",
        "replica: 2",
        ["12:stages.vocoder.replica: unknown key; did you mean 'replicas'?"],
    ),
    (
        "server: {port: 8000}",
        "servr: {port: 8000}",
        ["17:servr: unknown key; did you mean 'server'?"],
    ),
    (
        "{port: 8000}",
        "{prt: 8000}",
        ["17:server.prt: unknown key; did you mean 'port'?"],
    ),
    (
        "{port: 8000}",
        "{colour: red}",
        [
            (
                "17:server.colour: unknown key; known: host, port, api_processes, drain_timeout_s, "
                "receive_timeout_s, max_body_bytes, max_input_chars, first_chunk_timeout_s, admin_key"
            )
        ],
    ),
    (
        "max_queued",
        "max_queue",
        ["18:orchestrator.limits.max_queue: unknown key; did you mean 'max_queued'?"],
    ),
    (
        "mode: stream",
        "mod: stream",
        ["16:stages.vocoder.inputs.frames.mod: unknown key; did you mean 'mode'?"],
    ),
    ("version: 1\n", "", ["1: the key 'version' is missing"]),
    ("name: voice\n", "", ["1: the key 'name' is missing"]),
    (
        "version: 1",
        "version: 2",
        ["1:version: 2 is not supported; this Stretto reads version 1"],
    ),
    (
        "    backend: scripted\n    replicas",
        "    replicas",
        ["10:stages.vocoder: the key 'backend' is missing"],
    ),
    (
        "    inputs:\n      text: {from: request.text}\n",
        "",
        ["6:stages.talker: the key 'inputs' is missing"],
    ),
    (
        "{from: request.text}",
        "{}",
        ["9:stages.talker.inputs.text: the key 'from' is missing"],
    ),
    (
        "replicas: 2",
        "replicas: 2\n    replicas: 3",
        ["13:stages.vocoder: the key 'replicas' is repeated; it was first set in line 12"],
    ),
    # types and ranges
    (
        "replicas: 2",
        "replicas: two",
        ["12:stages.vocoder.replicas: 'two' is not a whole number from 0 to 256"],
    ),
    (
        "replicas: 2",
        "replicas: 2.0",
        ["12:stages.vocoder.replicas: 2.0 is not a whole number from 0 to 256"],
    ),
    (
        "replicas: 2",
        "replicas: true",
        ["12:stages.vocoder.replicas: true is not a whole number from 0 to 256"],
    ),
    (
        "replicas: 2",
        "replicas:",
        ["12:stages.vocoder.replicas: nothing is not a whole number from 0 to 256"],
    ),
    (
        "replicas: 2",
        "replicas: 99999999999999999999",
        [
            "12:stages.vocoder.replicas: '99999999999999999999' does not fit in 64 bits",
        ],
    ),
    (
        "port: 8000",
        "port: 70000",
        ["17:server.port: 70000 is not a whole number from 0 to 65535"],
    ),
    (
        "port: 8000",
        "drain_timeout_s: 10s",
        ["17:server.drain_timeout_s: '10s' is not a number from 0 to 3600"],
    ),
    (
        "port: 8000",
        "drain_timeout_s: .nan",
        ["17:server.drain_timeout_s: '.nan' is not a number from 0 to 3600"],
    ),
    (
        "port: 8000",
        "host: 127",
        ["17:server.host: 127 is not text; put it in quotes"],
    ),
    ("port: 8000", "host: ''", ["17:server.host: it is empty"]),
    (
        "{limits: {max_queued: 256}}",
        "{restart: yes}",
        ["18:orchestrator.restart: 'yes' is neither true nor false"],
    ),
    (
        "{limits: {max_queued: 256}}",
        "{limits: {respawn_min_s: 20}}",
        ["18:orchestrator.limits.respawn_min_s: 20.0 is more than respawn_max_s, 10.0"],
    ),
    (
        "{limits: {max_queued: 256}}",
        "{limits: 5}",
        ["18:orchestrator.limits: 5 is not a mapping of keys to values"],
    ),
    (
        "mode: stream",
        "mode: steam",
        [
            (
                "16:stages.vocoder.inputs.frames.mode: 'steam' is not one of full, stream; "
                "did you mean 'stream'?"
            )
        ],
    ),
    (
        '"1"',
        "1",
        ["14:stages.vocoder.environment.OMP_NUM_THREADS: 1 is not text; put it in quotes"],
    ),
    (
        "OMP_NUM_THREADS",
        "'A=B'",
        ["14:stages.vocoder.environment.A=B: 'A=B' can't name an environment variable"],
    ),
    (
        "backend: scripted\n    inputs:\n      text",
        "backend: my backend\n    inputs:\n      text",
        [
            (
                "7:stages.talker.backend: 'my backend' is not a built-in name such as "
                "'scripted', or 'module:Class'"
            )
        ],
    ),
    (
        "{from: request.text}",
        "{from: request.text, adapter: splitter}",
        ["9:stages.talker.inputs.text.adapter: 'splitter' is not 'module:name'"],
    ),
    (
        "name: voice",
        "name: my voice",
        ["2:name: 'my voice' is not a name: use letters, digits, '-' and '_', a letter first"],
    ),
    (
        "inputs: [text]",
        "inputs: text",
        ["3:inputs: 'text' is not a list of names, for example [text]"],
    ),
    (
        "inputs: [text]",
        "inputs: [text, text]",
        ["3:inputs[1]: the input 'text' is repeated"],
    ),
    ("{audio: vocoder}", "{}", ["4:outputs: it is empty; name at least one"]),
    # names and the graph
    (
        "from: talker",
        "from: talkr",
        ["16:stages.vocoder.inputs.frames.from: unknown source 'talkr'; did you mean 'talker'?"],
    ),
    (
        "from: request.text",
        "from: request.txt",
        [
            (
                "9:stages.talker.inputs.text.from: unknown source 'request.txt'; "
                "did you mean 'request.text'?"
            )
        ],
    ),
    (
        "audio: vocoder",
        "audio: vocodr",
        ["4:outputs.audio: unknown stage 'vocodr'; did you mean 'vocoder'?"],
    ),
    (
        "audio: vocoder",
        "audio: x",
        ["4:outputs.audio: unknown stage 'x'; known: talker, vocoder"],
    ),
    (
        "audio: vocoder",
        "audio: talker",
        ["10:stages.vocoder: stage 'vocoder' leads to no output"],
    ),
    (
        "from: request.text",
        "from: vocoder",
        [
            "5:stages: its edges form a cycle: vocoder -> talker -> vocoder",
            "6:stages.talker: stage 'talker' can't be reached from the request's inputs",
            "10:stages.vocoder: stage 'vocoder' can't be reached from the request's inputs",
        ],
    ),
    # what is no such document at all
    (GOOD, "", ["1: it is empty"]),
    (GOOD, "# nothing\n", ["1: it is empty"]),
    (GOOD, "[1, 2]", ["1: a list is not a pipeline; write keys and values"]),
    ("name: voice", "name: [voice", ["3: not YAML: expected ',' or ']', but got ':'"]),
    ("name: voice", "name: *voice", ["2: not YAML: found undefined alias 'voice'"]),
    (
        "name: voice",
        "name: !!python/name:os.system voice",
        [
            (
                "2:name: the tag 'tag:yaml.org,2002:python/name:os.system' is not supported; "
                "write plain values"
            )
        ],
    ),
    (
        "mode: count",
        "[1]: count",
        ["13:stages.vocoder.options.script: a key must be plain text"],
    ),
    (
        "mode: count",
        "mode: 1e999",
        ["13:stages.vocoder.options.script.mode: '1e999' is too large"],
    ),
    (
        "mode: count",
        'mode: "a\\0b"',
        ["13:stages.vocoder.options.script.mode: 'a\\x00b' holds a character that is not text"],
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "expected"), TABLE, ids=[f"{new[:30]!r}" for _, new, _ in TABLE]
)
def test_a_mistake_is_told_with_its_place_and_the_way_out(
    old: str, new: str, expected: list[str]
) -> None:
    """One change to a good file gives exactly these lines, behind the file's name."""
    assert old in GOOD
    assert mistakes_of(GOOD.replace(old, new, 1)) == [f"p.yaml:{line}" for line in expected]


def test_all_mistakes_come_at_once_in_the_order_of_the_file() -> None:
    """Mistakes of syntax, type, name and graph are one error, sorted by line."""
    text = (
        GOOD.replace("replicas: 2", "replicas: -1")
        .replace("from: talker", "from: talkr")
        .replace("port", "prt")
        .replace("    backend: scripted\n    inputs:\n      text", "    inputs:\n      text")
        .replace("outputs: {audio: vocoder}", "outputs: {audio: talker}")
    )
    assert mistakes_of(text) == [
        "p.yaml:6:stages.talker: the key 'backend' is missing",
        "p.yaml:9:stages.vocoder: stage 'vocoder' leads to no output",
        "p.yaml:11:stages.vocoder.replicas: -1 is not a whole number from 0 to 256",
        (
            "p.yaml:15:stages.vocoder.inputs.frames.from: unknown source 'talkr'; "
            "did you mean 'talker'?"
        ),
        "p.yaml:16:server.prt: unknown key; did you mean 'port'?",
    ]


def test_many_mistakes_are_cut_off_with_their_number() -> None:
    """A file of the wrong kind does not fill the screen."""
    lines = mistakes_of(GOOD + "".join(f"key{number}: 1\n" for number in range(80)))
    assert len(lines) == 51
    assert lines[-1] == "… and 30 more"


PORT_MEANT = ": no such variable; did you mean STRETTO_SERVER__PORT?"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("SERVER__PORT", "http", ":server.port: 'http' is not a whole number from 0 to 65535"),
        ("SERVER__PORT", "", ":server.port: nothing is not a whole number from 0 to 65535"),
        ("SERVER__PROT", "1", ":server.prot: unknown key; did you mean 'port'?"),
        ("SERVER_PORT", "1", PORT_MEANT),
        ("SERVR__PORT", "1", PORT_MEANT),
        ("SERVER__port", "1", PORT_MEANT),
        ("SERVER__PORT__", "1", PORT_MEANT),
        ("XYZ", "1", ": no such variable; use STRETTO_SECTION__KEY"),
        (
            "STAGES__VOCODR__REPLICAS",
            "1",
            ":stages.vocodr: unknown stage; did you mean 'vocoder'?",
        ),
        (
            "STAGES__VOCODER__REPLICA",
            "1",
            ":stages.vocoder.replica: unknown key; did you mean 'replicas'?",
        ),
        ("STAGES__VOCODER", "1", ":stages.vocoder: name one of its keys too"),
        (
            "STAGES__VOCODER__OPTIONS",
            "{a: 1",
            ": not YAML: expected ',' or '}', but got '<stream end>'",
        ),
        ("SERVER__HOST", "\udcff", ": '\\udcff' holds a character that is not text"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(
    name: str, text: str, expected: str
) -> None:
    """A misspelt variable or value is refused like one in a file."""
    variable = f"STRETTO_{name}"
    assert mistakes_of(GOOD, environ={variable: text}) == [f"{variable}{expected}"]


def test_two_variables_can_not_set_the_same_key() -> None:
    """A variable for a whole mapping and one for a part of it would depend on their order."""
    outer = "STRETTO_STAGES__VOCODER__OPTIONS"
    assert mistakes_of(GOOD, environ={f"{outer}__A": "1", outer: "{}"}) == [
        f"{outer}__A:stages.vocoder.options.a: {outer} already sets all of it"
    ]


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        (
            "vocoder=x",
            "--replicas vocoder=x:stages.vocoder.replicas: 'x' is not a whole number from 0 to 256",
        ),
        ("vocodr=2", "--replicas vocodr=2:stages.vocodr: unknown stage; did you mean 'vocoder'?"),
        ("vocoder", "--replicas vocoder: write STAGE=NUMBER, for example vocoder=2"),
    ],
)
def test_a_mistake_in_a_flag_names_the_flag(flag: str, expected: str) -> None:
    """A flag that means nothing is refused."""
    assert mistakes_of(GOOD, replicas=(flag,)) == [expected]


def test_what_can_be_named_instead_is_told() -> None:
    """Wrong names, missing files and folders are told apart, all at once."""
    Path("folder").mkdir()
    Path("binary.yaml").write_bytes(b"\xff\xfe\xfa")
    Path("large.yaml").write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(ConfigError) as caught:
        load_settings(["speach", "./none.yaml", "folder", "binary.yaml", "large.yaml"], environ={})
    assert caught.value.detail.splitlines() == [
        (
            "speach: no such pipeline; did you mean 'speech'? "
            "A file is given by its path, for example ./pipeline.yaml"
        ),
        "none.yaml: it can't be read: No such file or directory",
        "folder: it is not a regular file",
        "binary.yaml: it is not UTF-8 at byte 0",
        "large.yaml: it is larger than 1048576 bytes",
    ]


def test_no_pipeline_is_a_mistake() -> None:
    """A deployment needs at least one pipeline."""
    with pytest.raises(ConfigError, match="name at least one; built in: scripted, speech"):
        load_settings([], environ={})


@pytest.mark.slow
def test_aliases_cost_what_they_repeat() -> None:
    """A document that grows by repeating itself is refused before it has grown."""
    levels = "".join(f"    l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 10))
    text = GOOD.replace(
        "    options: {script: {mode: count}}\n",
        f"    options:\n      l0: &l0 1\n{levels.replace('    l', '      l')}",
    )
    assert any(
        "more than 50000 values, repeats by alias included" in line for line in mistakes_of(text)
    )


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a: " + "[" * 40 + "]" * 40, "a: " + "[" * 5000, "&a [*a]"])
def test_deep_documents_are_refused(text: str) -> None:
    """Nesting without end, written out or by alias, is a mistake like any other."""
    assert any("nested deeper than 32 levels" in line for line in mistakes_of(text))


def test_files_of_one_deployment_must_agree() -> None:
    """Two files may share a stage and a section only if they say the same about them."""
    Path("a.yaml").write_text(GOOD)
    Path("b.yaml").write_text(GOOD.replace("replicas: 2", "replicas: 3").replace("8000", "9000"))
    with pytest.raises(ConfigError) as caught:
        load_settings(["a.yaml", "b.yaml"], environ={})
    assert caught.value.detail.splitlines() == [
        "b.yaml:2:name: the pipeline 'voice' is also in a.yaml:2",
        "b.yaml:10:stages.vocoder: it differs from the same stage in a.yaml:10 by replicas",
        "b.yaml:17:server.port: 9000 differs from 8000 in a.yaml:17; one deployment has one value",
    ]
