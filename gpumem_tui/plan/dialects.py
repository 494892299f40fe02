"""A command with changes in its framework's own words: as far as its line can say them, and what to write into it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from gpumem_tui.formula.records import BF16_SINCE
from gpumem_tui.formula.techniques import (
    ALLOCATOR,
    DEEPSPEED,
    HALF_LENGTH,
    SHARDED,
    SHARDS,
    TYPED,
    Price,
    Technique,
    techniques_of,
)
from gpumem_tui.launchers import MODULES, NAMES, PYTHON
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.frameworks import AUTOCAST_FP16, Dialect, dialect_of, scripts_of
from gpumem_tui.workload.command import ACCUMULATION, Command

_PASSES = r"(?:accumulate[_-]grad[_-]batches|(?:grad(?:ient)?[_-])?accum(?:ulation)?(?:[_-]steps)?)"
"""Names of the passes of an optimizer step: Lightning; transformers and nanoGPT, many others."""
_GIVES_PASSES = re.compile(rf"-{{0,2}}(?:[\w.]+[.])?{_PASSES}")
"""Options and overrides that give them, without their value."""
_SETS_PASSES = re.compile(rf"^[ \t]*[\"']?({_PASSES})[\"']?\s*[:=]\s*(\d+(?: *\* *\d+)*)", re.MULTILINE)
"""Where a configuration, or a script for its options, shows how many: a number, or a product of some."""
_OWN_OPTION = re.compile(
    rf"add_argument\(\s*[\"'](--{_PASSES})[\"'](?:(?:(?!add_argument)[\s\S])*?\bdefault\s*=\s*([\w.]+))?"
)
"""A script's own option for them, with its default."""
_OWN_SWITCHES = {
    "checkpointing": r"--(?:use[_-])?(?:grad(?:ient)?|activation)[_-]checkpoint(?:ing|s)?",
    "adamw-8bit": r"--(?:use[_-])?(?:8[_-]?bit[_-](?:adamw?|optim(?:izer)?)|adamw?[_-]?8[_-]?bit)",
    "lora": r"--(?:use|enable|with)[_-](?:lora|peft)",
}
"""By change, how scripts name an option of their own for it: diffusers' examples, PEFT's, many others."""
_IS_SWITCH = r"[\"'](?:(?!add_argument)[\s\S])*?\baction\s*=\s*(?:[\"']store_true[\"']|argparse\.BooleanOptionalAction)"
_LENGTH = re.compile(
    r"-{0,2}(?:[\w.]+[.])?"
    r"(?:max[_-])?(?:seq(?:uence)?(?:[_-]?len(?:gth)?)|(?:block|context)[_-](?:size|len(?:gth)?)|cutoff[_-]len|length)"
)
"""Options and overrides that give the tokens of a sample, without their value."""
_SHORTEST = 128
"""Tokens of a sample: shorter ones are not proposed."""


def _own_switch(command: Command, change: str) -> str:
    """Return the option by which a script has a change itself; empty for none, and where the line has it already."""
    named = _OWN_SWITCHES.get(change)
    found = re.search(rf"add_argument\(\s*[\"']({named}){_IS_SWITCH}", _script(command)) if named else None
    return "" if found is None or found[1] in command.words else found[1]


def _script(command: Command) -> str:
    """Return the text of the Python file that a command runs; empty where none is named or it cannot be read."""
    return next(iter(scripts_of(command)), "")


# The length of a sample


def _number_in(words: Sequence[str], given_by: re.Pattern[str]) -> tuple[int, str, int] | None:
    """Return where a line gives a number by such an option: the word's place, its option, and the number."""
    for index, word in enumerate(words[1:], 1):
        option, equals, value = word.partition("=")
        if not given_by.fullmatch(option):
            continue
        if not equals and option.startswith("-") and index + 1 < len(words):
            value = words[index + 1]
        if value.isdecimal():
            return index, option, int(value)
    return None


def half_length(command: Command) -> int | None:
    """Return half the tokens of a sample; None where the line does not say how many there are, or they are few."""
    found = _number_in(command.words, _LENGTH)
    return found[2] // 2 if found is not None and found[2] >= 2 * _SHORTEST else None


def _with_number(words: tuple[str, ...], place: tuple[int, str, int], number: int | str) -> tuple[str, ...]:
    """Return the words with another number, or a place for one, where `_number_in` found one."""
    index, option, _ = place
    changed = list(words)
    if "=" in words[index]:
        changed[index] = f"{option}={number}"
    else:
        changed[index + 1] = str(number)
    return tuple(changed)


# The passes of an optimizer step


