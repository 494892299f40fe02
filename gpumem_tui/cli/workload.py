"""The options that say what is trained and on what: of every command that searches, predicts or plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpumem_tui.cli.numbers import Finite, Whole
from gpumem_tui.formula.recipe import (
    ADAPTER_DTYPES,
    ADAPTERS,
    ALL_BUT_HEAD,
    ALL_LINEAR,
    ATTENTIONS,
    BASE_QUANTIZATIONS,
    DEFAULT_LORA_RANK,
    NOTHING_FROZEN,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULES,
    SHARDING_ALIASES,
    SHARDINGS,
)
from gpumem_tui.options.typed import rows_from, size_from

if TYPE_CHECKING:
    from gpumem_tui.options.configuration import Options
    from gpumem_tui.options.workload import WorkloadOptions
    from gpumem_tui.search.config import SearchConfig

Command = TypeVar("Command", bound=Callable[..., Any])
_COMMAND = "gpumem_tui.command"


class TakesCommand(click.Command):
    """A gpumem-tui command that takes a user's training command after its options and ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            split = args.index("--")
            args, ctx.meta[_COMMAND] = args[:split], tuple(args[split + 1 :])
            if not ctx.meta[_COMMAND] or not ctx.meta[_COMMAND][0]:
                raise click.UsageError("--: no command follows; write it as `-- python train.py --batch-size {batch}`")
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def trained_command() -> tuple[str, ...]:
    """The user's training command of this invocation; empty if none was given."""
    context = click.get_current_context(silent=True)
    words: tuple[str, ...] = () if context is None else context.meta.get(_COMMAND, ())
    return words


def configured(values: Mapping[str, object], **set_values: object) -> tuple[WorkloadOptions, SearchConfig]:
    """What was typed, and the user's training command if there is one, and what is searched by that.

    Args:
        values, set_values: as of `asked`.

    Raises:
        OptionError: the options are wrong, or do not go together.
    """
    from gpumem_tui.options.configuration import configure

    options = asked(values, **set_values)
    return options.trained, configure(options)


def asked(values: Mapping[str, object], **set_values: object) -> Options:
    """What was typed, and the user's training command if there is one.

    Args:
        values: by click's name of each option of `WORKLOAD_OPTIONS` and `DEVICE_OPTIONS`; those that are left out take
            their defaults.
        set_values: options that the command itself sets.
    """
    import msgspec

    from gpumem_tui.options.configuration import Options
    from gpumem_tui.options.workload import ModelChanges, WorkloadOptions

    given = {"command": trained_command(), **values, **set_values}

    def named(kind: Any) -> dict[str, object]:
        return {field.name: given.pop(field.name) for field in fields(kind) if field.name in given}

    trained = {"changes": named(ModelChanges), **named(WorkloadOptions)}
    options = msgspec.convert({"trained": trained, **named(Options)}, Options)
    assert not given, f"no option takes {sorted(given)}"
    return options


