"""Trackers get the samples: each one is the real package, offline, and is read back by its own reader."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpumem_tui.manual import text
from gpumem_tui.probe.trackers import METRICS, PREFIX
from tests.probe.watched import Run, run

ROOT = Path(__file__).parents[2]
STAGES = {"gpumem/peak_gib/warm-up"}
NAMES = {PREFIX + name for name in METRICS if "STAGE" not in name} | STAGES
GIB = 1 << 30

TRAIN = """
import json, os, sys
sys.path.insert(0, os.environ["ROOT"])
import gpumem_tui, torch
from tests.cuda_standin import cuda_played
from gpumem_tui.probe import probe
probe.INTERVAL_S, probe.SAMPLE_SHARE = 0, 1e9  # each step is a sample
parameter = torch.nn.Parameter(torch.ones(1 << 18))
optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

def train(tracker, steps=3):
    with cuda_played() as cuda:
        gpumem_tui.attach(log=tracker)
        block = cuda.allocate(3 << 28)
        cuda.allocators[0].free(cuda.allocate(1 << 28))
        for _ in range(steps):
            parameter.sum().backward()
            optimizer.step()
"""


def _run(program: str, directory: Path, **environment: str) -> Run:
    more = {"ROOT": str(ROOT), "OUT": str(directory), "WANDB_MODE": "offline", "WANDB_DIR": str(directory)}
    more |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true", **environment}
    done = run(["-c", program], directory / "published", watched=False, more=more)
    assert done.code == 0, done.errors
    return done


def _is_there(library: str) -> bool:
    package, _, _ = library.partition(".")
    return find_spec(package) is not None and find_spec(library) is not None


def _needs(*libraries: str) -> pytest.MarkDecorator:
    lacking = [library for library in libraries if not _is_there(library)]
    return pytest.mark.skipif(bool(lacking), reason=f"needs {' and '.join(lacking)}")


def test_a_function_gets_the_steps_of_the_gpu_and_no_failure_reaches_the_program(tmp_path: Path) -> None:
    program = TRAIN + "seen = []\ngpumem_tui.attach(log=7)\ngpumem_tui.attach(log=lambda *_: 1 / 0)\n"
    program += "train(lambda step, values: seen.append((step, values)))\nprint(json.dumps(seen))\n"
    done = _run(program, tmp_path)
    assert [step for step, _ in json.loads(done.output)] == [1, 2, 3]
    values = json.loads(done.output)[-1][1]
    assert set(values) == NAMES
    assert values["gpumem/allocated_gib"] == 0.75
    assert values["gpumem/peak_allocated_gib"] == values["gpumem/reserved_gib"] == 1.0
    assert values["gpumem/step"] == 3
    refused, failed = done.errors.splitlines()  # a tracker that fails in each step is one line
    assert refused.startswith("gpumem-tui logs nothing: attach(log=…) takes a SummaryWriter, ")
    assert failed == "gpumem-tui cannot log to a tracker: ZeroDivisionError: division by zero"


def test_what_a_tracker_sets_up_at_its_first_values_makes_later_ones_no_rarer(tmp_path: Path) -> None:
    """A connection, threads, imports: as wandb and mlflow, whose second values came half a minute later."""
    program = (
        TRAIN
        + """
import time
probe.SAMPLE_SHARE = 1 / 400
seen = []

def slow_at_first(step, values):
    began = time.thread_time()
    while not seen and time.thread_time() < began + 0.1:
        pass
    seen.append(step)

gpumem_tui.attach(log=slow_at_first)
ends = time.monotonic() + 10
while len(seen) < 2 and time.monotonic() < ends:
    parameter.sum().backward()
    optimizer.step()
