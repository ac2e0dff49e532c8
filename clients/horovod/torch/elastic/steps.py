"""Step-level recovery: `TorchState.step`, after which a failure undoes no step that a rank has taken.

Ranks of data-parallel training hold the same weights, so those that remain need no saved copy of them: they repeat the
step that failed. What must not happen is that some ranks take a step and others do not. So each step is put to the vote
(docs/adr/0131-steps-that-are-repeated.md):

    synchronize()     this rank has all averages in `.grad`
    vote              a small allreduce: over once every rank has all averages
    take              the optimizer changes the weights; what follows from that, such as a scheduler's step
    boundary          plain values, samplers, buffers, options and random numbers are noted; weights are not copied

A rank is lost before the vote is over on any rank: no rank has taken the step. The others go back to the last boundary
and repeat it. The vote is over on some ranks and fails on others: these have all averages as well ("pending"), and the
first exchange in the next world tells them that others have taken the step. They take it too, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeGuard

import torch

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Adasum
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import global_process_set
from horovod.torch.compression import GradientCompressor
from horovod.torch.optimizer import _DistributedOptimizer

VOTE: Final = "elastic.step"


class Standing(IntEnum):
    """How far a rank is that has called state.step(); 0 is that of all others."""

    SAVED = 0  # restore() goes back to what save() copied
    BOUNDARY = 1  # the weights are those after the last step that this rank has counted
    PENDING = 2  # the same, and it has the averages of a further step, but can't know whether others have taken that


Options = list[dict[str, Any]]


@dataclass
class _Pending:
    """A step of which this rank has all averages. `gradients`: of parameters, as the script left them."""

    take: Callable[[], None]
    gradients: list[tuple[torch.Tensor, torch.Tensor | None]]
    options: Options
    random: torch.Tensor


class _Copies:
    """Copies of tensors that no optimizer of ours trains: buffers, and parameters of frozen layers or of averages.

    A parameter that nobody has changed is not copied again. Kernels change buffers without a new version, so these are.
    """

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # id: (parameter, copy, version)
        self._buffers: list[torch.Tensor] = []
        self._buffer_copies: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, models: Iterable[torch.nn.Module], trained: set[int]) -> None:
        buffers = [buffer for model in models for buffer in model.buffers()]
        if len(buffers) != len(self._buffers) or any(
            one is not other or one.shape != copy.shape
            for one, other, copy in zip(buffers, self._buffers, self._buffer_copies, strict=True)
        ):
            self._buffers = buffers
            self._buffer_copies = [buffer.clone() for buffer in buffers]
        elif buffers:
            torch._foreach_copy_(self._buffer_copies, buffers)
        known, self._parameters = self._parameters, {}
        for model in models:
            for parameter in model.parameters():
                if id(parameter) in trained:
                    continue
                before = known.get(id(parameter))
                if before is None or before[0] is not parameter or before[2] != parameter._version:
                    before = (parameter, parameter.detach().clone(), parameter._version)
                self._parameters[id(parameter)] = before

    @torch.no_grad()
    def put_back(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._buffer_copies)
        for key, (parameter, copy, version) in self._parameters.items():
            if parameter._version != version:
                parameter.copy_(copy)
                self._parameters[key] = (parameter, copy, parameter._version)


class Steps:
    """The boundary that a state is at, and the step that is not decided yet. Used by the thread that trains."""

    def __init__(self) -> None:
        self._optimizer: _DistributedOptimizer | None = None  # of the last step
        self._is_at_boundary = False  # whether there was a step since the last save()
        self._pending: _Pending | None = None
        self._copies = _Copies()
        self._options: Options = []
        self._random: torch.Tensor | None = None
        self._vote = torch.zeros(3, dtype=torch.int64)

    @property
    def standing(self) -> Standing:
        if self._pending is not None:
            return Standing.PENDING
        return Standing.BOUNDARY if self._is_at_boundary else Standing.SAVED

    def prepare(self, optimizer: _DistributedOptimizer, take: Callable[[], None]) -> None:
        """This rank has all averages. take: takes the step with them."""
        self._optimizer = optimizer
        gradients = [(one, one.grad) for group in optimizer.param_groups for one in group["params"]]
        self._pending = _Pending(take, gradients, options_of(optimizer), torch.get_rng_state())

    def ballot(self, number: int, news: int) -> torch.Tensor:
        """What this rank says: the number of its step, twice, so that the largest numbers show whether all are equal,
        and what it knows of hosts that come or go.
        """
        self._vote[0], self._vote[1], self._vote[2] = number, -number, news
        return self._vote

    def take(self) -> None:
        """All ranks have all averages, or one of them has taken the step."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        try:
            pending.take()
        except HorovodInternalError as error:
            sentence = (
                f"A function that was passed to state.step() ran a collective, which failed: {error} This rank has "
                "taken the step, but not everything that follows from it, so it can't continue. Run collectives before "
                "or after state.step(), and not in its functions."
            )
            raise ValueError(coded(TrainingCode.INVALID_ARGUMENT, sentence)) from error

    def take_late(self) -> None:
        """In the next world: others have taken the step of which this rank has the averages."""
        assert self._pending is not None
        assert self._optimizer is not None
        pending, options = self._pending, options_of(self._optimizer)
        for parameter, gradient in pending.gradients:
            parameter.grad = gradient
        set_options(self._optimizer, pending.options)  # callbacks for the new world may have changed them since
        torch.set_rng_state(pending.random)
        self.take()
        for before, now, group in zip(pending.options, options, self._optimizer.param_groups, strict=True):
            group.update({name: value for name, value in now.items() if before.get(name) != value})
        self._optimizer._hvd_abandon_step()

    def drop(self) -> None:
        """No rank has taken the step that this one was about to take."""
        self._pending = None

    def note(self, models: Iterable[torch.nn.Module]) -> None:
        """The boundary is here."""
        assert self._optimizer is not None
        trained = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        self._copies.take(list(models), trained)
        self._options = options_of(self._optimizer)
        self._random = torch.get_rng_state()
        self._is_at_boundary = True

    def go_back(self) -> None:
        """To the boundary; weights and what the optimizer remembers are as they were there."""
        assert self._optimizer is not None
        assert self._random is not None
        self._copies.put_back()
        set_options(self._optimizer, self._options)
        torch.set_rng_state(self._random)
        self._optimizer._hvd_abandon_step()
        self._optimizer.zero_grad()

    def forget(self) -> None:
        """The state was copied by save(), and restore() goes back to that."""
        self._pending, self._is_at_boundary, self._copies = None, False, _Copies()


