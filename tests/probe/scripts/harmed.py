"""Trains and prints every loss to the last bit, while something is done to what watches it. ``HARM`` shows what."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 60
HARM = os.environ.get("HARM", "")
directory = Path(os.environ["GPUMEM_TUI_DIR"])
probe = sys.modules.get("gpumem_tui.probe.probe")
if probe is not None:
    probe.INTERVAL_S = 0.005
    probe.SAMPLE_SHARE = 1.0


def files(ending):
    return [path for path in directory.glob(f"*.{ending}") if probe is not None]


def harm(step):
    if HARM == "disk full" and step == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if HARM == "exceptions" and probe is not None and step == 10:
        probe.Finder.trained = lambda _: 1 / 0
    if HARM == "files":
        if step == 10:
            read = "import sys, time; print(open(sys.argv[1], 'rb').read(8), flush=True); time.sleep(60)"
            for ring in files("ring"):
                viewer = subprocess.Popen([sys.executable, "-c", read, ring], stdout=subprocess.PIPE)
                viewer.stdout.readline()
                viewer.kill()
                viewer.wait()
        if step == 20:
            for ring in files("ring"):
                ring.with_suffix(".control").symlink_to("/etc/passwd")
        if step == 30:
            for path in files("*"):
                path.unlink()
        if step == 40:
            jumped = time.time_ns() - 10**18
            time.time_ns = lambda: jumped
        if step == 50:
            for ring in files("ring"):
                os.truncate(ring, 0)
                ring.with_suffix(".control").write_bytes(b"\xff" * 10_000)
    if "fork" in HARM and step in (10, 30):
        child = os.fork()
        if child == 0:
            for _ in range(5):
                train(torch.ones(8, 16))
            os._exit(0)
        os.waitpid(child, 0)


def train(x):
    optimizer.zero_grad()
    loss = (model(x) - x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters())
data = DataLoader(TensorDataset(torch.randn(STEPS * 8, 16)), batch_size=8, num_workers=2 if "fork" in HARM else 0)
for step, (batch,) in enumerate(data):
    harm(step)
    print(train(batch).hex())
    time.sleep(0.006)
if "exec" in HARM and "again" not in sys.argv:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
sys.exit(7)
