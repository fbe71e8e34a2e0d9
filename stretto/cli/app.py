"""The verbs of `stretto`. Each imports what it needs when it is called, so that `--help` is quick."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from stretto import __version__
from stretto.cli import exits
from stretto.errors import ConfigError, EngineDead, StartFailed, StrettoError

app = typer.Typer(
    name="stretto",
    help="Serve multi-stage generative models: each stage starts before the previous one has finished.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Pipelines = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PIPELINE]...",
        help="Built-in pipelines or YAML files; without any: speech.",
        show_default=False,
    ),
]


Host = Annotated[
    str | None,
    typer.Option("--host", help="Address to bind. [default: 127.0.0.1]", show_default=False),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port", help="TCP port; 0 takes a free one. [default: 8000]", show_default=False
    ),
]
ApiProcessCount = Annotated[
    int | None,
    typer.Option(
        "--api-processes",
        metavar="N",
        help="Processes that serve HTTP on the port. [default: 1]",
        show_default=False,
    ),
]
Replicas = Annotated[
    list[str] | None,
    typer.Option(
        "--replicas",
        metavar="STAGE=N",
        help="Replicas of a stage; repeat for more stages.",
        show_default=False,
    ),
]
DrainTimeout = Annotated[
    float | None,
    typer.Option(
        "--drain-timeout",
        metavar="SECONDS",
        help="How long SIGTERM waits for running requests.",
        show_default=False,
    ),
]
Restart = Annotated[
    bool | None,
    typer.Option("--restart/--no-restart", help="Restart a dead orchestrator.", show_default=False),
]
EventLog = Annotated[
    str | None,
    typer.Option(
        "--event-log",
        metavar="FILE",
        help="Write the router's events as JSON lines.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def serve(
    pipelines: Pipelines = None,
    *,
    host: Host = None,
    port: Port = None,
    api_processes: ApiProcessCount = None,
    replicas: Replicas = None,
    drain_timeout: DrainTimeout = None,
    restart: Restart = None,
    event_log: EventLog = None,
    debug: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="Run this stage inside this process, so that breakpoint() in its backend works.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start a server for one or more pipelines and speak the OpenAI API."""
    from stretto.cli.serving import serve_until_stopped
    from stretto.config.loading import load_settings
    from stretto.config.overrides import flag_overrides
    from stretto.config.settings import TOKEN_VARIABLE

    overrides = flag_overrides(
        host=host,
        port=port,
        api_processes=api_processes,
        drain_timeout_s=drain_timeout,
        restart=restart,
        event_log=event_log,
        replicas=replicas or [],
    )
    settings = load_settings(pipelines or ["speech"], environ=os.environ, overrides=overrides)
    os.environ.pop(TOKEN_VARIABLE, None)  # replicas inherit the rest; no backend needs to know it
    raise typer.Exit(serve_until_stopped(settings, debug))