class Size(click.ParamType[int]):
    """A memory size with its unit (20GiB, 512MiB; GB and G mean GiB), or a number of bytes, of a MiB at least."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return size_from(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Rows(click.ParamType[tuple[str, float]]):
    """A share, or FILE:LINE=SHARE for one place."""

    name = "rows"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        try:
            return rows_from(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


AT_LEAST_ONE = Whole(min=1)


def choice(option: str, among: Sequence[str], says: str) -> Callable[[Command], Command]:
    """An option that takes one of several words; the first is its default."""
    return click.option(option, type=click.Choice(among), default=among[0], show_default=True, help=says)


WORKLOAD_OPTIONS = [
    click.option("--model", metavar="NAME", help="A model of the catalog (default: gpt2), or a config.json."),
    click.option("--config", metavar="CONFIG_JSON", help="A Hugging Face config.json, or its folder."),
    click.option("--workload", metavar="FILE[:NAME]", help="Your own step: build, make_batch and train_step."),
    click.option("--dequantize", is_flag=True, help="Train the weights of a quantized config.json unquantized."),
    click.option("--layers", type=AT_LEAST_ONE, help="Change the model: layers."),
    click.option("--hidden", type=AT_LEAST_ONE, help="Width of the residual stream."),
    click.option("--heads", type=AT_LEAST_ONE, help="Attention heads."),
    click.option("--kv-heads", type=AT_LEAST_ONE, help="Key/value heads."),
    click.option("--ffn", type=AT_LEAST_ONE, help="Inner width of the feed-forward network."),
    click.option("--vocab", type=AT_LEAST_ONE, help="Vocabulary size."),
    click.option("--seq-len", type=AT_LEAST_ONE, help="Sequence length to train at."),
    click.option("--image-size", type=AT_LEAST_ONE, help="Pixels a side."),
    choice("--precision", PRECISIONS, "Precision of weights and computation; amp: autocast over fp32 weights."),
    choice("--optimizer", OPTIMIZERS, "The optimizer, which decides the state kept for every parameter."),
    choice("--recompute", RECOMPUTES, "Activation checkpointing: of attention, or of whole layers."),
    choice("--attention", ATTENTIONS, "Kernel of scaled_dot_product_attention; auto: what torch picks."),
    click.option(
        "--sharding",
        type=click.Choice((*SHARDINGS, *SHARDING_ALIASES)),
        default="none",
        show_default=True,
        callback=lambda _, __, name: SHARDING_ALIASES.get(name, name),
        help="What is divided over the GPUs, by name of who does it: optimizer state (zero1), gradients, parameters "
        "too. zero2, zero3: FSDP2 under autocast; fsdp2: with its own mixed precision.",
    ),
    click.option(
        "--gpus", type=AT_LEAST_ONE, default=1, show_default=True, help="GPUs to shard over; of a command, its ranks."
    ),
    click.option("--tensor-parallel", type=AT_LEAST_ONE, default=1, help="GPUs over which each block is cut."),
    click.option("--sequence-parallel", is_flag=True, help="Cut what tensor parallel leaves whole as well."),
    click.option("--context-parallel", type=AT_LEAST_ONE, default=1, help="GPUs over which each sequence is cut."),
    click.option("--expert-parallel", type=AT_LEAST_ONE, default=1, help="GPUs over which experts are spread."),
    click.option("--pipeline-parallel", type=AT_LEAST_ONE, default=1, help="Stages of a pipeline of blocks."),
    choice("--schedule", SCHEDULES, "Pipeline schedule: how many micro-batches' activations wait for backward."),
    click.option(
        "--micro-batches",
        type=Whole(min=0),
        default=0,
        help="Micro-batches of a step, of --batch-size samples each (default: as many as there are stages).",
    ),
    click.option(
        "--virtual-stages",
        type=Whole(min=2),
        default=2,
        show_default=True,
        help="Pieces of the network on each GPU of an interleaved pipeline.",
    ),
    click.option(
        "--freeze",
        default=NOTHING_FROZEN,
        show_default=True,
        metavar=f"N|{ALL_BUT_HEAD}",
        help="Freeze the first N blocks and all before them, or everything but the last layer.",
    ),
    choice(
        "--adapter", ADAPTERS, "lora: freeze the weights, train low-rank matrices beside them; dora: magnitudes, too."
    ),
    choice("--adapter-dtype", ADAPTER_DTYPES, "Of adapters: as the base's weights, or fp32, PEFT's default."),
    click.option(
        "--lora-rank", type=AT_LEAST_ONE, default=DEFAULT_LORA_RANK, show_default=True, help="Width of an adapter."
    ),
    click.option(
        "--lora-targets",
        default=ALL_LINEAR,
        show_default=True,
        metavar="NAMES",
        help="Linear layers that have adapters, e.g. q_proj,v_proj.",
    ),
    choice("--base-quantization", BASE_QUANTIZATIONS, "Of the frozen weights under adapters (QLoRA: nf4-dq)."),
    click.option(
        "--assume-rows",
        "assumed_rows",
        type=Rows(),
        multiple=True,
        metavar="[FILE:LINE=]SHARE",
        help="Simulated: what share is kept where a shape depends on computed values (nonzero, boolean masks).",
    ),
]
DEVICE_OPTIONS = [
    click.option("--gpu", metavar="DEVICE", help="0, a UUID or sim:NAME (default: a free GPU, else sim:a100-80gb)."),
    click.option("--limit", "limit_bytes", type=Size(), help="Never reserve more than this, e.g. 20GiB."),
    click.option("--share", is_flag=True, help="Use a GPU that other processes use, in what they leave."),
    click.option(
        "--headroom", type=Finite(0, 1, max_open=True), default=0.1, show_default=True,
        help="Share of the GPU to leave free: the formula does, a search says which batch does.",
    ),
    click.option("--target-batch", type=AT_LEAST_ONE, help="Wanted global batch size: says the accumulation steps."),
    click.option("--python", metavar="PATH", help="Interpreter that has torch (default: this one)."),
    click.option(
        "--timeout", "timeout_s", type=Finite(min=1), default=300.0, show_default=True,
        help="Seconds of silence, of a command without an optimizer step, after which a trial counts as hung.",
    ),
    click.option("--steps", type=Whole(1, 10_000), default=3, show_default=True, help="Steps of a trial."),
]  # fmt: skip
