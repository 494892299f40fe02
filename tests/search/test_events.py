"""Messages between parent and child arrive as sent; anything else is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Breakdown, Bucket
from gpumem_tui.run.events import (
    SCHEMA,
    ChildEvent,
    EventError,
    Failed,
    Ready,
    Request,
    Sample,
    TraceDone,
    TraceRequest,
    TrialDone,
    TrialRequest,
    decode_event,
    decode_request,
    encode,
)
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.rules import Computed
from gpumem_tui.simulator.allocator.timeline import Mark, Timeline
from gpumem_tui.step import Phase, Site
from gpumem_tui.workload.spec import WorkloadSpec

CATALOG = WorkloadSpec(Recipe("amp-bf16", recompute="full"), shape=find_model("resnet-50"))
FILE = WorkloadSpec(Recipe(), file="train steps.py:Übung")
GPU = find_gpu("h100-80gb")


def trial(outcome: str = "fit") -> dict[str, object]:
    """A trial's outcome as it is on the wire."""
    values: dict[str, object] = json.loads(encode(TrialDone(4, "fit", 3, 5, 7, None, "", 0.5, 3, (0.1, 0.2))))
    return {**values, "outcome": outcome}


EVENTS: list[ChildEvent] = [
    Ready("2.13.0+cpu", "torch 2.13 sm_90", 426 * 2**20, "measured"),
    Sample(1, "forward", 1024, 2048, {"parameters": 1024}),
    TrialDone(4, "fit", 3, 5, 7, {"parameters": 2, "other": 1}, "", 0.5, 3, (0.1, 0.2)),
    TrialDone(4, "error", 0, 0, 0, None, "it died", 0.0, 0, detail="killed by SIGKILL"),
    TraceDone(
        AffineTrace(
            Timeline(
                (1, 2, -1),
                (512, 0),
                (3, 5),
                (Mark(0, 1, Phase.FORWARD),),
                computed=((2, Computed("norm_gradient", 0, (0, 768, 4, 108))),),
                streams=(0, 2),
                completions=((3, 1),),
            ),
            (4, 0),
            ((1024, 0, 0, 0),),
        ),
        0.5,
    ),
    Failed("device", 'no "GPU" here'),
]
REQUESTS: list[Request] = [
    TrialRequest(CATALOG, GPU, True, 8, 3, limit_bytes=2**30, others_bytes=7),
    TrialRequest(FILE, GPU, False, 8, 3),
    TraceRequest(FILE, GPU, 2, 4),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.event)
def test_an_event_arrives_as_one_line_and_as_it_was(event: ChildEvent) -> None:
    line = encode(event)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_event(line) == event


@pytest.mark.parametrize("request_", REQUESTS, ids=["catalog", "file", "trace"])
def test_a_request_arrives_as_it_was(request_: Request) -> None:
    line = encode(request_)
    assert line.count(b"\n") == 1
    assert decode_request(line) == request_


def test_a_trace_is_ready_for_replay_after_the_journey() -> None:
    arrived = decode_event(encode(EVENTS[4]))
    assert isinstance(arrived, TraceDone)
    timeline = arrived.trace.at(10)
    assert timeline.sizes == (552, 0)
    assert arrived.trace.at(65).sizes[1] == 1365 * 768 * 4
    assert timeline.marks == (Mark(0, 1, Phase.FORWARD),)


def test_a_trials_buckets_are_typed_or_absent() -> None:
    assert EVENTS[2] == decode_event(encode(EVENTS[2]))
    known, unknown = EVENTS[2], EVENTS[3]
    assert isinstance(known, TrialDone)
    assert isinstance(unknown, TrialDone)
    assert known.breakdown == Breakdown({Bucket.PARAMETERS: 2, Bucket.OTHER: 1})
    assert unknown.breakdown is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"\xff\xfe",
        b"[]",
        b"17",
        b"null",
        b"{}",
        b'{"schema":1}',
        b'{"schema":1,"event":"party"}',
        b'{"schema":1,"event":["ready"]}',
        b'{"schema":1,"event":"ready"}',
        b'{"schema":1,"event":"failed","kind":"weather","detail":"rain"}',
        json.dumps(trial(outcome="maybe")).encode(),
        json.dumps(trial() | {"peak_allocated_bytes": "3"}).encode(),
        json.dumps(trial() | {"buckets": [1]}).encode(),
    ],
)
def test_what_is_no_event_is_refused_in_one_line(line: bytes) -> None:
    with pytest.raises(EventError) as caught:
        decode_event(line)
    assert "\n" not in str(caught.value)


@given(line=st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(line: bytes) -> None:
    with pytest.raises(EventError):
        decode_event(line)


def test_another_version_is_refused_on_both_sides() -> None:
    event = json.loads(encode(EVENTS[0])) | {"schema": SCHEMA + 1}
    with pytest.raises(EventError, match=f"schema {SCHEMA + 1}, expected {SCHEMA}"):
        decode_event(json.dumps(event).encode())
    request = json.loads(encode(REQUESTS[0])) | {"schema": SCHEMA + 1}
    with pytest.raises(EventError, match="another version"):
        decode_request(json.dumps(request).encode())


def test_fields_of_a_later_program_are_no_obstacle() -> None:
    event = json.loads(encode(EVENTS[5])) | {"colour": "red"}
    assert decode_event(json.dumps(event).encode()) == EVENTS[5]


def test_what_a_users_program_says_cannot_steer_the_terminal() -> None:
    """Names of modules and the words of exceptions are the program's own."""
    hostile = "\x1b[31mred\x07"
    failed = decode_event(encode(Failed("workload", hostile)))
    assert isinstance(failed, Failed)
    assert failed.detail == " [31mred "
    site = Site(hostile, hostile, hostile, hostile, hostile, (hostile,))
    done = TraceDone(AffineTrace.constant(Timeline((1,), (512,), (0,), (), (0,), (site,))), 0.1, notes=(hostile,))
    traced = decode_event(encode(done))
    assert isinstance(traced, TraceDone)
    *named, fused = vars(traced.trace.at_none.site_table[0]).values()
    assert (*named, *fused, *traced.notes) == (" [31mred ",) * 7
    assert traced.trace.at_none.sizes == (512,)