@app.command()
def say(
    text: Annotated[str, typer.Argument(help="What to say; - reads standard input.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="WAV file to write; - writes to standard output.")
    ] = Path("speech.wav"),
    voice: Annotated[str, typer.Option(help="Voice name.")] = "heart",
    speed: Annotated[float, typer.Option(help="1.0 is the voice's own pace.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_BASE_URL",
            help="A server such as http://127.0.0.1:8000/v1; without it an engine is started and ended.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Turn text into a WAV file of speech."""
    from stretto.cli.saying import say_by_engine, say_by_server

    said = sys.stdin.read() if text == "-" else text
    options = {"voice": voice, "speed": speed, "seed": seed}
    if not url:
        say_by_engine(said, options, output)
    else:
        say_by_server(url, said, options, output)


@app.command()
def doctor(
    pipelines: Pipelines = None,
    *,
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Have one sentence made.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Look at what this machine offers to a pipeline, and have it make one sentence."""
    from stretto.cli.doctor import examine

    code = examine(
        pipelines or ["speech"], os.environ, typer.echo, as_json=as_json, self_test=self_test
    )
    raise typer.Exit(code)


@app.command()
def replay(
    log: Annotated[
        Path, typer.Argument(help="A file that `stretto serve --event-log` has written.")
    ],
    *,
    until: Annotated[
        int | None, typer.Option(metavar="LINE", help="Stop after this line.", show_default=False)
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Show this request, by its id or the client's.", show_default=False
        ),
    ] = None,
) -> None:
    """Run an event log through a fresh router and say whether the same comes out."""
    from stretto.cli.replaying import replay_log

    raise typer.Exit(replay_log(log, typer.echo, until=until, request=request))


OnlyRun = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="Ask this engine only.", show_default=False),
]


@app.command()
def ps(*, run: OnlyRun = None, as_json: AsJson = False) -> None:
    """List the engines that run, their replicas, and what each open request waits for."""
    from stretto.cli.asking import list_runs

    raise typer.Exit(list_runs(typer.echo, only=run, as_json=as_json))


@app.command()
def story(
    request: Annotated[str, typer.Argument(help="The engine's id, or the client's x-request-id.")],
    *,
    run: OnlyRun = None,
    as_json: AsJson = False,
) -> None:
    """Tell what happened to a request, open or just ended, and what it waits for."""
    from stretto.cli.asking import tell_story

    raise typer.Exit(tell_story(request, typer.echo, only=run, as_json=as_json))


@app.command()
def call(
    method: Annotated[
        str, typer.Argument(help="For example ping, statistics, profile_start, sleep or wake.")
    ],
    *,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE",
            help="Only at this stage's replicas; repeat for more stages.",
            show_default=False,
        ),
    ] = None,
    argument: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Pass this to the method: JSON, or a text; repeat for more.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the answers may take.")
    ] = 10.0,
    run: OnlyRun = None,
    as_json: AsJson = False,
) -> None:
    """Have a method called at the replicas of an engine, beside what it is doing."""
    from stretto.cli.calling import call_method

    code = call_method(
        method,
        typer.echo,
        stages=stage or [],
        arguments=argument or [],
        timeout_s=timeout,
        only=run,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command()
def scale(
    orders: Annotated[
        list[str], typer.Argument(metavar="STAGE=N...", help="For example vocoder=3.")
    ],
    *,
    run: OnlyRun = None,
) -> None:
    """Change how many replicas stages have, while the server runs."""
    from stretto.cli.asking import scale_stages

    raise typer.Exit(scale_stages(orders, typer.echo, only=run))


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(metavar="STAGE/SLOT", help="As `stretto ps` shows it.")],
    *,
    replace: Annotated[
        bool, typer.Option("--replace", help="Start another one at once: a restart without a gap.")
    ] = False,
    run: OnlyRun = None,
) -> None:
    """Let one replica finish what it has and leave."""
    from stretto.cli.asking import drain_replica

    raise typer.Exit(drain_replica(replica, typer.echo, only=run, replace=replace))


PerStage = list[str] | None


@app.command()
def simulate(
    pipeline: Annotated[
        str | None,
        typer.Argument(
            help="A built-in pipeline or a YAML file; with --storm it may be left out.",
            show_default=False,
        ),
    ] = None,
    *,
    rate: Annotated[float, typer.Option(metavar="R", help="Requests per second.")] = 1.0,
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", help="For how long requests come.")
    ] = 60.0,
    length: Annotated[
        str, typer.Option(metavar="DIST", help="Seconds of playback of a request.")
    ] = "lognormal:6,0.5",
    service: Annotated[
        PerStage,
        typer.Option(
            metavar="STAGE=DIST",
            help="How long a step takes that makes one chunk: constant:S, uniform:LOW,HIGH, "
            "exponential:MEAN, lognormal:MEAN,SIGMA, or rtf:FACTOR of the chunk's playback.",
            show_default=False,
        ),
    ] = None,
    chunk: Annotated[
        PerStage,
        typer.Option(
            metavar="STAGE=SECONDS", help="Playback of a chunk. [default: 0.5]", show_default=False
        ),
    ] = None,
    batch_cost: Annotated[
        PerStage,
        typer.Option(
            metavar="STAGE=SHARE",
            help="What a further task adds to a step: 1 all of its own, 0 nothing. [default: 1]",
            show_default=False,
        ),
    ] = None,
    replicas: Replicas = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Which output is heard. [default: the first]", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same run.")] = 0,
    target_ttfa_p95: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Find the smallest replica counts for this time to first audio.",
            show_default=False,
        ),
    ] = None,
    target_underruns: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Let them keep the share of interrupted requests this small, too.",
            show_default=False,
        ),
    ] = None,
    max_replicas: Annotated[
        int, typer.Option(metavar="N", help="Most replicas of a stage in that search.", min=1)
    ] = 256,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the result as SVG.", show_default=False),
    ] = None,
    storm: Annotated[
        bool, typer.Option("--storm", help="Try faults in small worlds instead of a load.")
    ] = False,
    seeds: Annotated[int, typer.Option(metavar="N", help="How many storms.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Ask the router on virtual time: how long a load waits, how many replicas it needs, what faults do."""
    from stretto.cli.simulating import Load, simulate_load, simulate_storms

    if storm:
        raise typer.Exit(
            simulate_storms(
                pipeline, os.environ, typer.echo, seeds=seeds, first=seed, as_json=as_json
            )
        )
    load = Load(
        rate=rate,
        duration_s=duration,
        length=length,
        service=service or [],
        chunk=chunk or [],
        batch_cost=batch_cost or [],
        replicas=replicas or [],
        output=output,
        seed=seed,
        target_ttfa_p95_s=target_ttfa_p95,
        target_underruns=target_underruns,
        most=max_replicas,
    )
    raise typer.Exit(
        simulate_load(
            pipeline or "speech", os.environ, load, typer.echo, picture=picture, as_json=as_json
        )
    )


replica_verbs = typer.Typer(help="Serve a stage from another host.", no_args_is_help=True)
app.add_typer(replica_verbs, name="replica")


@replica_verbs.command("join")
def replica_join(
    *,
    stage: Annotated[str, typer.Option(metavar="STAGE", help="Which stage of the server.")],
    connect: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="The server's `orchestrator.join_address`."),
    ],
    silence: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Take a server that is silent for so long for gone."),
    ] = 6.0,
) -> None:
    """Join a running server as one more replica; the token is in STRETTO_ORCHESTRATOR__JOIN_TOKEN."""
    from stretto.config.settings import TOKEN_VARIABLE
    from stretto.replica.process import join
    from stretto.transport.tcp import address_of
    from stretto.types import StageId

    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} is not set; give it the server's join token")
    join(StageId(stage), address_of(connect), token, silence)


config = typer.Typer(help="Show, check and explain the configuration.", no_args_is_help=True)
app.add_typer(config, name="config")


@config.command("show")
def config_show(
    pipelines: Pipelines = None,
    *,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Show defaults too, each value with its source.")
    ] = False,
    host: Host = None,
    port: Port = None,
    api_processes: ApiProcessCount = None,
    replicas: Replicas = None,
    drain_timeout: DrainTimeout = None,
    restart: Restart = None,
    event_log: EventLog = None,
) -> None:
    """Print what is set and by whom: flag, variable, file and line."""
    from stretto.cli.configuring import show
    from stretto.config.overrides import flag_overrides

    overrides = flag_overrides(
        host=host,
        port=port,
        api_processes=api_processes,
        drain_timeout_s=drain_timeout,
        restart=restart,
        event_log=event_log,
        replicas=replicas or [],
    )
    show(pipelines or ["speech"], os.environ, overrides, typer.echo, resolved=resolved)


