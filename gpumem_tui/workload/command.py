"""A user's own training command as the workload. Standard library only: it crosses a process boundary."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpumem_tui import launchers

BATCH, ACCUMULATION = "{batch}", "{accumulation}"
_ASKS = "-batch"
"""How the name of a file ends that was written with ``{batch}`` as its batch size."""

_BATCH_FLAG = re.compile(
    r"-{0,2}(?:[\w.]+[.])?"
    r"(?:(?:per[_-]device[_-])?(?:train[_-])?(?:micro[_-]?|mini[_-]?)?batch(?:[_-]?size)?(?:[_-]per[_-](?:gpu|device))?"
    r"|(?:micro[_-]?)?bsz?|b)"
)
"""Options and Hydra-like overrides that give a batch size, without their value."""

_OF_A_PASS = re.compile(r"micro|per[_-](?:device|gpu)")
"""In such an option: it is the batch of a pass; one without next to it may be that of an optimizer step."""


_BATCH_KEY = re.compile(
    rf"(?:^|[{{,])[ \t-]*[\"']?(?!b\b){_BATCH_FLAG.pattern}[\"']?\s*[:=]\s*[\"']?(?:\d|auto|\$)"
    rf"|\s--{_BATCH_FLAG.pattern}[ =](?:\d|\$)",
    re.MULTILINE | re.IGNORECASE,
)
"""Where a configuration states a batch size."""
_STATED = re.compile(
    rf"(?<![\w.-])(?!b\b){_BATCH_FLAG.pattern}[\"']?[ \t]*[:=][ \t]*\d+(?![\w.])"
    rf"|(?<=\s)--{_BATCH_FLAG.pattern}[ =]\d+\b",
    re.IGNORECASE,
)
"""The same as a number, from its name on, without what sed takes for a pattern."""
_OPTION = r"(?:add_argument|option|Option)\(\s*(?:[\"']-\w[\"'],\s*)?[\"'](--[\w.-]+)[\"']"
_FLAG = r"(?:DEFINE_integer|DEFINE_int)\(\s*[\"']([\w-]+)[\"']"
_FIELD = r"^[ \t]+(\w+)\s*:\s*(?:int|Optional\[int\]|int \| None)\s*(?:=|$)"
_OPTIONS = re.compile(rf"{_OPTION}|{_FLAG}|{_FIELD}", re.M)
"""Options of a script: argparse's, click's and typer's, absl's; fields of a class, which may be read from the line."""
_READS_FIELDS = re.compile(r"HfArgumentParser|TrlParser|tyro\.cli|simple_parsing|draccus|jsonargparse|typer\.run")
_PARAMETERS = re.compile(r"[(,]\s*(\w+)\s*(?::\s*int\s*)?=\s*\d+\s*(?=[,)])")
"""Parameters of functions, which Fire makes options of."""
_TRAINER_BATCH = "--per_device_train_batch_size"
"""The batch size of transformers' `TrainingArguments` and of TRL's configurations, which are of that class."""
_TRAINERS = re.compile(r"\b(?:TrainingArguments|(?:SFT|DPO|GRPO|KTO|Reward|ORPO)Config)\b")
_VARIABLES = re.compile(r"(?:environ(?:\.get)?[(\[]|getenv\()\s*[\"'](\w+)[\"']")
"""Environment variables that a script reads."""
_ARGUMENTS = re.compile(r"(\w+)\s*=\s*int\(\s*(?:sys\.)?argv\[(\d+)\]")
"""Numbers that a script reads by their place in the line."""
_SHELLS = ("sh", "bash", "zsh", "dash")

_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".sh")
_NAMED = re.compile(rf"[^\s\"'=,;:|&$(){{}}\[\]<>]+(?:{'|'.join(map(re.escape, _CONFIGURATIONS))})(?![\w./-])")
"""Names of such files in a text."""

_LARGEST_BYTES = 1 << 20
"""Largest configuration file; anything larger is data."""


@dataclass(frozen=True)
class Proposal:
    """The place of a batch size in a command: the words, what they would be with ``{batch}``, and the size it has.

    Attributes:
        at: the index of the first of these words.
    """

    given: str
    proposed: str
    batch_size: int
    at: int


@dataclass(frozen=True)
class Command:
    """A command line that trains: its words, in which ``{batch}`` and ``{accumulation}`` stand for numbers.

    Attributes:
        words: the program and its arguments; not empty.
        cwd: the folder it runs in.
    """

    words: tuple[str, ...]
    cwd: str

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> Command:
        """Return the inverse of `dataclasses.asdict` after a trip through JSON."""
        return cls(tuple(values["words"]), values["cwd"])

    @property
    def text(self) -> str:
        """The command as it would be typed."""
        return _typed(self.words)

    def text_at(self, batch_size: int, accumulation: int = 1) -> str:
        """Return the command as it would be typed to train at one batch size, after what `files_at` types."""
        copies = _copies(self._templates, f"-{batch_size}")
        return _typed(tuple(_with_copy(word, copies) for word in self.filled(batch_size, accumulation)))

    def files_at(self, batch_size: int, accumulation: int = 1) -> str:
        """Return the shell's words that write the files of `text_at`, to stand before it; empty where none is named."""
        templates = self._templates
        copies = _copies(templates, f"-{batch_size}")
        written = []
        for name, path in templates.items():
            given = name if Path(self.cwd, name) == path else os.path.relpath(path, self.cwd)
            text, to = path.read_text(), str(Path(given).with_name(Path(copies[name]).name))
            edits = [f"s/{BATCH}/{batch_size}/g"]
            edits += [f"s/{ACCUMULATION}/{accumulation}/g"] if ACCUMULATION in text else []
            edits += [f"s#{other}#{copy}#" for other, copy in copies.items() if other in _NAMED.findall(text)]
            line = f"sed {shlex.quote('; '.join(edits))} {shlex.quote(given)} > {shlex.quote(to)} && "
            written.append(line + (f"chmod +x {shlex.quote(to)} && " if os.access(path, os.X_OK) else ""))
        return "".join(dict.fromkeys(written))

    @property
    def takes_batch(self) -> bool:
        """Return whether the line has a place for the batch size: in its words, or in a configuration file it names."""
        return any(BATCH in word for word in self.words) or bool(self._templates)

    @property
    def takes_accumulation(self) -> bool:
        """Return whether the line has a place for the passes of a step: in its words, or in a file with ``{batch}``."""
        texts = (*self.words, *(path.read_text() for path in self._templates.values()))
        return any(ACCUMULATION in text for text in texts)

    def filled(self, batch_size: int, accumulation: int = 1) -> tuple[str, ...]:
        """Return the words for one batch size."""
        return tuple(
            word.replace(BATCH, str(batch_size)).replace(ACCUMULATION, str(accumulation)) for word in self.words
        )

    @property
    def files(self) -> list[str]:
        """Return the configuration files that its words name, as they name them."""
        named = (word.rpartition("=")[2] for word in self.words)
        return [name for name in named if name.endswith(_CONFIGURATIONS) and Path(self.cwd, name).is_file()]

    @property
    def batch_file(self) -> str:
        """The first of these that states a batch size; empty where none does, as a data set."""
        return next((name for name, _ in self._stating()), "")

    @property
    def batch_written(self) -> tuple[str, str] | None:
        """The shell's words that write a copy of `batch_file` with ``{batch}`` as its batch size, and that copy's name.

        No words where that copy is there already. None where no such file states one, or states several, of which none
        alone is that of a pass, or where another file has that name.
        """
        name, text = next(self._stating(), ("", ""))
        stated = list(_STATED.finditer(text))
        stated = [one for one in stated if _OF_A_PASS.search(one[0])] if len(stated) > 1 else stated
        if len(stated) != 1:
            return None
        copy = str(Path(name).with_name(f"{Path(name).stem}{_ASKS}{Path(name).suffix}"))
        given, before = stated[0][0], text[: stated[0].start()]
        if given in before.rpartition("\n")[2]:
            return None  # of two on a line, sed changes the first
        asked = f"{given.rstrip('0123456789')}{BATCH}"
        if Path(self.cwd, copy).exists():
            is_it = Path(self.cwd, copy).read_text(errors="replace") == before + asked + text[stated[0].end() :]
            return ("", copy) if is_it else None
        edit = f"{1 + before.count(chr(10))}s/{given}/{asked}/"
        return f"sed {shlex.quote(edit)} {shlex.quote(name)} > {shlex.quote(copy)}", copy

    def _stating(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the text of each configuration file that states a batch size."""
        for name in self.files:
            path = Path(self.cwd, name)
            text = path.read_text(errors="replace") if path.stat().st_size <= _LARGEST_BYTES else ""
            if not (name.endswith(".json") and text.lstrip().startswith("[")) and _BATCH_KEY.search(text):
                yield name, text

    def with_file(self, name: str, other: str) -> Command:
        """Return the command with another configuration file in the place of one that its words name."""
        return replace(self, words=tuple(_with_copy(word, {name: other}) for word in self.words))

    @property
    def settings(self) -> str:
        """The text of the configuration files that its words name."""
        paths = (Path(self.cwd, name) for name in self.files)
        return "\n".join(path.read_text(errors="replace") for path in paths if path.stat().st_size <= _LARGEST_BYTES)

    @property
    def _templates(self) -> dict[str, Path]:
        """The files with ``{batch}`` in them, by the name that the words or another such file have for them.

        A file that names one of them counts, too, as its copy has to name that one's copy.
        """
        found: dict[str, Path] = {}
        for name in self.files:
            self._look_through(name, Path(self.cwd, name), found, set())
        return found

    def _look_through(self, name: str, path: Path, found: dict[str, Path], seen: set[Path]) -> bool:
        """Add a file and those that it names to `found` where they are templates; False where it is none."""
        if name in found:
            return True
        if path in seen or path.stat().st_size > _LARGEST_BYTES:
            return False
        seen.add(path)
        text = path.read_text(errors="replace")
        is_template = BATCH in text
        for other in dict.fromkeys(_NAMED.findall(text)):
            at = next(filter(Path.is_file, (Path(self.cwd, other), path.parent / other)), None)
            if at is not None and self._look_through(other, at, found, seen):
                is_template = True
        if is_template:
            found[name] = path
        return is_template

    @contextmanager
    def written(self, batch_size: int, accumulation: int = 1) -> Iterator[tuple[str, ...]]:
        """Yield the words for one batch size, with a copy in the place of each file that has ``{batch}`` in it.

        Each copy is written next to its file, as paths in it are relative to that, for as long as the context lasts. A
        file that another one names (DeepSpeed's JSON in a YAML) is copied with that one.

        Raises:
            OSError: a copy cannot be written.
        """
        templates = self._templates
        copies = _copies(templates, f".gpumem-tui-{os.getpid()}-{batch_size}")
        written: list[Path] = []
        try:
            for name, path in templates.items():
                copy = path.with_name(Path(copies[name]).name)
                if copy not in written:
                    text = _NAMED.sub(lambda found: copies.get(found[0], found[0]), path.read_text())
                    written.append(copy)
                    copy.write_text(text.replace(BATCH, str(batch_size)).replace(ACCUMULATION, str(accumulation)))
                    shutil.copymode(path, copy)
            yield tuple(_with_copy(word, copies) for word in self.filled(batch_size, accumulation))
        finally:
            for copy in written:
                copy.unlink(missing_ok=True)

    def accumulation(self, batch_size: int, target_batch: int | None, gpus: int) -> int:
        """Return the micro-batches that reach the wanted global batch; 1 if none is wanted."""
        return 1 if target_batch is None else max(1, math.ceil(target_batch / (batch_size * gpus)))

    @property
    def proposal(self) -> Proposal | None:
        """The option that seems to give the batch size of a pass, if one does."""
        found = tuple(self._proposals())
        return next((one for one in found if _OF_A_PASS.search(one.given)), found[0] if found else None)

    def _proposals(self) -> Iterator[Proposal]:
        for index, word in enumerate(self.words[1:], 1):
            option, equals, value = word.partition("=")
            is_variable = bool(equals) and option.isupper()
            if not _BATCH_FLAG.fullmatch(option.lower() if is_variable else option):
                continue
            if equals and value.isdecimal() and int(value):
                yield Proposal(word, f"{option}={BATCH}", int(value), index)
            following = self.words[index + 1] if index + 1 < len(self.words) else ""
            if not equals and option.startswith("-") and following.isdecimal() and int(following):
                yield Proposal(f"{option} {following}", f"{option} {BATCH}", int(following), index)

    def option_in(self, script: str) -> str:
        """Return the option by which a script, whose text that is, seems to take the batch size; empty for none."""
        for found in _OPTIONS.finditer(script):
            option = found[1] or f"--{found[2] or found[3]}"
            is_read = found[3] is None or _READS_FIELDS.search(script)
            if is_read and _BATCH_FLAG.fullmatch(option) and option not in self.words:
                return option
        parameters = _PARAMETERS.findall(script) if "fire.Fire(" in script else []
        if named := [name for name in parameters if len(name) > 1 and _BATCH_FLAG.fullmatch(name)]:
            return f"--{named[0]}"
        reads_trainers = re.search("HfArgumentParser|TrlParser", script) and _TRAINERS.search(script)
        return _TRAINER_BATCH if reads_trainers and not self.batch_file else ""

    def with_variable(self, script: str) -> Command | None:
        """Return the command with ``{batch}`` in the environment variable that its script reads; None without one."""
        named = [name for name in _VARIABLES.findall(script) if len(name) > 1 and _BATCH_FLAG.fullmatch(name.lower())]
        rest = self.words[1:] if self.words[0] == "env" else self.words
        return replace(self, words=("env", f"{named[0]}={BATCH}", *rest)) if named else None

    def with_argument(self, script: str, name: str) -> Command | None:
        """Return the command with ``{batch}`` where its script, a word of that name, reads the size by its place."""
        at = self.words.index(name) if name in self.words else len(self.words)
        for read, place in _ARGUMENTS.findall(script):
            index = at + int(place)
            if _BATCH_FLAG.fullmatch(read.lower()) and index <= len(self.words):
                return replace(self, words=(*self.words[:index], BATCH, *self.words[index + 1 :]))
        return None

    @property
    def _shell_text_at(self) -> int | None:
        """The place of `shell_text`."""
        is_shell = os.path.basename(self.words[0]) in _SHELLS
        places = (place for place, word in enumerate(self.words[:-1], 1) if re.fullmatch("-[a-z]*c", word))
        return next(places, None) if is_shell else None

    @property
    def shell_text(self) -> str:
        """The text that a shell runs by ``-c``; empty where the command is no such shell."""
        at = self._shell_text_at
        return "" if at is None else self.words[at]

    def with_shell_text(self, text: str) -> Command:
        """Return the command with another text for its shell to run."""
        at = self._shell_text_at
        assert at is not None
        return replace(self, words=(*self.words[:at], text, *self.words[at + 1 :]))

    @property
    def says_batch(self) -> bool:
        """Return whether the line tells the batch size, be it as a number."""
        return self.takes_batch or self.proposal is not None

    @property
    def processes(self) -> int:
        """The number of training processes that its launcher starts in all, as far as the line states; else 1."""
        return launchers.processes(self.words)


def _copies(names: Iterable[str], mark: str) -> dict[str, str]:
    """Return the name of each file's copy."""
    return {
        name: str(Path(name).with_name(f"{Path(name).stem.removesuffix(_ASKS)}{mark}{Path(name).suffix}"))
        for name in names
    }


def _with_copy(word: str, copies: Mapping[str, str]) -> str:
    before, equals, name = word.rpartition("=")
    return f"{before}{equals}{copies[name]}" if name in copies else word


def _typed(words: tuple[str, ...]) -> str:
    """Join words as for a shell, with the placeholders readable."""
    return " ".join(word if re.fullmatch(r"[\w@%+=:,./{}-]+", word) else shlex.quote(word) for word in words)
