"""Requests of users: workloads and devices, and the one line for an impossible one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.errors import OptionError
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.devices import RealGpu
from gpumem_tui.options.workload import (
    WorkloadOptions,
    choose_device,
    share_limit_bytes,
    visible_gpus,
    with_ranks,
)
from gpumem_tui.workload import train
from gpumem_tui.workload.as_transformers import has_transformers
from gpumem_tui.workload.spec import WorkloadSpec


def _gpu(index: int = 0, used_gib: int = 0, pids: tuple[int, ...] = ()) -> RealGpu:
    return RealGpu(index, f"GPU-{index}{index}", "NVIDIA H100 80GB HBM3", 80 * GIB, GIB, used_gib * GIB, (9, 0), pids)


class TestWorkload:
    def test_gpt2_in_fp32_with_adamw_is_the_default(self) -> None:
        spec = WorkloadOptions().spec()
        assert spec.name == "gpt2"
        assert spec.recipe == Recipe()

    def test_changes_reach_the_shape(self) -> None:
        spec = WorkloadOptions(model="llama-3-8b", changes={"layers": 2, "seq_len": 128}).spec()
        assert spec.shape is not None
        assert (spec.shape.layers, spec.shape.seq_len, spec.shape.hidden) == (2, 128, 4096)

    def test_a_hugging_face_config(self, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 32}
        path.write_text(json.dumps(config))
        spec = WorkloadOptions(config=str(path)).spec()
        assert spec.shape is not None
        assert (spec.shape.layers, spec.shape.hidden) == (2, 64)

    def test_a_config_is_what_transformers_builds_where_that_is(self, tmp_path: Path) -> None:
        path, bare = tmp_path / "config.json", tmp_path / "python"
        config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 32}
        path.write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
        bare.write_text("#!/bin/sh\nexit 1\n")
        bare.chmod(0o755)
        options, plain = WorkloadOptions(config=str(path)), "traced as our plain network of its shape"
        spec = options.spec(str(bare))
        assert spec.command is None
        assert spec.network.startswith(plain)
        assert spec.network.endswith(f"{bare} has no transformers")
        bare.write_text("#!/bin/sh\nexit 0\n")
        has_transformers.cache_clear()
        spec = options.spec(str(bare))
        assert spec.network == "traced as transformers' GPT2LMHeadModel"
        assert spec.command is not None
        assert spec.shape is not None
        assert spec.command.words[:2] == (str(bare), train.__file__)
        assert WorkloadSpec.from_wire(json.loads(json.dumps(asdict(spec)))) == spec
        for changed in (
            replace(options, recompute="selective"),
            replace(options, gpus=2, sharding="zero3"),
            replace(options, changes={"layers": 1}),
        ):
            assert changed.spec(str(bare)).network.startswith(plain)

    def test_a_file_becomes_absolute_so_that_the_child_finds_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "step.py").write_text("")
        monkeypatch.chdir(tmp_path)
        assert WorkloadOptions(workload="step.py:Big").spec().file == f"{tmp_path / 'step.py'}:Big"

    @pytest.mark.parametrize(
        ("options", "line"),
        [
            (WorkloadOptions(model="gpt2", config="c.json"), "--model and --config: give only one of them"),
            (WorkloadOptions(sharding="zero3"), "--sharding zero3: needs more than one GPU to shard over"),
            (WorkloadOptions(model="gpt-3"), "--model: unknown model 'gpt-3': did you mean gpt2"),
            (WorkloadOptions(changes={"heads": 7}), "--heads: 7 heads do not divide a hidden size of 768"),
            (WorkloadOptions(changes={"seq_len": -5}), "--seq-len: give at least 1, not -5"),
            (WorkloadOptions(changes={"seq_len": 2048}), "--seq-len: gpt2 has 1024 positions, 2048 is beyond"),
            (WorkloadOptions(changes={"image_size": 64}), "--image-size: gpt2 is a gpt2 model and has no"),
            (
                WorkloadOptions(model="llama-3-8b", changes={"kv_heads": 5}),
                "--kv-heads: 5 key/value heads do not divide 32 heads",
            ),
            (WorkloadOptions(config="nowhere.json"), "--config: "),
            (WorkloadOptions(workload="nowhere.py"), "--workload: there is no file nowhere.py"),
            (WorkloadOptions(gpus=0), "--gpus: give at least 1, not 0"),
        ],
    )
    def test_what_cannot_be_is_one_line_naming_the_option(self, options: WorkloadOptions, line: str) -> None:
        with pytest.raises(OptionError) as caught:
            options.spec()
        assert str(caught.value).startswith(line)
        assert "\n" not in str(caught.value)

    def test_a_file_decides_for_itself(self, tmp_path: Path) -> None:
        path = tmp_path / "step.py"
        path.write_text("")
        with pytest.raises(OptionError, match="--layers: a workload file builds its own model"):
            WorkloadOptions(workload=str(path), changes={"layers": 2}).spec()
        with pytest.raises(OptionError, match="the file decides precision"):
            WorkloadOptions(workload=str(path), precision="bf16").spec()

    def test_what_has_no_closed_form_is_built_by_transformers(self, tmp_path: Path) -> None:
        path = tmp_path / "olmo2" / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps({"model_type": "olmo2", "max_position_embeddings": 4096}))
        for options in (WorkloadOptions(config=str(path)), WorkloadOptions(model=str(path.parent), precision="bf16")):
            spec = options.spec("/usr/bin/python3")
            assert spec.hugging_face is not None
            assert spec.command is not None
            assert (spec.name, spec.hugging_face.seq_len) == ("olmo2", 2048)
            assert spec.hugging_face.no_formula == "no formula for olmo2 models"
            assert spec.command.words[0] == "/usr/bin/python3"
            assert spec.command.takes_batch
            assert spec.recipe.precision == options.precision
            assert WorkloadSpec.from_wire(asdict(spec)) == spec

    def test_adapters_reach_what_transformers_builds(self, tmp_path: Path) -> None:
        path = tmp_path / "olmo2.json"
        path.write_text(json.dumps({"model_type": "olmo2"}))
        options = WorkloadOptions(config=str(path), adapter="lora", lora_rank=4, base_quantization="nf4")
        spec = options.spec("/usr/bin/python3")
        assert spec.command is not None
        text = " ".join(spec.command.words)
        assert text.endswith("--seq-len 2048 --adapter lora --lora-rank 4 --base-quantization nf4")
        assert WorkloadSpec.from_wire(asdict(spec)) == spec

    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            ({"base_quantization": "nf4"}, "--base-quantization: weights that are trained cannot be quantized; add"),
            ({"changes": {"layers": 2}}, "--layers: olmo2 has no closed form; leave it out, and change "),
            ({"freeze": "half"}, "--freeze: write none, all-but-head or how many blocks, not half"),
            ({"gpus": 2, "sharding": "zero3"}, "--gpus: olmo2 has no closed form, and its step is one GPU's"),
            ({"recompute": "selective"}, "--recompute selective: transformers has gradient checkpointing only"),
        ],
    )
    def test_what_transformers_cannot_change_is_one_line(
        self, tmp_path: Path, changes: dict[str, Any], line: str
    ) -> None:
        path = tmp_path / "olmo2.json"
        path.write_text(json.dumps({"model_type": "olmo2"}))
        with pytest.raises(OptionError) as caught:
            WorkloadOptions(config=str(path), **changes).spec()
        assert str(caught.value).startswith(line)

    def test_quantized_weights_are_not_priced_as_others(self, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 32}
        path.write_text(json.dumps({**config, "quantization_config": {"load_in_4bit": True}}))
        with pytest.raises(OptionError, match=r"are quantized \(4-bit FP4 of bitsandbytes, 4.5 bits a weight\)"):
            WorkloadOptions(config=str(path)).spec()
        assert WorkloadOptions(config=str(path), dequantize=True).spec().shape is not None


class TestDevice:
    def test_the_first_free_gpu_is_the_default(self) -> None:
        device = choose_device(None, (_gpu(0, used_gib=20, pids=(7,)), _gpu(1)), share=False)
        assert (device.uuid, device.simulated, device.measured_title) == ("GPU-11", False, "Measured")
        assert device.gpu.cuda_total_bytes == 79 * GIB

    def test_without_a_driver_a_simulated_a100_and_the_reason(self) -> None:
        device = choose_device(None, Unknown("no NVIDIA driver on this machine"), share=False)
        assert (device.gpu.name, device.simulated, device.measured_title) == ("a100-80gb", True, "Simulated")
        assert device.reason == "no NVIDIA driver on this machine"

    def test_a_busy_machine_is_left_alone(self) -> None:
        device = choose_device(None, (_gpu(0, used_gib=20, pids=(7,)),), share=False)
        assert device.simulated
        assert "has 20.00 GiB in use by process 7" in device.reason

    def test_a_busy_gpu_is_refused_by_name_too(self) -> None:
        busy = (_gpu(0, used_gib=20, pids=(7, 8)),)
        with pytest.raises(OptionError, match=r"in use by process 7, 8; --share searches within the memory they leave"):
            choose_device("0", busy, share=False)

    def test_sharing_takes_what_the_others_leave(self) -> None:
        device = choose_device("GPU-00", (_gpu(0, used_gib=20, pids=(7,)),), share=True)
        assert device.gpu.cuda_total_bytes == 59 * GIB
        assert device.gpu.total_bytes == 80 * GIB

    def test_sharing_without_a_name_takes_the_emptiest(self) -> None:
        gpus = (_gpu(0, used_gib=30, pids=(7,)), _gpu(1, used_gib=10, pids=(9,)))
        assert choose_device(None, gpus, share=True).uuid == "GPU-11"

    def test_a_simulated_gpu_can_be_asked_for_anywhere(self) -> None:
        device = choose_device("sim:t4-16gb", (_gpu(0),), share=False)
        assert (device.gpu.name, device.simulated, device.reason) == ("t4-16gb", True, "")

    def test_a_gpu_that_is_not_here_is_simulated_by_its_name(self) -> None:
        device = choose_device("4090", (_gpu(0),), share=False)
        said = (device.gpu.name, device.simulated, device.reason)
        assert said == ("rtx-4090-24gb", True, "no NVIDIA GeForce RTX 4090 on this machine")
        assert choose_device("4090", Unknown("no NVIDIA driver"), share=False) == device

    def test_a_gpu_that_is_here_is_found_by_its_name_the_free_one_first(self) -> None:
        device = choose_device("h100-80gb", (_gpu(0, used_gib=20, pids=(7,)), _gpu(1)), share=False)
        assert (device.uuid, device.simulated) == ("GPU-11", False)

    @pytest.mark.parametrize(
        ("wanted", "line"),
        [
            ("9", "--gpu: there is no GPU '9' here; there are 0 (NVIDIA H100 80GB HBM3), and sim:NAME simulates one"),
            ("sim:a100", "--gpu: 'a100' is short for several GPUs, choose one: a100-40gb (40.00 GiB), "),
            ("rtx4091", "--gpu: unknown GPU 'rtx4091': did you mean rtx-4090-24gb"),
        ],
    )
    def test_an_unknown_device_is_one_line(self, wanted: str, line: str) -> None:
        with pytest.raises(OptionError) as caught:
            choose_device(wanted, (_gpu(0),), share=False)
        assert str(caught.value).startswith(line)

    def test_the_users_choice_of_visible_gpus_is_kept(self) -> None:
        gpus = tuple(_gpu(index) for index in range(4))
        assert visible_gpus(gpus, None) == gpus
        assert visible_gpus(gpus, "") == ()
        assert [gpu.index for gpu in visible_gpus(gpus, "3,GPU-11")] == [3, 1]
        assert [gpu.index for gpu in visible_gpus(gpus, "2,-1,0")] == [2]

    def test_a_shared_gpu_is_searched_under_a_cap(self) -> None:
        shared = choose_device("0", (_gpu(0, used_gib=20, pids=(7,)),), share=True)
        assert share_limit_bytes(shared) == 58 * GIB
        assert share_limit_bytes(choose_device("0", (_gpu(0),), share=True)) is None


class TestRanks:
    GPUS = (_gpu(0), _gpu(1), _gpu(2, used_gib=4, pids=(7,)))

    def test_the_gpus_beside_the_chosen_one_serve_the_other_ranks(self) -> None:
        device = with_ranks(choose_device("1", self.GPUS, share=False), 2, self.GPUS, share=False)
        assert (device.uuid, device.more_uuids) == ("GPU-11", ("GPU-00",))

    def test_one_in_use_is_refused_unless_shared(self) -> None:
        chosen = choose_device("0", self.GPUS, share=False)
        with pytest.raises(OptionError, match=r"GPU 2 .* has 4\.00 GiB in use by process 7; --share"):
            with_ranks(chosen, 3, self.GPUS, share=False)
        shared = with_ranks(chosen, 3, self.GPUS, share=True)
        assert shared.others_bytes == 4 * GIB
        assert share_limit_bytes(shared) is not None

    def test_too_few_gpus_are_said(self) -> None:
        with pytest.raises(OptionError, match="starts 4 ranks, and 3 GPUs are here"):
            with_ranks(choose_device("0", self.GPUS, share=False), 4, self.GPUS, share=False)

    def test_a_simulated_gpu_needs_no_other(self) -> None:
        device = choose_device("sim:h100-80gb", self.GPUS, share=False)
        assert with_ranks(device, 64, self.GPUS, share=False) == device
