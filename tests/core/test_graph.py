"""What is deployed: every mistake is found at once, and requests get the right part of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.core.graph import (
    Deployment,
    EdgeSpec,
    Limits,
    PipelineSpec,
    Plan,
    StageSpec,
    induce,
    validated,
)
from stretto.errors import ConfigError
from stretto.types import InputName, OutputName, PipelineName, StageId
from tests.core.builders import (
    AUDIO,
    FULL,
    TEXT,
    VOICE,
    WORDS,
    A,
    B,
    C,
    D,
    deployment,
    diamond,
    edge,
    line_of_2,
    line_of_3,
    pipeline,
    shared,
)

if TYPE_CHECKING:
    from collections.abc import Callable

X, Y = StageId("x"), StageId("y")


def plan_of(spec: PipelineSpec, *inputs: InputName, outputs: tuple[OutputName, ...] = ()) -> Plan:
    """Return the plan for some inputs and some or all outputs."""
    wanted = outputs or tuple(output.name for output in spec.outputs)
    plan = induce(spec, inputs or spec.inputs, wanted)
    assert plan is not None
    return plan


def buffered(*edges: EdgeSpec, output: StageId) -> set[str]:
    """Return the ids of the stage edges that must buffer."""
    plan = plan_of(pipeline(*edges, outputs=[(AUDIO, output)]))
    return {each for each in plan.buffered if not each.startswith("request.")}


@pytest.mark.parametrize("make", [line_of_2, line_of_3, diamond, shared])
def test_sound_deployments_are_returned_unchanged(make: Callable[[], Deployment]) -> None:
    """Validation changes nothing."""
    sound = make()
    assert validated(sound) is sound


def mistakes(broken: Deployment) -> list[str]:
    """Return the lines of the error."""
    with pytest.raises(ConfigError) as caught:
        validated(broken)
    return caught.value.detail.splitlines()


def test_all_mistakes_are_listed_at_once() -> None:
    """One error names every mistake of stages, limits, edges and outputs."""
    broken = Deployment(
        stages=(
            StageSpec(id=A, replicas=-1),
            StageSpec(id=A, slots=0),
            StageSpec(id=D, chunk_timeout_s=0.0, start_timeout_s=-1.0),
        ),
        pipelines=(
            pipeline(
                edge(TEXT, A),
                edge(TEXT, A),
                edge(X, A),
                edge(A, Y, chunks=0),
                edge(VOICE, A, nbytes=0),
                outputs=[(AUDIO, X), (AUDIO, A)],
                inputs=(TEXT, TEXT),
            ),
            pipeline(edge(TEXT, A), outputs=[], name="silent"),
            pipeline(edge(TEXT, A), outputs=[(AUDIO, A)], name="silent"),
        ),
        limits=Limits(max_queued=0, respawn_min_s=-0.5),
    )
    assert mistakes(broken) == [
        "stage 'a' is defined twice",
        "pipeline 'silent' is defined twice",
        "stage 'a': replicas is -1, use 0 or more",
        "stage 'a': slots is 0, use 1 or more",
        "stage 'd' is in no pipeline",
        "stage 'd': chunk_timeout_s is 0.0, use more than 0",
        "stage 'd': start_timeout_s is -1.0, use more than 0",
        "limit max_queued is 0, use more than 0",
        "limit respawn_min_s is -0.5, use more than 0",
        "pipeline 'p': input 'text' is defined twice",
        "pipeline 'p': edge 'request.text->a.in' is defined twice",
        "pipeline 'p': output 'audio' is defined twice",
        "pipeline 'p': edge 'x->a.in' has the unknown source 'x'",
        "pipeline 'p': edge 'a->y.in' leads to the unknown stage 'y'",
        "pipeline 'p': edge 'a->y.in' has an empty window: use 1 or more",
        "pipeline 'p': edge 'request.voice->a.in' has the unknown source 'request.voice'",
        "pipeline 'p': edge 'request.voice->a.in' has an empty window: use 1 or more",
        "pipeline 'p': output 'audio' names the unknown stage 'x'",
        "pipeline 'silent': it has no output: name at least one stage under `outputs`",
        "pipeline 'silent': stage 'a' leads to no output",
    ]


def test_a_deployment_needs_a_pipeline() -> None:
    """Nothing to serve is a mistake."""
    assert mistakes(Deployment(stages=(), pipelines=())) == ["no pipeline: name at least one"]


def test_a_cycle_is_named_in_its_order() -> None:
    """The error shows the way round."""
    spec = pipeline(
        edge(TEXT, A), edge(A, B), edge(A, C), edge(B, C), edge(C, B), outputs=[(AUDIO, C)]
    )
    assert mistakes(deployment(spec)) == ["pipeline 'p': its edges form a cycle: c -> b -> c"]


def test_a_stage_that_feeds_itself_is_a_cycle() -> None:
    """The shortest cycle has one stage."""
    spec = pipeline(edge(TEXT, A), edge(A, A, name="again"), outputs=[(AUDIO, A)])
    assert mistakes(deployment(spec)) == ["pipeline 'p': its edges form a cycle: a -> a"]


def test_stages_that_nothing_reaches_or_that_reach_nothing_are_named() -> None:
    """A stage must lie between the inputs and the outputs."""
    spec = pipeline(
        edge(TEXT, A), edge(A, B), edge(C, A, name="side"), edge(A, D), outputs=[(AUDIO, B)]
    )
    assert mistakes(deployment(spec)) == [
        "pipeline 'p': stage 'c' can't be reached from the request's inputs",
        "pipeline 'p': stage 'd' leads to no output",
    ]


def test_a_plan_has_its_stages_in_topological_order() -> None:
    """Whatever the order of declaration, sources come first."""
    spec = pipeline(edge(B, C), edge(A, B), edge(TEXT, A), outputs=[(AUDIO, C)])
    plan = plan_of(spec)
    assert plan.stages == (A, B, C)
    assert [e.id for e in plan.edges_in[B]] == ["a->b.in"]
    assert [e.id for e in plan.edges_out[B]] == ["b->c.in"]
    assert [e.id for e in plan.request_edges] == ["request.text->a.in"]
    assert plan.outputs == {A: (), B: (), C: (AUDIO,)}


def test_a_request_for_words_leaves_out_the_speaking_stage() -> None:
    """The plan contains only what the wanted outputs need."""
    chat, _ = shared().pipelines
    assert plan_of(chat, TEXT, outputs=(WORDS,)).stages == (A,)
    assert plan_of(chat, TEXT, outputs=(AUDIO,)).stages == (A, B)
    assert plan_of(chat, TEXT, outputs=(AUDIO,)).outputs == {A: (), B: (AUDIO,)}


def test_an_edge_whose_source_is_not_in_the_plan_does_not_exist() -> None:
    """A request that brings words needs no stage that hears them."""
    spec = pipeline(
        edge(VOICE, A),
        edge(A, B, name="heard"),
        edge(TEXT, B, name="typed"),
        outputs=[(AUDIO, B)],
        inputs=(VOICE, TEXT),
    )
    assert [e.name for e in plan_of(spec, TEXT).edges_in[B]] == ["typed"]
    assert [e.name for e in plan_of(spec, VOICE).edges_in[B]] == ["heard"]
    assert plan_of(spec, VOICE, TEXT).stages == (A, B)


def test_inputs_that_do_not_lead_to_a_wanted_output_give_no_plan() -> None:
    """Every wanted output must be reachable."""
    spec = pipeline(
        edge(TEXT, A), edge(VOICE, B), outputs=[(WORDS, A), (AUDIO, B)], inputs=(TEXT, VOICE)
    )
    assert induce(spec, (TEXT,), (WORDS, AUDIO)) is None
    assert induce(spec, (TEXT,), (AUDIO,)) is None
    assert induce(spec, (TEXT,), ()) is None


def test_groups_are_stages_that_stream_concurrently() -> None:
    """A full edge separates groups; streams join them."""
    spec = pipeline(
        edge(TEXT, A), edge(A, B), edge(B, C, mode=FULL), edge(C, D), outputs=[(AUDIO, D)]
    )
    assert plan_of(spec).groups == {A: (A, B), B: (A, B), C: (C, D), D: (C, D)}


def test_a_line_of_streams_buffers_nothing() -> None:
    """Where only streams are, the window bounds the source."""
    assert buffered(edge(TEXT, A), edge(A, B), edge(B, C), output=C) == set()


def test_full_edges_buffer() -> None:
    """A full edge never makes its source wait."""
    assert buffered(edge(TEXT, A), edge(A, B, mode=FULL), output=B) == {"a->b.in"}


def test_a_stream_that_reconverges_behind_a_full_edge_buffers() -> None:
    """D may wait for B, B for A's end, A for C, and C for D."""
    assert buffered(
        edge(TEXT, A),
        edge(A, B, mode=FULL),
        edge(A, C),
        edge(B, D, name="left"),
        edge(C, D, name="right"),
        output=D,
    ) == {"a->b.in", "c->d.right"}