@config.command("check")
def config_check(
    pipelines: Annotated[
        list[str], typer.Argument(metavar="PIPELINE...", help="Files or built-in pipelines.")
    ],
) -> None:
    """Name every mistake with file, line and key; nothing is started."""
    from stretto.cli.configuring import check

    check(pipelines, os.environ, typer.echo)


@config.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of a pipeline file, for editors."""
    from stretto.cli.configuring import schema

    schema(typer.echo)


@config.command("explain")
def config_explain(
    key: Annotated[
        str, typer.Argument(metavar="[KEY]", help="For example server.port, or a section.")
    ] = "",
) -> None:
    """Say what a key means, what it may be, and what sets it."""
    from stretto.cli.configuring import explain

    raise typer.Exit(explain(key, typer.echo))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def run() -> int:
    """Parse the command line and run a verb; errors become one line and an exit code."""
    try:
        app()
    except SystemExit as done:  # typer reports its own usage errors and ends this way
        return done.code if isinstance(done.code, int) else exits.OK
    except KeyboardInterrupt:
        return exits.SECOND_SIGNAL + signal.SIGINT
    except ConfigError as error:
        return _complain(error, exits.USAGE)
    except (StartFailed, EngineDead) as error:
        return _complain(error, exits.NOT_STARTED)
    except (StrettoError, OSError) as error:
        return _complain(error, exits.FAILED)
    return exits.OK


def _complain(error: Exception, code: int) -> int:
    with suppress(OSError):
        sys.stderr.write(f"stretto: {error}\n")
    return code
