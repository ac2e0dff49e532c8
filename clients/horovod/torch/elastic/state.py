"""TorchState: models, optimizers and samplers beside plain values, each saved and sent in its own way by a handler."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import torch

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Max, rank, size
from horovod.common.elastic import OPTIMIZER, HostUpdateResult, ObjectState, check_results
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.common.ops.objects import allgather_object, broadcast_keeping, broadcast_object
from horovod.common.optimizer_numbers import Made
from horovod.common.state_parts import Parts, find_parts
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.steps import VOTE, Standing, Steps, options_of, set_options, the_optimizer
from horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from horovod.torch.ops import allreduce_
from horovod.torch.wrapping import WrappedOptimizer

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "Stateful",
    "StatefulHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler:
    """How one kind of value is saved, restored and sent. A subclass defines these three; `value` is what it handles.

    Saved is a deep copy, or the next step would change it.
    """

    root_rank = 0  # the rank whose value `sync` sends; TorchState sets it alike on all ranks
    # Objects to which a copy of the state refers, without copying them: TorchState's models, optimizers and so on.
    kept: Sequence[Any] = ()

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def set_value(self, value: Any) -> None:
        """Handles another value from now on, which is saved as it is."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Remembers the value."""
        raise NotImplementedError(f"{type(self).__name__} must define save().")

    def restore(self) -> None:
        """Gives `value` back what was saved last."""
        raise NotImplementedError(f"{type(self).__name__} must define restore().")

    def sync(self) -> None:
        """Makes the value equal on all ranks to that on `root_rank`, in place. A collective."""
        raise NotImplementedError(f"{type(self).__name__} must define sync().")


class ModelStateHandler(StateHandler):
    """For torch.nn.Module: parameters and buffers."""

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)  # copies into the parameters

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), self.root_rank)


class OptimizerStateHandler(StateHandler):
    """For torch.optim.Optimizer, distributed or not: its state and the options of its parameter groups."""

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # Loading keeps the tensors it is given, and steps change them in place.
        self.value.load_state_dict(copy.deepcopy(self._saved))
        # What the failed step left there is half reduced; scripts that clear gradients after a step would add to it.
        self.value.zero_grad()

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, self.root_rank)


@runtime_checkable
class Stateful(Protocol):
    """An object that saves and loads its own state, such as a learning-rate scheduler or a GradScaler."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class StatefulHandler(StateHandler):
    """For Stateful. The object stays the one that it is, and so does the optimizer that it may refer to."""

    def save(self) -> None:
        self._saved = self._copied(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._copied(self._saved))
        if isinstance(self.value, _GRAD_SCALER):
            # The scaler's record of the failed step is in no state_dict, and would refuse the next unscale_().
            self.value._per_optimizer_states.clear()

    def sync(self) -> None:
        is_root = rank() == self.root_rank
        received = broadcast_keeping(self.value.state_dict() if is_root else None, self.root_rank, self.kept)
        if not is_root:
            self.value.load_state_dict(received)

    def _copied(self, state: Any) -> Any:
        return copy.deepcopy(state, {id(one): one for one in self.kept})


class SamplerStateHandler(StateHandler):
    """For ElasticSampler: how far the epoch is."""

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        progress, now = copy.deepcopy(self._saved), self.value.state_dict()
        if (now["epoch"], now.get("processed_before")) == (progress["epoch"], progress["processed_num"]):
            # The pass that failed began after the commit, so it counts from there.
            progress["processed_before"] = progress["processed_num"]
        self.value.load_state_dict(progress)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), self.root_rank))


class TensorHandler(StateHandler):
    """For tensors that are trained by themselves, such as torch.nn.Parameter."""

    def save(self) -> None:
        self._saved = self.value.detach().clone()

    def restore(self) -> None:
        self.value.detach().copy_(self._saved)
        self.value.grad = None  # the gradient that the failed step has half reduced

    def sync(self) -> None:
        broadcast_parameters([self.value], self.root_rank)


class GeneratorHandler(StateHandler):
    """For torch.Generator, so that the data loader that has it goes on with the same random numbers."""

    def save(self) -> None:
        self._saved = self.value.get_state()

    def restore(self) -> None:
        self.value.set_state(self._saved)

    def sync(self) -> None:
        self.value.set_state(broadcast_object(self.value.get_state(), self.root_rank))


# Of what these handle, step() copies nothing: it is changed by the optimizer alone.
_WEIGHTS: Final = (ModelStateHandler, OptimizerStateHandler, TensorHandler)
# PyTorch before 2.3 has a GradScaler for CUDA only; later that class is a subclass.
_GRAD_SCALER: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler

_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.nn.Parameter, TensorHandler),
    (torch.Generator, GeneratorHandler),
    (Stateful, StatefulHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Which handler takes values of which class; the first that fits. To change it in place is to change it."""
    return _registry


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """Replaces the registry for values given from now on; the same on all ranks. To add a kind of value:

    >>> from horovod.torch.elastic.state import get_handler_registry, set_handler_registry
    >>> set_handler_registry([(MyTable, MyTableHandler), *get_handler_registry()])
    """
    global _registry
    _registry = registry if isinstance(registry, list) else list(registry)