def options_of(optimizer: torch.optim.Optimizer) -> Options:
    """Learning rates and the like, without the parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def set_options(optimizer: torch.optim.Optimizer, options: Options) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)


def the_optimizer(parts: Iterable[Any], given: torch.optim.Optimizer | None) -> _DistributedOptimizer:
    """The one that `step` is to use. ValueError: there is none, there are several, or it can't repeat a step."""
    found = [one for one in parts if isinstance(one, torch.optim.Optimizer)]
    if given is None:
        if len(found) != 1:
            sentence = (
                f"state.step() takes the step of the state's only optimizer, and this state has {len(found)}. Pass it "
                "to hvd.elastic.TorchState, and if there are several, say which: state.step(optimizer=optimizer)."
            )
            raise ValueError(coded(TrainingCode.UNSUPPORTED_OPTIMIZER, sentence))
        given = found[0]
    elif all(one is not given for one in found):
        sentence = "state.step(optimizer=...) got an optimizer that is not part of the state. Pass it to the state too."
        raise ValueError(coded(TrainingCode.UNSUPPORTED_OPTIMIZER, sentence))
    if not _is_plain(given):
        arguments = getattr(given, "_hvd_arguments", None)
        if arguments is None:
            why, remedy = f"this {type(given).__name__} is not", "Make it one by hvd.DistributedOptimizer(optimizer)."
        elif arguments.op == Adasum:
            why, remedy = "with op=hvd.Adasum weights change before they are combined", "Use state.commit() for it."
        elif isinstance(arguments.compression, GradientCompressor):
            why, remedy = "its GradientCompressor remembers what it has sent", "Use state.commit() for it."
        else:
            why, remedy = "this one reduces in a process set of its own", "Use state.commit() for it."
        sentence = f"state.step() needs a distributed optimizer whose failed step can be repeated, and {why}. {remedy}"
        raise ValueError(coded(TrainingCode.UNSUPPORTED_OPTIMIZER, sentence))
    return given


def _is_plain(optimizer: torch.optim.Optimizer) -> TypeGuard[_DistributedOptimizer]:
    if not isinstance(optimizer, _DistributedOptimizer):
        return False
    arguments = optimizer._hvd_arguments
    if arguments.op == Adasum or isinstance(arguments.compression, GradientCompressor):
        return False
    return arguments.process_set is global_process_set