def _with_passes(
    command: Command, words: tuple[str, ...], dialect: Dialect, passes: int, ranks: int
) -> tuple[str, ...] | None:
    """Return the words with so many times the passes as there are; None where the line has no words for them.

    The line's own number is changed; else the script's own option is added, or its framework's, with what its
    configuration states by now taken times as many. If `ranks` share it, it is made a multiple of them.
    """
    said = _said_passes(command, words, dialect)
    wanted = said * passes * (ranks if dialect.shares_passes and said * passes % ranks else 1)
    if wanted == said or any(ACCUMULATION in word for word in words):
        return words
    if (place := _number_in(words, _GIVES_PASSES)) is not None:
        return _with_number(words, place, wanted)
    if (own := _OWN_OPTION.search(_script(command))) is not None and (own[2] or "1").isdecimal():
        return (*words, own[1], str(passes * int(own[2] or 1)))
    if not (dialect.form and dialect.passes):
        return None
    if wanted == passes:
        added = dialect.words(f"{dialect.passes}={ACCUMULATION}")
    elif dialect.overrides:
        added = dialect.words(f"{dialect.passes}={wanted}")
    else:
        return None
    return _added(words, added, dialect)


def with_accumulation(command: Command) -> Command | None:
    """Return the command with ``{accumulation}`` as its passes; None where its words do not show how to write that."""
    words, dialect = command.words, dialect_of(command)
    if (place := _number_in(words, _GIVES_PASSES)) is not None:
        return replace(command, words=_with_number(words, place, ACCUMULATION))
    if (own := _OWN_OPTION.search(_script(command))) is not None:
        return replace(command, words=(*words, own[1], ACCUMULATION))
    if not (dialect.form and dialect.passes):
        return None
    added = dialect.words(f"{dialect.passes}={ACCUMULATION}")
    return replace(command, words=_added(words, added, dialect))


def _said_passes(command: Command, words: Sequence[str], dialect: Dialect) -> int:
    """Return the passes that a line states, else its configurations, the last that does, or the script with its own."""
    if (place := _number_in(words, _GIVES_PASSES)) is not None:
        return place[2]
    scripts = scripts_of(command) if dialect.globals else ()
    texts = (*scripts[:1], command.settings, *scripts[1:])
    said = [found[2] for text in texts for found in _SETS_PASSES.finditer(text)]
    return prod(int(factor) for factor in said[-1].split("*")) if said else 1


def _added(words: tuple[str, ...], added: Sequence[str], dialect: Dialect) -> tuple[str, ...]:
    """Return the words with further ones in the place that the framework has for them."""
    place = words.index(dialect.after) + 1 if dialect.after in words else len(words)
    return (*words[:place], *added, *words[place:])


# Several ranks that hold parts

_LINES = "lines"
"""Among a change's words: what is to be written into the program, as its run found it."""


def sharded_line(command: Command, gpus: int, key: str = SHARDED) -> tuple[str, ...] | None:
    """Return the words that start so many ranks, each with a part of the model; None where the line cannot say that.

    Args:
        key: of `SHARDS`.
    """
    dialect = dialect_of(command)
    shards = dialect.shards if key == SHARDED else dialect.zero.replace("{stage}", str(DEEPSPEED[key]))
    return _over(command, gpus, shlex.split(shards), dialect) if shards else None


def launched(command: Command, gpus: int) -> Command:
    """Return the command as so many ranks are started; itself where its line does that, or has no place for it."""
    words = _over(command, gpus, (), dialect_of(command)) if gpus > 1 else None
    return command if words is None else replace(command, words=words)


def _over(command: Command, gpus: int, shards: Sequence[str], dialect: Dialect) -> tuple[str, ...] | None:
    """Return the words that start so many ranks, with others by which these hold parts."""
    if command.processes > 1:
        return _added(command.words, shards, dialect)
    ways = (shlex.split(way.format(gpus=gpus)) for way in dialect.ranks)
    return next((line for way in ways if (line := _started(command.words, way, shards, dialect))), None)


def with_lines(change: Technique, config: SearchConfig, batch_size: int, lines: Sequence[str]) -> Technique:
    """Return a change that was made to a program at a batch size, with the lines that its author writes for it."""
    if not lines:
        return change
    typed = typed_command(config, (change,)).command
    starts = launched(typed, change.gpus)
    how = starts.files_at(batch_size) + starts.text_at(batch_size) + besides(lines)
    return replace(change, how=how, words={_LINES: "\n".join(lines)})


def besides(lines: Sequence[str]) -> str:
    """Return what to write into the program, to be said after a command."""
    return f", and in the program {'; '.join(lines).replace(':; ', ': ')}" if lines else ""


def _started(
    words: tuple[str, ...], launcher: Sequence[str], shards: Sequence[str], dialect: Dialect
) -> tuple[str, ...]:
    """Return the words started by a launcher; empty where there is no place for it."""
    if launcher[0] == "env":
        return (*launcher, *words, *shards)
    if launcher[0].startswith("-"):
        return (*words, *shards, *launcher)
    for index, word in enumerate(words):
        name, after = os.path.basename(word), words[index + 1 :]
        if name in NAMES:
            after = after[1:] if after[:1] == (dialect.after,) else after
        elif PYTHON.fullmatch(name):
            if name != word:  # Python is named by its path: the launcher's own program may not be on the PATH
                module = MODULES.get(launcher[0])
                if module is None:
                    return ()
                launcher = (word, "-m", module, *launcher[2 if dialect.after else 1 :])
            while after and re.fullmatch("-[a-zA-Z]", after[0]) and after[0] not in ("-m", "-c"):
                after = after[1:]
            if after[:1] == ("-c",):
                return ()
        else:
            continue
        options, others = (shards, ()) if dialect.after else ((), shards)
        return (*words[:index], *launcher, *options, *after, *others)
    return ()


