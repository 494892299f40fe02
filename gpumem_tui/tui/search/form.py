"""The form: what to train, on which GPU, and how to search. Nothing invalid leaves it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Static

from gpumem_tui.catalog.loader import models
from gpumem_tui.errors import OptionError
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.devices import list_gpus
from gpumem_tui.options.workload import visible_gpus
from gpumem_tui.remote.link import LinkLost
from gpumem_tui.remote.ssh import SshOptions
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.kit.choice import ChoiceField
from gpumem_tui.tui.search.form_fields import (
    FIELD_OF_OPTION,
    FIELDS,
    KINDS,
    SHAPE_FIELDS,
    FormField,
    Kind,
    belongs,
)
from gpumem_tui.tui.search.form_values import FormValues, command_words, with_proposal
from gpumem_tui.tui.search.host_request import Edited, HostRequest
from gpumem_tui.tui.search.workload import workload_summary
from gpumem_tui.workload.command import Command

_RESTRICT = {"count": "[0-9]*", "number": "[0-9.]*", "text": ".*"}
_LONGEST = {"count": 8, "number": 10, "text": 0}


class EditScreen(ModalScreen[Edited | None]):
    """Checks every change at once; an error stands beside its control, and the preview keeps the last good values.

    Args:
        now: what is set.
        given: what the program was started with: the user's own configuration, file, command or GPU can be chosen
            again after another was tried.
        host: another machine to begin with; empty for the one that is set.
        ssh: how it is reached; None: as those are that the program was started with, or as the user's settings say.
    """

    CSS_PATH = "form.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "cancel"),
        Binding("ctrl+s", "apply", "apply", priority=True),
        Binding("up", "app.focus_previous", show=False, priority=True),
        Binding("down", "app.focus_next", show=False, priority=True),
    ]

    def __init__(self, now: Edited, given: Edited, host: str = "", ssh: SshOptions | None = None) -> None:
        super().__init__()
        self._good: Edited | HostRequest | None = now
        self._values = FormValues(now, given, ssh)
        self._host = host
        self._model = self._values.model
        self._on_host = now.there is not None
        self._asking: HostRequest | None = None
        self._answer: tuple[HostRequest, str] | None = None

    def compose(self) -> ComposeResult:
        """A row a field, a preview, two buttons."""
        with VerticalScroll(id="form", can_focus=False) as form:
            form.border_title = "Workload"
            form.border_subtitle = "↑↓ field · ←→ choice · enter lists · ctrl+s applies · esc leaves"
            for field in FIELDS:
                error = Static(id=f"{field.name}-error", classes="error", markup=False)
                with Horizontal(classes="field -long" if field.is_long else "field", id=f"{field.name}-field"):
                    yield Label(field.label)
                    yield self._control(field)
                    if not field.is_long:
                        yield error
                if field.is_long:
                    yield error.add_class("below")
                if field.name == "command":
                    yield Button("", id="proposal", compact=True)
            with Vertical(id="foot"):
                yield Static(id="preview")
                with Horizontal(id="buttons"):
                    yield Button("Apply", id="apply", variant="primary", compact=True)
                    yield Button("Cancel", id="leave", compact=True)

    def on_mount(self) -> None:
        """The preview of what is set now, and the cursor where it is said what to train."""
        self._check()
        self.query_one(f"#{self._chosen_kind}").focus()
        if self._host:
            self.query_one("#host", Input).value = self._host
        self.run_worker(self._list_gpus())

    async def _list_gpus(self) -> None:
        """The GPUs of this machine are offered as soon as the driver has named them."""
        found = await in_daemon_thread(list_gpus)
        if isinstance(found, Unknown) or not self.is_mounted:
            return
        self._values.gpus = visible_gpus(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if not self._on_host:
            self._offer_gpus(self._chosen("gpu"))

    def _offer_gpus(self, chosen: str = "") -> None:
        """Those of the machine that is meant; empty for the one to begin with."""
        field = self.query_one("#gpu", ChoiceField)
        listed, first = self._values.gpu_choices(on_host=self._on_host)
        field.offer(dict(listed))
        field.value = chosen or first

    @on(Input.Changed, "#host")
    def _host_changed(self) -> None:
        """Another machine has other GPUs."""
        if bool(self._typed("host")) != self._on_host:
            self._on_host = not self._on_host
            self._offer_gpus()

    @on(ChoiceField.Changed, "#model")
    def _model_changed(self) -> None:
        """The changes of its shape were meant for the model that was; the sequence length may be for this one too."""
        if self._chosen("model") != self._model:
            self._model = self._chosen("model")
            for name in SHAPE_FIELDS:
                if name != "seq_len":
                    self.query_one(f"#{name}", Input).value = ""

    @on(ChoiceField.Refused)
    def _refused(self, message: ChoiceField.Refused) -> None:
        """Beside the choice, until something changes."""
        self.query_one(f"#{message.field.id}-error", Static).update(message.reason)

    @on(ChoiceField.Changed)
    @on(Input.Changed)
    def _changed(self) -> None:
        self._check()

    @on(Input.Submitted)
    @on(Button.Pressed, "#apply")
    def action_apply(self) -> None:
        """Give back the values, if they are good; those for another machine once it has taken them."""
        self._check()
        if isinstance(self._good, Edited):
            self.dismiss(self._good)
        elif self._good is not None and self._asking is None:
            self._asking, self._answer = self._good, None
            self._check()
            self.app.run_worker(self._ask(self._good))  # not the form's: what comes late is to be ended

    async def _ask(self, request: HostRequest) -> None:
        """Have the host check it. Whoever left or changed the form meanwhile wants it no more."""
        said = ""
        try:
            edited = await in_daemon_thread(request.connect)
        except (OptionError, LinkLost) as error:
            said = str(error)
        wanted = self._asking == request and self.is_mounted
        if said and wanted:
            self._asking, self._answer = None, (request, said.removeprefix(f"{request.host}: "))
            self._check()
        elif wanted:
            self.dismiss(edited)
        elif not said and edited.there is not None:
            await in_daemon_thread(edited.there.end)

    def on_unmount(self) -> None:
        """Who is still asked has nobody to tell."""
        self._asking = None

    @on(Button.Pressed, "#leave")
    def _leave(self) -> None:
        self.dismiss(None)

    @on(Button.Pressed, "#proposal")
    def _take_proposal(self) -> None:
        """Write {batch} where the batch size seems to be given."""
        field, proposal = self.query_one("#command", Input), self._values.proposal
        if proposal is not None:
            command = Command(command_words(field.value), os.getcwd())
            field.value = with_proposal(command, proposal).text
            field.focus()

    def _control(self, field: FormField) -> ChoiceField | Input:
        if field.holds == "choice":
            choices, value = self._values.choices(field)
            return ChoiceField(field.label, dict(choices), value, id=field.name)
        return Input(
            self._values.text(field.name),
            placeholder=field.empty,
            id=field.name,
            compact=True,
            select_on_focus=False,
            restrict=_RESTRICT[field.holds],
            max_length=_LONGEST[field.holds],
        )

    # Checking

    def _check(self) -> None:
        errors: dict[str, str] = {}
        kind = self._chosen_kind
        try:
            self._good = self._values.read(self._held())
            about, answer = self._answer or (None, "")
            wrong, said = _place(answer if about == self._good else "", "host")
        except OptionError as error:
            self._good = None
            wrong, said = _place(str(error), kind)
        if said:
            errors[wrong] = said
        shape = models().get(self._chosen("model")) if kind == "model" else None
        for field in FIELDS:
            typed = "" if field.holds == "choice" else self._typed(field.name)
            shown, said = belongs(field, kind, shape, typed, on_host=self._on_host), errors.get(field.name, "")
            self.query_one(f"#{field.name}-field").display = shown
            self.query_one(f"#{field.name}-error", Static).update(said)
            self.query_one(f"#{field.name}-error").display = shown and (bool(said) or not field.is_long)
        button = self.query_one("#proposal", Button)
        button.display = self._values.proposal is not None
        if self._values.proposal is not None:
            button.label = Content(f"{self._values.proposal.proposed} instead of {self._values.proposal.given}")
        self.query_one("#apply", Button).disabled = self._good is None
        if self._asking != self._good:
            self._asking = None  # it was asked about something else
        if self._good is not None:
            lines = _preview(self._good, asking=self._asking is not None)
            self.query_one("#preview", Static).update("\n".join(lines))

    @property
    def _chosen_kind(self) -> Kind:
        return next(kind for kind in KINDS if kind == self._chosen("kind"))

    def _chosen(self, name: str) -> str:
        return self.query_one(f"#{name}", ChoiceField).value

    def _held(self) -> dict[str, str]:
        """What is in every field, by name."""
        return {
            field.name: self._chosen(field.name) if field.holds == "choice" else self._typed(field.name)
            for field in FIELDS
        }

    def _typed(self, name: str) -> str:
        return self.query_one(f"#{name}", Input).value.strip()


def _place(error: str, otherwise: str) -> tuple[str, str]:
    """The field that an error is about, and what it says."""
    option, _, said = error.partition(": ")
    field = FIELD_OF_OPTION.get(option) or FIELD_OF_OPTION.get(option.split(" ")[0])
    return (field, said) if field and said else (otherwise, error)


def _preview(good: Edited | HostRequest, *, asking: bool) -> Iterator[str]:
    if isinstance(good, HostRequest) and asking:
        yield f"connecting to {good.host} …"
        return
    if isinstance(good, HostRequest):
        yield f"{good.host} is asked: it has the files, chooses the GPU and runs the trials"
        yield "the same version of gpumem-tui must be installed there"
        return
    config = good.config
    yield workload_summary(config)
    if config.workload.shape is None and config.workload.hugging_face is None:
        command = config.workload.command
        what = "the file" if command is None else f"it runs in {command.cwd}, and"
        yield f"{what} decides precision, optimizer and the rest"
    predicted = config.formula.max_batch_size
    said = predicted.reason if isinstance(predicted, Unknown) else f"the formula's largest batch is {predicted:,}"
    yield f"{config.device.gpu.title}: {said}"