print(len(seen))
"""
    )
    assert _run(program, tmp_path).output.split() == ["2"]


def test_host_memory_is_what_a_program_without_a_gpu_has(tmp_path: Path) -> None:
    program = TRAIN.replace("with cuda_played() as cuda:", "if True:").replace("        block =", "        #")
    program = (
        program.replace("        cuda.all", "        #") + "train(lambda step, values: print(json.dumps(values)))\n"
    )
    first = json.loads(_run(program, tmp_path).output.splitlines()[0])
    host = first.pop("gpumem/host_gib")
    assert 0 < host < 16
    named = {"gpumem/parameters_gib": 1 << 20, "gpumem/gradients_gib": 1 << 20, "gpumem/optimizer_gib": 1 << 20}
    assert first == {"gpumem/step": 1, **{name: size / GIB for name, size in named.items()}}


def test_the_manual_lists_each_metric() -> None:
    lines = [line.split("|") for line in text("trackers").splitlines() if line.startswith("| `gpumem/")]
    listed = {name.strip(" `"): words.strip() for _, name, words, _ in lines}
    assert listed == {PREFIX + name: words for name, words in METRICS.items()}


@_needs("opentelemetry.sdk")  # other packages bring its API alone
def test_opentelemetry_has_a_gauge_of_each(tmp_path: Path) -> None:
    program = (
        TRAIN
        + """
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
train(MeterProvider([reader]).get_meter("training"))
(scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
print(json.dumps({one.name: (one.unit, one.data.data_points[0].value) for one in scope.metrics}))
"""
    )
    read = json.loads(_run(program, tmp_path).output)
    assert set(read) == NAMES
    assert read["gpumem/allocated_gib"] == ["GiBy", 0.75]
    assert read["gpumem/step"] == ["1", 3]


@pytest.mark.scripts
@_needs("tensorboard")
def test_tensorboard_reads_an_events_file_with_each(tmp_path: Path) -> None:
    program = TRAIN + "from torch.utils.tensorboard import SummaryWriter\n"
    program += "writer = SummaryWriter(os.environ['OUT'] + '/runs')\ntrain(writer)\nwriter.close()\n"
    _run(program, tmp_path)
    assert len(list((tmp_path / "runs").iterdir())) == 1  # nothing is written after the program has closed it
    scalars = _tensorboard(tmp_path / "runs")
    assert set(scalars) == NAMES
    assert scalars["gpumem/allocated_gib"] == {1: 0.75, 2: 0.75, 3: 0.75}


@pytest.mark.scripts
@_needs("mlflow")
def test_mlflow_has_them_in_the_run_that_the_program_began(tmp_path: Path) -> None:
    program = (
        TRAIN
        + """
import mlflow
mlflow.set_tracking_uri("file:" + os.environ["OUT"] + "/mlruns")
train(mlflow)  # no run has begun
with mlflow.start_run():
    train(print)
    mlflow.flush_async_logging()
"""
    )
    _run(program, tmp_path)
    assert _mlflow(tmp_path / "mlruns")["gpumem/peak_allocated_gib"] == {4: 1.0, 5: 1.0, 6: 1.0}


@pytest.mark.scripts
@_needs("wandb")
def test_wandb_has_them_at_the_steps_of_the_program(tmp_path: Path) -> None:
    program = (
        TRAIN
        + """
import wandb
with wandb.init(project="p") as own:
    train(own)
    own.log({"loss": 1.0}, step=70)
    train(print, 2)
    own.log({"loss": 0.5}, step=80)
    train(print, 1)
    own.log({"loss": 0.2})  # with what is at 80
"""
    )
    _run(program, tmp_path)
    history = _wandb(tmp_path)
    rows = [(row["_step"], row.get("loss"), row["gpumem/step"]) for row in history]
    assert rows == [(0, None, 3), (70, 1.0, 5), (80, 0.2, 6)]  # none of its own values is lost
    assert history[0]["gpumem/allocated_gib"] == 0.75


@pytest.mark.scripts
@_needs("transformers", "accelerate", "tensorboard", "mlflow", "wandb")
def test_the_hugging_face_trainer_reports_them_wherever_it_reports(tmp_path: Path) -> None:
    program = """
import json, os, torch
from gpumem_tui.probe import callbacks
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        return {"loss": self.layer(x).sum()}
report = ["tensorboard", "wandb", "mlflow"]
arguments = TrainingArguments(os.environ["OUT"] + "/run", max_steps=4, logging_steps=2, report_to=report, use_cpu=True,
    save_strategy="no", disable_tqdm=True)
data = [{"x": torch.ones(8)}] * 64
trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[callbacks.hugging_face(log=True)])
trainer.train()
print("history", json.dumps(trainer.state.log_history))
"""
    environment = {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "runs"), "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns"}
    done = _run(program, tmp_path, **environment)
    (line,) = (line for line in done.output.splitlines() if line.startswith("history "))
    logged = [row for row in json.loads(line.removeprefix("history ")) if "loss" in row]
    assert [row["step"] for row in logged] == [2, 4]
    size = 72 * 4 / GIB
    assert all(row["gpumem/parameters_gib"] == size for row in logged)
    assert _tensorboard(tmp_path / "runs")["train/gpumem/parameters_gib"] == pytest.approx({2: size, 4: size})
    assert _mlflow(tmp_path / "mlruns")["gpumem/parameters_gib"] == {2: size, 4: size}
    assert [row["train/gpumem/parameters_gib"] for row in _wandb(tmp_path) if "train/loss" in row] == [size, size]


@pytest.mark.scripts
@_needs("lightning", "tensorboard", "mlflow")
def test_lightning_logs_them_to_each_logger(tmp_path: Path) -> None:
    program = """
import os, torch, lightning as L
from gpumem_tui.probe import callbacks
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, number):
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
out = os.environ["OUT"]
loggers = [TensorBoardLogger(out + "/runs"), CSVLogger(out + "/csv"), MLFlowLogger(tracking_uri=f"file:{out}/mlruns")]
trainer = L.Trainer(max_steps=6, accelerator="cpu", log_every_n_steps=3, logger=loggers,
    callbacks=[callbacks.lightning(log=True)], enable_progress_bar=False, enable_checkpointing=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(32, 8), batch_size=4))
"""
    _run(program, tmp_path)
    size = 72 * 4 / GIB
    scalars = _tensorboard(next((tmp_path / "runs").glob("*/*")))
    assert scalars["gpumem/parameters_gib"] == pytest.approx({2: size, 5: size})
    assert set(scalars["loss"]) == {2, 5}  # its own steps
    assert _mlflow(tmp_path / "mlruns")["gpumem/parameters_gib"] == {2: size, 5: size}
    assert "gpumem/parameters_gib" in next((tmp_path / "csv").rglob("metrics.csv")).read_text()


def _tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    reader = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def _mlflow(folder: Path) -> dict[str, dict[int, float]]:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = import_module("mlflow").MlflowClient(f"file:{folder}")
    (found,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    history = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return {name: {one.step: one.value for one in values} for name, values in history.items()}


def _wandb(folder: Path) -> list[dict[str, float]]:
    """The rows of an offline run's history, by the package's own protocol."""
    kind = import_module("wandb.proto.wandb_internal_pb2").Record
    (path,) = folder.rglob("*.wandb")
    rows = []
    for data in _log_records(path.read_bytes()):
        record = kind()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
    return rows


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format (doc/log_format.md there): wandb's files have it after a header of 7 bytes."""
    at, parts = 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield parts
            parts = b""
