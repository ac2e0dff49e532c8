"""TorchState: models, optimizers and samplers beside plain values, each saved and sent in its own way by a handler."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import torch

from horovod.common.basics import rank
from horovod.common.elastic import ObjectState, check_results
from horovod.common.ops.objects import allgather_object, broadcast_object
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.optimizer_state import broadcast_optimizer_state
from horovod.torch.parameters import broadcast_parameters

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

    root_rank = 0  # whose value `sync` sends; TorchState sets it on all ranks alike
    # What a copy of the state refers to as it is, without copying it: TorchState's models, optimizers and so on.
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
    """What says itself what of it is to be saved, such as learning-rate schedulers and GradScaler."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


_KEPT: Final = "kept"


@dataclass(frozen=True)
class _Kept:
    """Travels in place of one of `StateHandler.kept`; a copy of it is the receiver's own."""

    index: int

    def __deepcopy__(self, memo: dict[str, Any]) -> Any:
        return memo[_KEPT][self.index]


class StatefulHandler(StateHandler):
    """For Stateful. The object stays the one that it is, and so does the optimizer that it may refer to."""

    def save(self) -> None:
        self._saved = self._copied(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._copied(self._saved))
        if isinstance(self.value, _GRAD_SCALER):
            # What it knows of the failed step is in no state_dict, and would refuse the next unscale_().
            self.value._per_optimizer_states.clear()

    def sync(self) -> None:
        is_root = rank() == self.root_rank
        names = {id(one): _Kept(index) for index, one in enumerate(self.kept)}
        sent = copy.deepcopy(self.value.state_dict(), names) if is_root else None
        received = broadcast_object(sent, self.root_rank)
        if not is_root:
            self.value.load_state_dict(copy.deepcopy(received, {_KEPT: self.kept}))  # type: ignore[dict-item]

    def _copied(self, state: Any) -> Any:
        return copy.deepcopy(state, {id(one): one for one in self.kept})


class SamplerStateHandler(StateHandler):
    """For ElasticSampler: how far the epoch is."""

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        progress, now = copy.deepcopy(self._saved), self.value.state_dict()
        if (now["epoch"], now.get("processed_before")) == (progress["epoch"], progress["processed_num"]):
            progress["processed_before"] = progress["processed_num"]  # the pass that failed is the one after the commit
        self.value.load_state_dict(progress)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), self.root_rank))


# PyTorch before 2.3 has one for CUDA only; later that one is a subclass.
_GRAD_SCALER: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler

_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
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


def _handler_for(value: Any) -> StateHandler | None:
    if isinstance(value, type):  # a class has the methods of its objects
        return None
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """The state of a PyTorch training: `state.model`, `state.optimizer` and every other name that is given.

    Models, optimizers, ElasticSamplers and what else has state_dict() and load_state_dict(), such as learning-rate
    schedulers and GradScaler, are kept by handlers (horovod.torch.elastic.state), whatever their names; they stay the
    objects that they are. Other values are copied and pickled. Assigning another model, optimizer and so on saves it
    at once. Example:

        >>> state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)
        >>> state.epoch = 7
        >>> state.commit()
        >>> state.epoch = 8
        >>> state.restore()
        >>> state.epoch
        7

    `sync` makes all ranks equal to rank 0, or, in a training that some of them were in already, to the one of these
    that has committed most often: a replaced rank 0 does not throw away what was learnt. Afterwards everything counts
    as saved.

    Args:
        model: a torch.nn.Module, the same on all ranks but for its values.
        optimizer: of its parameters, distributed or not.
        kwargs: more of these and plain values, the same names on all ranks.

    Raises:
        ValueError: a plain value that can't be copied.
        HorovodInternalError: by `sync`, `commit` and `check_host_updates`: a rank was lost.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: handler for name, value in values.items() if (handler := _handler_for(value)) is not None}
        super().__init__(
            broadcast_object, rank, **{name: value for name, value in values.items() if name not in handlers}
        )
        self.__dict__.update({name: handler.value for name, handler in handlers.items()})
        self._handlers = handlers
        self._refer_to_each_other()
        self.save()  # again: the first copies did not know what they refer to

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        handlers: dict[str, StateHandler] | None = self.__dict__.get("_handlers")
        if handlers is None:
            return  # under construction
        if name in handlers:
            handlers[name].set_value(value)
            self._refer_to_each_other()
        elif name in self._saved_state and (handler := _handler_for(value)) is not None:  # it was None until now
            handlers[name] = handler
            del self._saved_state[name]
            self._refer_to_each_other()
            handler.save()

    def _refer_to_each_other(self) -> None:
        values = [handler.value for _, handler in sorted(self._handlers.items())]  # in one order on all ranks
        # A scheduler may hold the optimizer that was made distributed.
        values += [value._hvd_original for value in values if hasattr(value, "_hvd_original")]
        for handler in self._handlers.values():
            handler.kept = values

    def _kept(self) -> Sequence[Any]:
        handlers = self.__dict__.get("_handlers")
        return next((handler.kept for handler in handlers.values()), ()) if handlers else ()

    def _settle(self) -> None:
        # A step on a GPU is over for this thread when it is queued.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            check_results()

    def save(self) -> None:
        self._settle()
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        self._choose_source(allgather_object, self._handlers)
        for _, handler in sorted(self._handlers.items()):  # an order that does not depend on how they were given
            handler.root_rank = self._source
            handler.sync()
        self._settle()  # before plain values count as saved, which are to be those of the same commit
        super().sync()
        for handler in self._handlers.values():
            handler.save()