def _handler_class(value: Any) -> type[StateHandler] | None:
    if isinstance(value, type):  # a class has the methods of its objects, too, but is no part
        return None
    return next((handler for kind, handler in _registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """The state of a PyTorch training: `state.model`, `state.optimizer` and every other name that is given.

    Models, optimizers, ElasticSamplers and what else has state_dict() and load_state_dict(), such as learning-rate
    schedulers and GradScaler, are kept by handlers (horovod.torch.elastic.state), whatever their names; they stay the
    objects that they are, also in lists, dicts, tuples and objects, and so do torch.nn.Parameter and torch.Generator.
    Other values are copied and pickled. Assigning another model, optimizer and so on saves it at once. A warning names
    an optimizer that trains the model but is not in the state. Example:

        >>> state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)
        >>> state.epoch = 7
        >>> state.commit()
        >>> state.epoch = 8
        >>> state.restore()
        >>> state.epoch
        7

    `sync` makes all ranks equal to rank 0. If some ranks have already trained, it uses the rank among them that has
    committed most often, so that a replaced rank 0 does not discard the training. Afterwards everything counts as
    saved.

    Args:
        model: a torch.nn.Module, the same on all ranks except for its values.
        optimizer: of its parameters, distributed or not.
        kwargs: more of these and plain values, the same names on all ranks.

    Raises:
        ValueError: a plain value that can't be copied; by `sync`, an optimizer that another rank does not have.
        HorovodInternalError: by `sync`, `commit` and `check_host_updates`: a rank was lost.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}  # path of a part -> its handler
        self._steps = Steps()
        self._has_equal_weights = False  # whether no rank needs the weights in the sync that is under way
        super().__init__(broadcast_object, rank, model=model, optimizer=optimizer, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        saved: dict[str, Any] | None = self.__dict__.get("_saved_state")
        if saved is not None and name in saved and (kind := self._kind_of(value)) is not None:
            saved[name] = self._parts.found[name] = value
            self._parts.kinds[name] = kind
            self._parts.holders.pop(name, None)
            self._saved_contents.pop(name, None)
            self._take_parts(self._parts)

    def _kind_of(self, value: Any) -> str | None:
        if isinstance(value, torch.optim.Optimizer):
            return OPTIMIZER
        handler = _handler_class(value)
        return None if handler is None else handler.__name__

    def _take_parts(self, parts: Parts) -> None:
        super()._take_parts(parts)
        known, self._handlers = self._handlers, {}
        for path, value in parts.found.items():
            handler = known.get(path)
            if handler is None or handler.value is not value:
                kind = _handler_class(value)
                assert kind is not None
                handler = kind(value)
            self._handlers[path] = handler
        for handler in self._handlers.values():
            handler.kept = self._kept()

    def _kept_objects(self, objects: Mapping[str, Any]) -> list[Any]:
        kept = super()._kept_objects(objects)
        # A scheduler may hold the optimizer that was made distributed.
        return kept + [one._hvd_original for one in kept if isinstance(one, WrappedOptimizer)]

    def _settle(self) -> None:
        # A step on a GPU is over for this thread when it is queued.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            check_results()

    def _optimizers(self) -> list[Made]:
        values = [handler.value for _, handler in sorted(self._handlers.items())]
        return [value._hvd_made for value in values if hasattr(value, "_hvd_made")]

    def save(self) -> None:
        self._settle()
        super().save()
        for handler in self._handlers.values():
            handler.save()
        self._steps.forget()

    def step(
        self,
        *then: Callable[[], object],
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """`optimizer.step()` and `commit` in one: a failure undoes no step that was taken. A collective.

        Weights are not copied, so it costs less than a commit and may be called in each step. When a rank is lost, the
        others repeat the step that has failed, and no earlier one. Count the batch and call
        `sampler.record_batch` before this call, as they belong to the step. Functions that follow from the step are
        arguments, and all ranks or none call them:

            >>> loss.backward()
            >>> state.batch += 1
            >>> state.step(scheduler.step)

        Buffers, the options of the optimizer, PyTorch's random numbers on the CPU and everything else in the state get
        the values that they had after the last step. Weights that a script changes itself do not.

        Args:
            then: functions to call after the update, such as `scheduler.step` or one that updates a moving average;
                without collectives.
            optimizer: one of the state, if that has several.
            scaler: the GradScaler that takes the step, and is updated.

        Raises:
            ValueError: the optimizer is not distributed, or can't repeat a step: Adasum, a GradientCompressor, a
                process set; ranks that have taken different numbers of steps; a collective that failed in `then`.
            HostsUpdatedInterrupt: hosts came or went; the step was taken.
            HorovodInternalError: a rank was lost. It is not known yet whether the step was taken.
        """
        distributed = the_optimizer((handler.value for handler in self._handlers.values()), optimizer)
        distributed.synchronize()
        self._settle()

        def take() -> None:
            with distributed.skip_synchronize():
                if scaler is None:
                    distributed.step()
                else:
                    scaler.step(distributed)
                    scaler.update()
            for function in then:
                function()

        self._steps.prepare(distributed, take)
        updated, what = self._news() if rank() == 0 else (False, HostUpdateResult.no_update)
        # News is at least 1, also of hosts of which nothing is known but that the world is to change.
        news = self._voted(1 + int(what) if updated else 0)
        self._steps.take()
        self._at_boundary()
        if news:
            raise HostsUpdatedInterrupt(news - 1 == HostUpdateResult.removed)

    def _voted(self, news: int) -> int:
        """Returns once all ranks have the averages of this step: what rank 0 knows of hosts."""
        number = self._commits + 1
        ballot = self._steps.ballot(number, news)
        if size() == 1:
            return news
        highest, lowest, news = allreduce_(ballot, op=Max, name=VOTE).tolist()
        if highest != -lowest:
            sentence = (
                f"Rank {rank()} called state.step() for step {number}, and other ranks called it for steps {-lowest} "
                f"to {highest}. Call it equally often on all ranks, and state.commit() too."
            )
            raise ValueError(coded(TrainingCode.DIFFERENT_STATES, sentence))
        return int(news)

    def _at_boundary(self) -> None:
        """A step was taken: where a failure leads back to from now on."""
        self._note_boundary()
        self._warn_of_optimizers_left_out()
        self._count_commit()

    def _note_boundary(self) -> None:
        ObjectState.save(self)
        for handler in self._handlers.values():
            if not isinstance(handler, _WEIGHTS):
                handler.save()
        self._steps.note(handler.value for handler in self._handlers.values() if isinstance(handler, ModelStateHandler))

    def _go_back_to_boundary(self) -> None:
        self._steps.go_back()
        for handler in self._handlers.values():
            if not isinstance(handler, _WEIGHTS):
                handler.restore()
        ObjectState.restore(self)

    def _standing(self) -> int:
        return self._steps.standing

    def _decide_step(self, goes_on: bool, progress: list[tuple[bool, bool, int]], standings: list[int]) -> None:
        commits = max((one for others_go_on, _, one in progress if others_go_on), default=0)
        self._has_equal_weights = all(
            others_go_on
            and synced
            and (done == commits if standing == Standing.BOUNDARY else 0 <= commits - done <= 1)
            and standing != Standing.SAVED
            for (others_go_on, synced, done), standing in zip(progress, standings, strict=True)
        )
        if self._steps.standing != Standing.PENDING:
            return
        if goes_on and self._commits + 1 == commits:
            self._steps.take_late()
            self._at_boundary()
        else:
            self._steps.drop()
            self.restore()

    def _optimizers_left_out(self) -> Iterator[torch.optim.Optimizer]:
        values = [handler.value for handler in self._handlers.values()]
        trained = {id(one) for one in values if isinstance(one, torch.Tensor)}
        trained |= {id(one) for value in values if isinstance(value, torch.nn.Module) for one in value.parameters()}
        # A distributed optimizer has the same `state` as the one that it was made of.
        known = {id(value.state) for value in values if isinstance(value, torch.optim.Optimizer)}
        for one in gc.get_objects():
            if issubclass(type(one), torch.optim.Optimizer) and id(one.__dict__.get("state")) not in known:
                known.add(id(one.__dict__.get("state")))
                if any(id(each) in trained for group in one.param_groups for each in group["params"]):
                    yield one

    def _memory_of(self, optimizer: torch.optim.Optimizer) -> list[str] | None:
        states = list(optimizer.state.values())
        names = sorted({key for state in states for key, value in state.items() if value is not None})
        if not names:  # the optimizer has not taken a step yet, or is SGD without momentum
            return None
        # A script may save the optimizer in its own way, such as a plain optimizer.state_dict().
        held = [one.value.state_dict() for one in self._handlers.values() if isinstance(one, StatefulHandler)]
        found = find_parts(
            {"plain": self._live(), "held": held}, lambda one: "tensor" if isinstance(one, torch.Tensor) else None
        ).found
        tensors = {id(one) for one in found.values()}
        return [] if any(id(one) in tensors for state in states for one in state.values()) else names

    def restore(self) -> None:
        if self._steps.standing == Standing.PENDING:
            return  # the next `sync` learns from the other ranks which way to go
        if self._steps.standing == Standing.BOUNDARY:
            self._go_back_to_boundary()
            return
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        self._choose_source(allgather_object)
        kept = self._kept_objects(self._agreed)
        for path, value in self._agreed.items():
            if (kind := _handler_class(value)) is not None:
                if self._has_equal_weights and issubclass(kind, _WEIGHTS):
                    if issubclass(kind, OptimizerStateHandler):
                        set_options(value, broadcast_object(options_of(value), self._source))
                    continue
                handler = self._handlers.get(path)
                if handler is None or handler.value is not value:
                    handler = kind(value)
                handler.root_rank, handler.kept = self._source, kept
                handler.sync()
        self._settle()  # before plain values count as saved, which are to be those of the same commit
        super().sync()
        if self._steps.standing == Standing.BOUNDARY:
            self._note_boundary()
            return
        for handler in self._handlers.values():
            handler.save()
