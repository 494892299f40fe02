"""Follows a training program that knows nothing of it: its phases, its steps, its models and optimizers."""

from __future__ import annotations

import functools
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from gpumem_tui.causes import Note
from gpumem_tui.memory import Bucket
from gpumem_tui.run.gradients import Gradients
from gpumem_tui.run.later import Later
from gpumem_tui.run.lengths import InputLengths
from gpumem_tui.run.micro_batches import MicroBatches
from gpumem_tui.run.out_of_memory import Tries
from gpumem_tui.run.parts import copies, has_parameters, parts_of_models, scales
from gpumem_tui.run.running_stages import RunningStages
from gpumem_tui.run.samples import Samples
from gpumem_tui.run.updates import UpdatesByHand
from gpumem_tui.step import Phase
from gpumem_tui.step.phases import PhaseHooks, follow_steps, in_backward, mark_backward
from gpumem_tui.step.run import MemorySample, Recorder
from gpumem_tui.step.walking import (
    buffers_in,
    gradients_of,
    holding_memory,
    instances_of,
    outermost,
    parameters_in,
    parameters_of,
    state_of,
)

_BETWEEN_SAMPLES_S = 0.05


class Program:
    """A program that trains in this process.

    A step is what the program states itself (`begin_step`), else one of the first optimizer that steps, or an update
    that a program without any makes. Hooks mark
    the phases: forward begins when a module is called by no other, backward with `torch.autograd.backward`, the
    optimizer phase with any optimizer's `step`.

    Args:
        memory: the device module, as `torch.cuda`.
        steps: after so many steps `done` is called, within the last one's hook.
        report: called with the memory as phases begin, a few times a second.
        wait: called at the end of each step; may hold the program up.

    Attributes:
        lengths: of its inputs; may be set before `start`.
        later: what it does besides its steps; may be set before `start`.
        inputs: called with the arguments of each module that no other one calls, as they are; as above.
        resets: functions, by owner and name, with which a program makes the allocator count its peaks anew; as above.
        gradients: what it has them for.
        micro_batches: how far it has come.
        ahead: returns how many calls of a module are made at once with the one that begins; as above.
        has_backward: whether any backward has begun.
        tries: what it ran out of memory with.
        samples: of its data.
        without: extensions that it wanted to build, and went on without.
    """

    def __init__(
        self,
        recorder: Recorder,
        memory: Any,
        steps: int,
        report: Callable[[MemorySample], None],
        done: Callable[[], None],
        wait: Callable[[], None],
    ) -> None:
        self.memory = memory
        self.lengths = InputLengths()
        self.later = Later()
        self.gradients = Gradients()
        self._evaluations = Evaluations()
        self.inputs: Callable[[Any], None] = lambda _: None
        self.ahead: Callable[[nn.Module], int] = lambda _: 0
        self.steps = 0
        self.has_backward = False
        self._inferences = 0
        """Calls of models without gradients."""

        self.step_seconds: list[float] = []
        self.resets = tuple(
            (module, "reset_peak_memory_stats") for module in (memory, getattr(memory, "memory", None)) if module
        )
        self._recorder = recorder
        self._wanted = self._asked_for = steps
        self._report = report
        self._done = done
        self._wait = wait
        self._pid = os.getpid()
        self._phase = Phase.BUILD
        self._stages = RunningStages(lambda: self._is_followed and not in_backward(), self._mark)
        self._depth = 0
        self._is_stepping = False
        self._counts = True
        """Whether an optimizer's steps are the training's."""

        self._says_steps = False
        """Whether the program states itself when a step begins."""

        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._first: int | None = None
        self._round: set[int] = set()
        self._missing: set[int] = set()
        self._by_hand = UpdatesByHand(recorder.number_of)
        self._trained: set[int] = set()
        self._storages: dict[Bucket, dict[int, int]] = {}
        """Memory known by name, by bucket: the bytes of each storage."""

        self._notes: dict[Note, None] = {}
        self._next_sample = 0.0
        self._peaks = (0, 0)
        self._hooks: PhaseHooks | None = None
        self._step_began = time.perf_counter()
        self.micro_batches = MicroBatches(steps)
        self.tries = Tries()
        self.samples = Samples()
        self.without: list[str] = []
        self._micro_batch_is_counted = False

    # The program's hooks

    def start(self) -> None:
        """Follow the program from now on."""
        self._recorder.mark(0, Phase.BUILD)
        self._hooks = PhaseHooks()
        self._hooks.callback(register_module_forward_pre_hook(self._enter_module).remove)
        self._hooks.callback(
            register_module_forward_hook(self._leave_module, with_kwargs=True, always_call=True).remove
        )
        self._hooks.on_optimizer(self._enter_optimizer, self._leave_optimizer)
        self._hooks.callback(follow_steps(self._begin_said))
        self._hooks.callback(mark_backward(self._enter_backward, self._leave_backward))
        self._hooks.callback(self.samples.follow())
        for owner, name in self.resets:
            self._keep_peaks(owner, name)

    def _keep_peaks(self, owner: Any, name: str) -> None:
        """Read the peaks before each call of a function that resets them."""
        reset = getattr(owner, name, None)

        def kept_reset(*args: Any, **kwargs: Any) -> Any:
            self._peaks = self.peaks()
            return reset(*args, **kwargs)  # type: ignore[misc]  # set in its place

        if reset is not None:
            setattr(owner, name, kept_reset)

    def follow_stages(self) -> None:
        """Follow what the program does besides its steps. To be called after functions of libraries are replaced."""
        if self._hooks is not None:
            self._hooks.callback(self._stages.follow())

    def stop(self) -> None:
        """Follow it no longer."""
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None

    @property
    def _is_followed(self) -> bool:
        return self._hooks is not None and os.getpid() == self._pid

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self.called(module)
            self._take_inputs(args)

    def _take_inputs(self, values: Any) -> None:
        if self._is_followed and not in_backward():
            self.inputs(values)

    def called(self, module: nn.Module) -> None:
        """Note that a module is called by no other one: forward begins."""
        if not self._is_followed or in_backward():
            return
        self._count_update()
        self.tries.calls()
        self._inferences += not torch.is_grad_enabled()
        is_new = module not in self._roots
        evaluates = self._evaluations.is_one(module, self._trained, self.steps, self.later, is_new=is_new)
        is_new_stage = self._stages.called(module, self._roots, is_trained=evaluates is not None)
        if evaluates is None:  # what is not trained goes along, as a loss or a frozen encoder
            evaluates = self._phase is Phase.EVALUATION
        phase = Phase.EVALUATION if evaluates else Phase.FORWARD
        if phase is Phase.EVALUATION:
            self.gradients.evaluates()
        if module not in self._roots:
            self._roots.add(module)
            self._recorder.name_modules(module)
            self._tag_module(module)
        if self._phase is not phase:
            self._micro_batch_is_counted &= self._phase in (Phase.FORWARD, Phase.EVALUATION)
            self._enter(phase)
        elif is_new_stage:
            self._mark()
        if phase is Phase.FORWARD and not self._micro_batch_is_counted and torch.is_grad_enabled():
            self._micro_batch_is_counted = True
            self.micro_batches.begin_micro_batch()

    def calls_ahead(self, module: nn.Module) -> int:
        """Return how many further calls of a module are made at once with one that is answered from memory."""
        return self.ahead(module)

    def _leave_module(self, module: nn.Module, args: Any, *more: Any) -> None:
        """Note the end of a module's call: `more` is its keywords and its result, the latter alone after an error."""
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._take_inputs(more[:-1])
            self._stages.left()
        is_trained = torch.is_grad_enabled() and self._phase is not Phase.EVALUATION
        if not self._depth and self._is_followed and has_parameters(module) and not in_backward():
            self.tries.called((args, *more[:-1]))
        if not self._depth and is_trained and self._is_followed and not in_backward():
            self.lengths.trained_on(module, (args, *more[:-1]), self.steps + 1)

    def _enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_followed:
            return
        if id(optimizer) == self._first and self.steps >= self._wanted and not self._says_steps:
            self._made_all()
        self._is_stepping = True
        for module in self._roots:
            self._tag_module(module)
        parameters = parameters_of(optimizer)
        self.name(Bucket.PARAMETERS, parameters)
        self.name(Bucket.GRADIENTS, gradients_of(parameters))
        self.gradients.step(parameters, self._trained)
        self._trained.update(map(id, parameters))
        if not in_backward():
            self._enter(Phase.OPTIMIZER)

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_followed:
            return
        self._is_stepping = False
        self.name(Bucket.OPTIMIZER, [tensor for kept in state_of([optimizer]).values() for tensor in kept])
        if self._says_steps or not self._counts:
            return
        if self._first is None:
            self._first = id(optimizer)
        if id(optimizer) == self._first:
            self.steps += 1
            self._time_step()
            self._missing, self._round = self._round, set()
        else:
            self._round.add(id(optimizer))
            self._missing.discard(id(optimizer))
        if self._has_all_steps():
            self._made_all()
        if not in_backward():
            self._begin_next()

    def uncounted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function within which steps of optimizers train nothing: a library makes them for another end."""

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            before, self._counts = self._counts, False
            try:
                return function(*args, **kwargs)
            finally:
                self._counts = before

        return called

    def _begin_said(self) -> None:
        """Begin a step that the program states begins, and count the one before it."""
        if not self._is_followed:
            return
        if self._says_steps:
            self.steps += 1
            self._time_step()
            if self._has_all_steps():
                self._made_all()
        self._says_steps = True
        self._begin_next()
        self._step_began = time.perf_counter()

    def _has_all_steps(self) -> bool:
        """Return whether all steps were made; where their inputs differ in length, one more follows on the longest."""
        self._wanted = self.tries.steps_wanted(self._wanted, self.steps, self._asked_for)
        if self.steps < self._wanted or self._missing:
            return False
        if self.later.after is None:
            self._wanted += self.lengths.wants_another_step(self.steps)
        return self.steps >= self._wanted

    def _enter_backward(self) -> None:
        if self._is_followed:
            self.has_backward = True
            self.gradients.enter_backward(self._phase)
            self._count_update()
            self._enter(Phase.BACKWARD)

    def _leave_backward(self) -> None:
        """Note the end of a backward: whose gradients no optimizer of torch's has is seen here alone.

        Engines keep other tensors for their optimizers, as partitions and copies on the host; programs may have none.
        """
        if not self._is_followed:
            return
        parameters = list(parameters_in(*self._roots))
        if self._is_stepping:  # this was a closure's, and the update follows
            self._enter(Phase.OPTIMIZER)
        if self._first is not None or self._says_steps:
            self.name(Bucket.GRADIENTS, gradients_of(one for one in parameters if id(one) not in self._trained))
            return
        self._by_hand.after_backward(parameters)
        self.name(Bucket.GRADIENTS, gradients_of(parameters))
        if self._by_hand.is_certain:
            self._enter(Phase.OPTIMIZER)

    def _count_update(self) -> None:
        """Count the step that a program without an optimizer has made since its last backward."""
        if self._says_steps or self._first is not None or not self._by_hand.has_stepped():
            return
        self.name(Bucket.OPTIMIZER, self._by_hand.kept(parameters_in(*self._roots)))
        self.note("no optimizer of torch's: steps are its updates; optimizer state is what these write besides weights")
        self.steps += 1
        self._time_step()
        if self._has_all_steps():
            self._made_all()
        self._begin_next()

    def _time_step(self) -> None:
        now = time.perf_counter()
        self.tries.stepped()
        self.samples.stepped()
        self.micro_batches.end_step()
        self.step_seconds.append(now - self._step_began)
        self._step_began = now

    def size_now(self, rows: int) -> int:
        """Return the samples that the program works on; 0 where that is not known.

        Args:
            rows: of the tensor that was made last, which is a batch before a model is called.
        """
        return self.tries.size_now(rows if self._phase in (Phase.BUILD, Phase.BATCH) else 0)

    def ran_out(self, size: int, place: str, has_lost: Callable[[torch.Tensor], bool]) -> None:
        """Note that memory ran out, which the program may catch.

        Args:
            size: the samples that there was none for. `place`: ``file:line``.
            has_lost: whether a tensor has no memory: a gradient that backward would not have come to.
        """
        self.tries.ran_out(size, place)
        for parameter in parameters_in(*self._roots):
            if parameter.grad is not None and has_lost(parameter.grad):
                parameter.grad = None
        self._is_stepping = False
        self._first = None  # the next one may be another
        self._round.clear()
        self._missing.clear()
        self._storages.pop(Bucket.GRADIENTS, None)
        self._micro_batch_is_counted = False
        self._next_sample = 0.0  # so that whoever waits knows that it continues
        if self.later.after is None:  # else what is awaited, such as an evaluation, is not over by that
            self._enter(Phase.BATCH if self.steps else Phase.BUILD)

    def _begin_next(self) -> None:
        self._wait()
        self.lengths.begin(self.steps if self.later.after is None else 0)
        self._storages.pop(Bucket.GRADIENTS, None)
        self._next_sample = 0.0  # so that the number of steps survives a program that is killed
        self._enter(Phase.BATCH)

    def _made_all(self) -> None:
        """End the run, as all steps were made, those of optimizers in turn with the first one too; or await more."""
        if not self.later.begin(self.steps):
            self._finish()

    def _finish(self) -> None:
        """End the run."""
        self._sample(Phase.BATCH, now=True)
        self._done()

    # Facts about its memory

    def name_what_lives(self, *, in_parts: bool = True) -> None:
        """Name the models and gradients there are now: those, too, that no optimizer trains and nobody has called.

        Args:
            in_parts: whether parts of models are named: what is frozen, what is quantized, what are copies.
        """
        things = gc.get_objects()
        modules = outermost(instances_of(nn.Module, things))
        if in_parts:
            frozen = [one for one in modules if not any(parameter.requires_grad for parameter in parameters_in(one))]
            copied = [one for one in copies(things, self._roots, self._trained) if one[2]]
            named = parts_of_models((*frozen, *self._roots), bool(copied))  # a frozen one may have no forward, as a VAE
            for bucket, part, tensors in copied + named:
                self.name(bucket, tensors, part)
        for module in modules:
            self._tag_module(module)
            self.name(Bucket.GRADIENTS, gradients_of(parameters_in(module)))
        for optimizer in instances_of(torch.optim.Optimizer, things):
            parameters = parameters_of(optimizer)
            if parameters and not self._says_steps and self._trained.isdisjoint(map(id, parameters)):
                kind, made = type(optimizer).__name__, self.steps
                self.note(f"an optimizer ({kind}) has not stepped within {made} steps of another: --steps runs more")

    def peaks(self) -> tuple[int, int]:
        """Return the highest (allocated, reserved) bytes, whenever the program has reset its own figures."""
        allocated, reserved = self.memory.max_memory_allocated(), self.memory.max_memory_reserved()
        return max(self._peaks[0], allocated), max(self._peaks[1], reserved)

    def parameters(self) -> int:
        """Return the values in all parameters of the models that were called, as their tensors count them."""
        return sum(parameter.numel() for parameter in parameters_in(*self._roots))

    @property
    def roots(self) -> list[nn.Module]:
        """The models that were called."""
        return list(self._roots)

    @property
    def evaluates_for_nothing(self) -> bool:
        """Whether an evaluation is running that keeps what no backward will ask for."""
        return self._phase is Phase.EVALUATION and bool(self.gradients.evaluated_at) and torch.is_grad_enabled()

    def note(self, text: Note) -> None:
        """Add a line to be known of the result; said once."""
        self._notes[text] = None

    def notes(self) -> tuple[Note, ...]:
        """Return all lines to be known of the result."""
        return tuple(filter(None, (*self._notes, self.lengths.line(self.steps), *self.later.lines(self.steps))))

    def without_steps(self) -> str:
        """Say what a program that made no optimizer step has done."""
        return "forward and backward only" if self.has_backward else "forward only, as for inference or evaluation"

    def trains_nothing(self) -> bool:
        """Return whether the program has called models again and again without gradients, and nothing trains one."""
        is_training = self.has_backward or bool(instances_of(torch.optim.Optimizer, gc.get_objects()))
        return not is_training and self._inferences > 1 and self.peaks()[0] > 0

    def empty(self) -> str:
        """Say why a run that trained left the GPU empty."""
        places = sorted({parameter.device.type for parameter in parameters_in(*self._roots)})
        where = f"its model is on the {places[0].upper()}" if places else "none of its tensors is there"
        return f"the command leaves the GPU empty ({where}): tell it to train on cuda"

    def _tag_module(self, module: nn.Module) -> None:
        parameters = list(parameters_in(module))
        self.name(Bucket.PARAMETERS, [*parameters, *buffers_in(module), *scales(parameters)])

    def name(self, bucket: Bucket, tensors: Iterable[Any], part: str = "") -> None:
        """State which bucket these tensors are, and which part of it."""
        known = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and not is_lazy(tensor)]
        found = [held for tensor in known for held in holding_memory(tensor)]
        self._recorder.tag(bucket, found, part)
        storages = [tensor.untyped_storage() for tensor in found if tensor.is_cuda]
        self._storages.setdefault(bucket, {}).update((storage._cdata, storage.nbytes()) for storage in storages)

    def _enter(self, phase: Phase) -> None:
        if self.later.is_over and phase is not Phase.EVALUATION:
            self._finish()
        self._sample(phase)
        self._phase = phase
        self._stages.enter(phase, self._trained)
        self._mark()

    def _mark(self) -> None:
        """Note the phase and the stage of the run from here on."""
        step = 0 if self._phase is Phase.BUILD and not self.steps else self.steps + 1
        self._recorder.mark(step, self._phase, self._stages.now)

    def _sample(self, phase: Phase, *, now: bool = False) -> None:
        moment = time.monotonic()
        if not now and moment < self._next_sample:
            return
        self._next_sample = moment + _BETWEEN_SAMPLES_S
        allocated, reserved = self.memory.memory_allocated(), self.memory.memory_reserved()
        known = {bucket: sum(storages.values()) for bucket, storages in self._storages.items()}
        self._report(MemorySample.of(min(self.steps, self._wanted), phase, allocated, reserved, known))


class Evaluations:
    """Tells calls of a program's models that evaluate or sample: of what is trained, without being trained.

    These are calls without gradients, or in evaluation mode of what was trained in training mode.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        """Models that were trained: whether in training mode; and those that evaluate alone, as averaged weights."""

        self._in_training_mode: set[int] = set()
        """After which steps a model in training mode was called without gradients, as a reference is in every step."""

    def is_one(self, module: nn.Module, trained: set[int], steps: int, later: Later, *, is_new: bool) -> bool | None:
        """Return whether a call evaluates; None of a model that is not trained.

        Args:
            trained: the ids of what optimizers were seen to train; empty before the first step.
            steps: made so far. `is_new`: the model was not called before.
            later: hears of evaluations.
        """
        if torch.is_grad_enabled():
            if not any(parameter.requires_grad for parameter in parameters_in(module)):
                return None
            if module.training or not self._known.get(module, False):
                self._known[module] = module.training
                return False
        elif later.after is not None and is_new and has_parameters(module):
            self._known[module] = False
        elif module not in self._known:
            learns = (parameter for parameter in parameters_in(module) if parameter.requires_grad)
            if not any(not trained or id(parameter) in trained for parameter in learns):
                return None
        if module.training:
            self._in_training_mode.add(steps)
        if not (module.training and (later.after is None or steps - 1 in self._in_training_mode)):
            later.seemed("evaluation", steps)
            if later.after is not None:
                later.came("evaluation", steps)
        return True
