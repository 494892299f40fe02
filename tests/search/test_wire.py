"""A search's events arrive on another machine as they were; anything else is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Unknown
from gpumem_tui.run.events import EventError, Failed, Ready, Sample, TraceDone, TrialDone
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.predicting import CommandOutput, Predicted, TraceStarted
from gpumem_tui.search.prediction import Prediction
from gpumem_tui.search.runner import SearchFinished, TrialFinished, TrialProgress, TrialStarted
from gpumem_tui.search.verdict import Verdict, WithHeadroom
from gpumem_tui.search.wire import Configured, NotSearchable, Reply, decode_reply, encode_reply
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.timeline import Mark, Timeline
from gpumem_tui.step import Phase
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.spec import WorkloadSpec

CONFIG = SearchConfig(WorkloadSpec(Recipe(), shape=find_model("gpt2")), Device(find_gpu("a100-80gb"), simulated=True))
OF_COMMAND = replace(
    CONFIG,
    workload=WorkloadSpec(Recipe(), command=Command(("python", "t.py", "{batch}"), "/home/me")),
    device=Device(find_gpu("t4-16gb"), simulated=False, uuid="GPU-1", others_bytes=5),
)
READY = Ready("2.13.0", "torch 2.13 sm_80", 426 << 20, "measured")
TRACE = TraceDone(
    AffineTrace(Timeline((1, 2, -1, -2), (512, 1024), (3, 5), (Mark(0, 1, Phase.FORWARD),)), (4, 0)),
    0.5,
    changes=(("a", "why"),),
    is_sharded=True,
    parameters=7,
    notes=("a note",),
)
TRACED = CONFIG.traced(READY, TRACE)
DONE = TrialDone(4, "fit", 3, 5, 7, {"parameters": 2, "other": 1}, "", 0.5, 3, (0.1, 0.2))
VERDICT = Verdict("found", 4, 5, True, 2, 1, "largest batch 4", WithHeadroom(0.1, 3, 1024, "trial"))


@pytest.mark.parametrize(
    "reply",
    [
        Configured(CONFIG, "/home/me"),
        Configured(OF_COMMAND, "/home/me"),
        NotSearchable("--gpu: there is none"),
        Predicted(Prediction(CONFIG.formula, TRACED), READY),
        Predicted(Prediction(CONFIG.formula, Unknown("tracing failed")), READY, 12),
        CommandOutput("epoch 1"),
        TraceStarted(3),
        TrialStarted(1, 4),
        TrialProgress(1, 4, Sample(1, "forward", 1024, 2048, {"parameters": 1024})),
        TrialFinished(1, DONE),
        SearchFinished(VERDICT),
        Failed("torch", "no torch there"),
    ],
)
def test_what_is_sent_arrives(reply: Reply) -> None:
    assert decode_reply(encode_reply(reply), CONFIG) == reply


@pytest.mark.parametrize(
    "line",
    [
        b"Welcome!",
        b"{}",
        b'{"schema":2,"event":"trace_started","body":{"batch_size":1}}',
        b'{"schema":1,"event":"no_such","body":{}}',
        b'{"schema":1,"event":"trace_started","body":{"batch_size":"1"}}',
    ],
)
def test_anything_else_is_no_event(line: bytes) -> None:
    with pytest.raises(EventError):
        decode_reply(line)


def test_a_prediction_needs_to_know_what_of() -> None:
    with pytest.raises(EventError):
        decode_reply(encode_reply(Predicted(Prediction(CONFIG.formula, TRACED), READY)))


def test_what_a_command_prints_there_cannot_move_the_cursor_here() -> None:
    line = json.dumps({"schema": 1, "event": "output", "body": {"text": "\x1b[2Jgone"}}).encode()
    assert decode_reply(line) == CommandOutput(" [2Jgone")
