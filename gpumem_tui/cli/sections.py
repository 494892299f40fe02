"""Options in named sections: `--help` lists those that are used most, `--help-all` every one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import cloup
from click.shell_completion import CompletionItem

from gpumem_tui.cli.types import Decorator, Whole
from gpumem_tui.errors import OptionError
from gpumem_tui.options.table import SECTIONS, Section

_EVERY = "gpumem_tui.help_all"
COMMAND = "gpumem_tui.command"
"""Where a context keeps the words after ``--``."""


class SectionedOption(click.Option):
    """An option of a section of the help.

    Args:
        section: its heading. `is_common`: `--help` lists it, too.
        of_commands: whether it does anything for a command after ``--``.
    """

    group: cloup.OptionGroup

    def __init__(
        self,
        words: Sequence[str],
        *,
        section: Section,
        is_common: bool = False,
        of_commands: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(words, **kwargs)
        self.section = section
        self.is_common = is_common
        self.of_commands = of_commands

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and what it does; None where this help leaves it out."""
        if not self.of_commands and ctx.meta.get(COMMAND):
            return None
        record = super().get_help_record(ctx)
        return record if self.is_common or _EVERY in ctx.meta else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return what could be typed: names of the catalog of a GPU and of a model."""
        names = _NAMES.get(self.name or "")
        if names is None:
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name) for name in names() if name.startswith(incomplete)]

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return what follows the sentence: the default of a number; in the long help every one, and bounds."""
        extra = super().get_help_extra(ctx)
        if _EVERY in ctx.meta:
            return extra
        tells_default = "default" in extra and not isinstance(self.type, click.Choice)
        return {"default": extra["default"]} if tells_default else {}

    def make_metavar(self, ctx: click.Context) -> str:
        """Return what its value is called; in the short help, whose sentences name the words of a choice, a word."""
        metavar = super().make_metavar(ctx)
        if _EVERY in ctx.meta or self.metavar is not None:
            return metavar
        if isinstance(self.type, click.Choice):
            return (self.name or "").upper()
        return "N" if isinstance(self.type, Whole) else metavar


def _gpu_names() -> list[str]:
    from gpumem_tui.catalog.custom import CUSTOM
    from gpumem_tui.catalog.loader import gpus

    try:
        own = list(gpus())
    except OptionError:  # of the settings: the command itself notes this
        own = []
    return [f"sim:{name}" for name in (*own, CUSTOM)]


def _model_names() -> list[str]:
    from gpumem_tui.catalog.hub import cached_names
    from gpumem_tui.catalog.loader import models

    return [*models(), *cached_names()]


_NAMES = {"gpu": _gpu_names, "model": _model_names}


def sectioned(*words: str, section: Section, is_common: bool = False, **kwargs: Any) -> Decorator:
    """Return a decorator that gives a command an option of a section."""
    return click.option(*words, cls=SectionedOption, section=section, is_common=is_common, **kwargs)


class Sectioned(cloup.Command):
    """A command whose help has sections, in the order of `SECTIONS`, and a second, longer help."""

    def __init__(self, *args: Any, params: list[click.Parameter], **kwargs: Any) -> None:
        groups = {title: cloup.OptionGroup(title) for title in SECTIONS}
        every = [*params, _help_all()]
        every.sort(key=lambda param: SECTIONS.index(param.section) if isinstance(param, SectionedOption) else -1)
        for param in every:
            if isinstance(param, SectionedOption):
                param.group = groups[param.section]
        super().__init__(*args, params=every, **kwargs)

    def format_params(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections that this help has anything in."""
        assert isinstance(formatter, cloup.HelpFormatter)
        sections = [self.make_option_group_help_section(group, ctx) for group in self.option_groups]
        formatter.write_many_sections([section for section in sections if section.definitions])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Say where the rest is."""
        if _EVERY not in ctx.meta:
            name = f"gpumem-tui {ctx.info_name}"
            formatter.write_paragraph()
            formatter.write_text(f"All {len(self.params)} options: `{name} --help-all`. More: `gpumem-tui manual`.")


def _help_all() -> SectionedOption:
    def show(ctx: click.Context, _param: click.Parameter, is_asked: bool) -> None:
        if is_asked and not ctx.resilient_parsing:
            ctx.meta[_EVERY] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return SectionedOption(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show, section="Output",
        is_common=True, help="Show every option.",
    )  # fmt: skip
