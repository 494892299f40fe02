"""Checkpoints that are left out: their folders, files of their size, and what a program does to them next."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command.running import Project, needs

SAVING = """
    import os, shutil, sys, torch
    from torch import nn

    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(4, 1000, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def places(tensors):
        return {str(tensor.device) for tensor in tensors}

    os.makedirs("runs", exist_ok=True)
"""
WEIGHTS_BYTES = 2 * 1001 * 1000 * 4


def run(project: Project, program: str) -> None:
    """Follow a program that saves."""
    project.write("train.py", SAVING + program)
    finished = project.predict("python", "train.py")
    assert finished.json["traced"]["steps"] == 3
    assert any("a checkpoint is not written" in str(note) for note in finished.json["traced"]["notes"])


def test_a_checkpoint_that_was_left_out_is_moved_measured_and_loaded(project: Project) -> None:
    (project.folder / "before.pt").write_bytes(b"mine")
    run(project, """
    step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    torch.save(state, "runs/last.pt.tmp")
    os.replace("runs/last.pt.tmp", "runs/last.pt")
    assert os.path.getsize("runs/last.pt") >= 3 * %d
    shutil.copytree("runs", "kept")
    for path in ("runs/last.pt", "kept/last.pt"):
        before = torch.cuda.memory_allocated()
        read = torch.load(path)
        assert torch.cuda.memory_allocated() - before >= 3 * %d
        assert places(read["model"].values()) == {"cuda:0"} and read["step"] == 7
        read = torch.load(path, map_location="cpu")
        assert places(read["model"].values()) == {"cpu"}
        model.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])
    with open("runs/open.pt", "wb") as file:
        torch.save(model, file)
    with open("runs/open.pt", "rb") as file:
        assert places(torch.load(file, weights_only=False).parameters()) == {"cuda:0"}
    torch.save({"host": torch.ones(3)}, "runs/last.pt")
    assert torch.load("runs/last.pt")["host"].sum() == 3
    torch.save(model.state_dict(), "before.pt")
    assert places(torch.load("before.pt").values()) == {"cuda:0"}
    step()
    step()
    """ % (WEIGHTS_BYTES, WEIGHTS_BYTES))  # fmt: skip
    assert (project.folder / "before.pt").read_bytes() == b"mine"
    assert sorted(path.name for path in (project.folder / "runs").iterdir()) == ["last.pt"]
    assert not list((project.folder / "kept").iterdir())


def test_files_are_named_by_keyword_and_need_not_be_on_a_disk(project: Project) -> None:
    run(project, """
    step()
    torch.save(obj=model.state_dict(), f="runs/last.tmp")
    torch.save(model.state_dict(), "runs/last.tmp")
    os.replace(src="runs/last.tmp", dst="runs/last.pt")
    shutil.copyfile(src="runs/last.pt", dst="runs/best.pt")
    assert places(torch.load(f="runs/best.pt", map_location="cpu").values()) == {"cpu"}
    with open(os.devnull, "wb") as file:
        torch.save(model.state_dict(), file)
    torch.save(model.state_dict(), sys.stdout.buffer)
    step()
    step()
    """)  # fmt: skip
    assert not list((project.folder / "runs").iterdir())


def test_checkpoints_from_before_stay_whatever_the_program_does_to_them(project: Project) -> None:
    (project.folder / "old").mkdir()
    names = ("emptied.pt", "with more.pt", "updated.pt", "removed.pt", "moved.pt", "under.pt", "old/model.bin")
    for name in names:
        (project.folder / name).write_bytes(name.encode())
    for name in ("own.pt", "log.txt"):
        (project.folder / name).write_bytes(b"before")
    run(
        project,
        """
    step()
    state = model.state_dict()
    with open("emptied.pt", "wb") as file:
        torch.save(state, file)
    assert places(torch.load("emptied.pt").values()) == {"cuda:0"}
    with open("with more.pt", "wb") as file:
        torch.save(state, file)
        file.write(b"more")
    with open("updated.pt", "r+b") as file:
        torch.save(state, file)
    os.remove("removed.pt")
    assert not os.path.exists("removed.pt")
    torch.save(state, "removed.pt")
    os.replace("moved.pt", "under.pt")
    torch.save(state, "moved.pt")
    shutil.rmtree("old")
    assert not os.path.exists("old")
    for name in ("own.pt", "log.txt"):
        with open(name, "wb") as file:
            file.write(b"after")
    step()
    step()
    """,
    )
    for name in names:
        assert (project.folder / name).read_bytes() == name.encode(), name
    for name in ("own.pt", "log.txt"):
        assert (project.folder / name).read_bytes() == b"after", name
    assert not [path for path in project.folder.iterdir() if path.name.startswith(".gpumem")]


@pytest.mark.parametrize("end", ["os._exit(0)", "time.sleep(600)", 'torch.empty(1 << 50, device="cuda")'])
def test_no_file_stays_however_the_program_ends(project: Project, end: str) -> None:
    (project.folder / "before.pt").write_bytes(b"mine")
    saves = "torch.save(model, 'runs/a.pt')\n    torch.save(model, open('before.pt', 'wb'))"
    project.write("train.py", f"{SAVING}\n    import time\n    step()\n    {saves}\n    {end}\n")
    project.predict("python", "train.py", options=("--timeout", "2"))
    assert not list((project.folder / "runs").iterdir())
    assert (project.folder / "before.pt").read_bytes() == b"mine"


@needs("safetensors")
def test_safetensors_that_were_left_out_are_opened(project: Project) -> None:
    run(project, """
    from safetensors import safe_open
    from safetensors.torch import load_file, load_model, save_file, save_model
    step()
    save_file(model.state_dict(), "runs/net.safetensors")
    assert places(load_file(filename="runs/net.safetensors").values()) == {"cpu"}
    assert places(load_file("runs/net.safetensors", device="cuda").values()) == {"cuda:0"}
    with safe_open("runs/net.safetensors", framework="pt", device="cuda:0") as file:
        assert sorted(file.keys()) == sorted(model.state_dict())
        assert file.get_slice("0.weight").get_shape() == [1000, 1000] and file.get_tensor("0.weight").is_cuda
    save_model(model, "runs/whole.safetensors")
    load_model(model, "runs/whole.safetensors")
    assert os.path.getsize("runs/whole.safetensors") == %d
    step()
    step()
    """ % WEIGHTS_BYTES)  # fmt: skip
    assert not list((project.folder / "runs").iterdir())


@pytest.mark.scripts
@needs("transformers", "peft", "accelerate")
def test_folders_of_libraries_stay_for_what_is_written_beside(project: Project) -> None:
    run(project, """
    import json
    from accelerate import Accelerator
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    accelerator = Accelerator()
    wide, optimizer = accelerator.prepare(model, optimizer)
    step()
    small = LlamaConfig(hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4)
    base = LlamaForCausalLM(small).cuda()
    base.save_pretrained("runs/step1")
    with open("runs/step1/state.json", "w") as file:
        json.dump({"step": 1}, file)
    assert sorted(os.listdir("runs/step1")) == ["config.json", "model.safetensors", "state.json"]
    assert LlamaForCausalLM.from_pretrained("runs/step1").config.hidden_size == 512
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained("runs/lora")
    PeftModel.from_pretrained(LlamaForCausalLM(small), "runs/lora")
    assert accelerator.save_state("runs/state") == "runs/state"
    accelerator.load_state("runs/state")
    step()
    step()
    """)  # fmt: skip
    assert [path.name for path in (project.folder / "runs").rglob("*") if path.is_file()] == ["state.json"]
    assert [path.name for path in (project.folder / "runs").iterdir()] == ["step1"]


def test_a_checkpoint_before_the_first_step_is_saved_beside_training(project: Project) -> None:
    """As OLMo-core begins: torch makes the optimizer's state by a step that trains nothing, and a future is awaited."""
    project.write(
        "train.py",
        """
        import torch
        import torch.distributed.checkpoint as checkpoint
        from torch import nn
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        net = nn.Linear(1024, 1024).cuda()
        opt = torch.optim.AdamW(net.parameters())
        state = get_optimizer_state_dict(net, opt)
        saving = checkpoint.async_save({"optimizer": state}, checkpoint_id="saved")
        saving.add_done_callback(print)
        saving.result()
        for _ in range(9):
            net(torch.randn(4096, 1024, device="cuda")).square().mean().backward()
            opt.step()
            opt.zero_grad()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    traced = done.json["traced"]
    assert traced["steps"] == 3
    assert traced["buckets"]["activations"] >= 4096 * 1024 * 4


def test_sockets_of_workers_lie_in_a_folder_that_goes_with_the_trial(project: Project) -> None:
    """Workers end with the trial, and left one in the folder of temporary files each."""
    project.write(
        "train.py",
        """
        import torch
        from multiprocessing.util import get_temp_dir

        net = torch.nn.Linear(16, 16).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for [rows] in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(9, 16)), num_workers=1):
            net(rows.cuda()).sum().backward()
            optimizer.step()
            print("sockets in", get_temp_dir(), flush=True)
        """,
    )
    done = project.predict("python", "train.py")
    [folder] = {line.split("sockets in ")[1] for line in done.stderr.splitlines() if "sockets in " in line}
    assert not Path(folder).exists(), folder
    assert "gpumem-tui.trial-" in folder