def test_a_stream_beside_a_full_edge_of_the_same_source_buffers() -> None:
    """D may take the whole before the pieces."""
    assert buffered(
        edge(TEXT, A), edge(A, D, mode=FULL, name="whole"), edge(A, D, name="pieces"), output=D
    ) == {"a->d.whole", "a->d.pieces"}


def test_a_stream_buffers_if_the_full_edge_hangs_on_the_same_source_further_up() -> None:
    """D may wait for Y, Y for X's end, X for A, A for C, and C for D."""
    assert buffered(
        edge(TEXT, A),
        edge(A, C),
        edge(A, X),
        edge(X, Y, mode=FULL),
        edge(Y, D, name="left"),
        edge(C, D, name="right"),
        output=D,
    ) == {"x->y.in", "c->d.right"}


def test_a_stream_beside_an_unrelated_full_edge_does_not_buffer() -> None:
    """What D waits for on the left does not wait for anything on the right."""
    assert buffered(
        edge(TEXT, A),
        edge(TEXT, C),
        edge(A, B, mode=FULL),
        edge(B, D, name="left"),
        edge(C, D, name="right"),
        output=D,
    ) == {"a->b.in"}


def test_streams_behind_a_full_edge_on_every_way_do_not_buffer() -> None:
    """When B runs, A has ended: nothing upstream of B can wait for D."""
    assert buffered(
        edge(TEXT, A),
        edge(A, B, mode=FULL),
        edge(B, C),
        edge(B, D, name="left"),
        edge(C, D, name="right"),
        output=D,
    ) == {"a->b.in"}


def test_an_edge_is_named_by_source_target_and_input() -> None:
    """The id tells parallel edges apart."""
    assert edge(A, B, name="left").id == "a->b.left"
    assert edge(TEXT, B).id == "request.text->b.in"


def test_pipelines_keep_their_names_in_plans() -> None:
    """Replicas find adapters by the pipeline's name."""
    assert plan_of(shared().pipelines[1]).pipeline == PipelineName("speech")