# Changes


def typed_changes(config: SearchConfig) -> Iterator[Technique]:
    """Yield the changes that a line states, if any, where this one's framework has words for them."""
    command = config.workload.command
    assert command is not None, "a command is planned"
    for key in TYPED:
        change = techniques_of("command")[key]
        if key == HALF_LENGTH:
            if (length := half_length(command)) is not None:
                yield change.filled(Price(times_halved=1), length=f"{length:,}")
        elif _own_switch(command, key) or (key in dialect_of(command).says and dialect_of(command).form):
            yield spoken(change, config)


def spoken(change: Technique, config: SearchConfig) -> Technique:
    """Return a change with its framework's words for how to have it, where there are such."""
    command = config.workload.command
    if command is None:
        return change
    if change.key in SHARDS and (line := sharded_line(command, change.gpus, change.key)) is not None:
        return replace(change, how=replace(command, words=line).text)
    if own := _own_switch(command, change.key):
        return replace(change, how=own)
    if change.key not in (dialect := dialect_of(command)).says:
        return change
    return replace(change, how=_how(change, config, dialect))


def _how(change: Technique, config: SearchConfig, dialect: Dialect) -> str:
    values = _values(change, config, dialect)
    if dialect.form:
        return " ".join(dialect.words(values))
    return ", ".join(dialect.written(values))


def _values(change: Technique, config: SearchConfig, dialect: Dialect) -> str:
    said = dialect.says[change.key]
    has_bf16 = config.device.gpu.compute_capability >= BF16_SINCE
    if change.key != "autocast" or has_bf16:
        return said
    return dialect.says.get(AUTOCAST_FP16, said.replace("bf16", "fp16"))


@dataclass(frozen=True)
class TypedCommand:
    """A command with changes, as far as its line can say them.

    Attributes:
        injected: the changes that it does not say. `written`: what to write into the program for them.
        accumulates: it states the passes of a step, or there is one. `shards`: it starts ranks that hold parts.
    """

    command: Command
    injected: tuple[Technique, ...]
    written: tuple[str, ...]
    accumulates: bool
    shards: bool


def typed_command(config: SearchConfig, changes: Sequence[Technique], passes: int = 1) -> TypedCommand:
    """Return a command with changes in its framework's words, with ``{batch}`` for its batch where its line has it."""
    command = config.workload.command
    assert command is not None, "a command is planned"
    dialect, words = dialect_of(command), command.words
    written, injected, added, own, gpus, shards = list[str](), list[Technique](), list[str](), list[str](), 1, ""
    if command.proposal is not None and not command.takes_batch:
        words = _with_batch(words, command.proposal.proposed.split(" "))
    for change in changes:
        if change.key == ALLOCATOR:
            written += [] if change.how.startswith("export") else [change.how]  # an export is before the command
        elif change.key == HALF_LENGTH:
            place = _number_in(words, _LENGTH)
            assert place is not None, "what has no length is not offered a shorter one"
            words = _with_number(words, place, place[2] // 2)
        elif change.key in SHARDS:
            gpus = change.gpus
            if sharded_line(command, gpus, change.key) is not None:
                shards = change.key
            else:
                injected.append(change)
                written += change.words[_LINES].split("\n") if _LINES in change.words else [change.how]
        elif switch := _own_switch(command, change.key):
            own.append(switch)
        elif change.key in dialect.says and dialect.form:
            added += dialect.words(_values(change, config, dialect))
        else:
            injected.append(change)
            written.append(spoken(change, config).how)
    words = (*_added(words, added, dialect), *own)
    with_passes = _with_passes(command, words, dialect, passes, gpus)
    if with_passes is None:
        name = dialect.passes or "".join(re.findall(rf"\b{_PASSES}\b", _script(command))[:1])
        more = f"{name} × {passes}" if name else ""
        written.append(more or f"{passes} passes before each optimizer step, the loss divided by {passes}")
    typed = replace(command, words=with_passes or words)
    if shards and (line := sharded_line(typed, gpus, shards)) is not None:  # the last: a launcher's options may end it
        typed = replace(command, words=line)
    return TypedCommand(typed, tuple(injected), tuple(written), with_passes is not None, bool(shards))


def _with_batch(words: Sequence[str], proposal: Sequence[str]) -> tuple[str, ...]:
    """Return the words with the batch as the proposal has it, in the place of the number."""
    flag = proposal[0].partition("=")[0]
    found = list(words)
    place = next(index for index, word in enumerate(found) if word.partition("=")[0] == flag)
    found[place : place + len(proposal)] = proposal
    return tuple(found)
