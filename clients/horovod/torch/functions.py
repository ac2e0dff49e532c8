"""What every rank starts from and what everyone has: parameters, optimizer state, objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from horovod.base.errors import OperationCode, TrainingCode, coded
from horovod.common.broadcast_order import check_broadcast
from horovod.common.ops.collectives import check_root
from horovod.common.ops.objects import allgather_object, broadcast_object
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.handles import synchronize
from horovod.torch.misuse import check_is_optimizer
from horovod.torch.ops.broadcast import broadcast_async_
from horovod.torch.tensors import device_obstacle
from horovod.torch.wrapping import named_by_torch
from horovod.worker.runtime.context import current

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrites tensors in place with their values on rank `root_rank`.

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, hvd.rank())
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        >>> model.weight.item()
        1.0

    Args:
        params: `model.state_dict()` (sent in sorted key order), `model.named_parameters()`, or tensors in the same
            order on every rank; dense, of the dtypes of `broadcast`, of the same shapes and dtypes on all ranks.
        root_rank: the rank whose values count; a global rank of the process set.
        process_set: the ranks that take part.

    Raises:
        ValueError: params of another kind, an entry that is not a tensor or can't be sent (the message names it), a bad
            root or process set.
        HorovodInternalError: shapes or dtypes differ between ranks, or a rank was lost.
    """
    named = _named(params)
    check_broadcast("broadcast_parameters", (str(name) for name, _ in named), process_set)
    broadcast_tensors(named, root_rank, process_set)


def broadcast_tensors(
    named: Iterable[tuple[str | None, torch.Tensor]], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Starts all broadcasts, then waits for all: they travel together."""
    pending = [broadcast_async_(tensor.detach(), root_rank, name, process_set) for name, tensor in named]
    for handle in pending:
        synchronize(handle)


def _named(params: Any) -> list[tuple[str | None, torch.Tensor]]:
    if isinstance(params, Mapping):
        entries = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor, torch.nn.Module)):
        entries = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(
            coded(
                TrainingCode.INVALID_ARGUMENT,
                f"invalid params of type: {type(params).__name__}. Pass a state_dict, model.named_parameters() or a "
                "list of tensors.",
            )
        )
    for name, tensor in entries:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                coded(
                    OperationCode.NOT_A_TENSOR,
                    f"broadcast_parameters: entry {name!r} is a {type(tensor).__name__}, not a tensor. "
                    "Send such values with hvd.broadcast_object.",
                )
            )
        if (obstacle := device_obstacle(tensor.device)) is not None:
            raise ValueError(
                coded(
                    OperationCode.UNSUPPORTED_DEVICE,
                    f"broadcast_parameters: entry {name!r} is on device {tensor.device}, {obstacle}",
                )
            )
    return entries


# -- broadcast_optimizer_state -----------------------------------------------------------------------------------------
# Root's state is described first, with a placeholder for each tensor, and travels as one object. The other ranks take
# its numbers and options as they are, keep or make a tensor for each placeholder, and then all tensors are broadcast in
# place. No optimizer step is taken anywhere: weights, step counters and learning rates are root's, not one step
# further.


@dataclass(frozen=True)
class _Placeholder:
    """Stands for a tensor in the description of root's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_parameter_device: bool


@dataclass(frozen=True)
class _Parameter:
    """Stands for the parameter that state belongs to, numbered through all groups."""

    index: int


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Makes the state and the options of `optimizer` equal to those on rank `root_rank`, on every rank.

    Works for fresh and for stepped optimizers, also when ranks differ in that, for wrapped ones (DistributedOptimizer)
    and for every optimizer of torch.optim but LBFGS. Tensors keep root's shapes and dtypes. Example:

        >>> optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.5 + hvd.rank())
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        >>> optimizer.param_groups[0]["lr"]
        0.5

    Args:
        optimizer: built over the same parameters, in the same order, on all ranks.
        root_rank: the rank whose state counts; a global rank of the process set.
        model: accepted for compatibility, not needed.
        process_set: the ranks that take part.

    Raises:
        TypeError: `optimizer` is a model, a class or something else that is no optimizer.
        ValueError: an LBFGS optimizer, a bad root or process set, or parameter groups that differ from root's in the
            numbers, shapes or (if known) names of their parameters.
        HorovodInternalError: a rank was lost.
    """
    check_is_optimizer(optimizer, "hvd.broadcast_optimizer_state")
    if isinstance(optimizer, torch.optim.LBFGS):
        # Its state is a history of one rank's own closure calls.
        raise ValueError(coded(TrainingCode.UNSUPPORTED_OPTIMIZER, "cannot broadcast torch.optim.LBFGS state"))
    check_root(root_rank, process_set)
    check_broadcast("broadcast_optimizer_state", (), process_set)
    is_root = current().world.rank == root_rank
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index_of = {parameter: index for index, parameter in enumerate(parameters)}
    tensors: list[torch.Tensor] = []

    if is_root:
        groups = [(len(group["params"]), _describe(_options(group), None, tensors)) for group in optimizer.param_groups]
        known_as = _known_as(optimizer, parameters)
        states = []
        for key, value in optimizer.state.items():
            device = key.device if isinstance(key, torch.Tensor) else None
            place = _Parameter(index_of[key]) if key in index_of else key
            states.append((place, _describe(value, device, tensors)))
        broadcast_object((groups, known_as, states), root_rank, "broadcast_optimizer_state", process_set)
    else:
        received: Any = broadcast_object(None, root_rank, "broadcast_optimizer_state", process_set)
        groups, known_as, states = received
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != [count for count, _ in groups]:
            raise ValueError(
                coded(
                    TrainingCode.DIFFERENT_MODELS,
                    f"broadcast_optimizer_state: this rank's optimizer has parameter groups of {sizes} parameters, but "
                    f"on root rank {root_rank} they have {[count for count, _ in groups]}. "
                    "Build the same optimizer on all ranks.",
                )
            )
        _check_order(_known_as(optimizer, parameters), known_as, root_rank)
        for group, (_, description) in zip(optimizer.param_groups, groups, strict=True):
            group.update(_rebuild(description, _options(group), torch.device("cpu"), tensors))
        known = dict(optimizer.state)
        optimizer.state.clear()
        for place, description in states:
            owner = parameters[place.index] if isinstance(place, _Parameter) else place
            device = owner.device if isinstance(owner, torch.Tensor) else torch.device("cpu")
            optimizer.state[owner] = _rebuild(description, known.get(owner), device, tensors)
    named = ((f"optimizer_state.{index}", tensor) for index, tensor in enumerate(tensors))
    broadcast_tensors(named, root_rank, process_set)


def _known_as(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]
) -> list[tuple[str | None, tuple[int, ...] | None]]:
    """Name and shape of each parameter, as far as they are known."""
    named = getattr(optimizer, "_hvd_named", None) or named_by_torch(optimizer.param_groups) or ()
    names = {id(parameter): name for name, parameter in named}
    shapes = [None if torch.nn.parameter.is_lazy(one) else tuple(one.shape) for one in parameters]
    return [(names.get(id(one)), shape) for one, shape in zip(parameters, shapes, strict=True)]


def _check_order(own: list[Any], of_root: list[Any], root_rank: int) -> None:
    for place, (mine, theirs) in enumerate(zip(own, of_root, strict=True)):
        if any(one != other for one, other in zip(mine, theirs, strict=True) if None not in (one, other)):
            raise ValueError(
                coded(
                    TrainingCode.DIFFERENT_MODELS,
                    f"broadcast_optimizer_state: parameter {place} of this rank's optimizer is {_in_words(*mine)}, but "
                    f"on root rank {root_rank} it is {_in_words(*theirs)}. Give the optimizer its parameters in the "
                    "same order on all ranks.",
                )
            )


def _in_words(name: str | None, shape: tuple[int, ...] | None) -> str:
    return f"{'unnamed' if name is None else repr(name)} of shape {'unknown' if shape is None else list(shape)}"


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _map(value: Any, own: Any, leaf: Callable[[Any, Any], Any]) -> Any:
    """`value` with leaf(item, own item at the same place or None) for each item inside dicts, lists and tuples."""
    if isinstance(value, dict):
        own_items = own if isinstance(own, dict) else {}
        return {key: _map(item, own_items.get(key), leaf) for key, item in value.items()}
    if type(value) in (list, tuple):
        old = own if isinstance(own, (list, tuple)) and len(own) == len(value) else [None] * len(value)
        return type(value)(_map(item, before, leaf) for item, before in zip(value, old, strict=True))
    return leaf(value, own)


def _describe(value: Any, device: torch.device | None, tensors: list[torch.Tensor]) -> Any:
    """`value` with placeholders; its tensors are appended to `tensors`."""

    def leaf(item: Any, _: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        tensors.append(item)
        return _Placeholder(tuple(item.shape), item.dtype, item.device == device)

    return _map(value, None, leaf)


def _rebuild(description: Any, own: Any, device: torch.device, tensors: list[torch.Tensor]) -> Any:
    """What `description` says, with this rank's own tensors where they fit and new ones elsewhere, all in `tensors`."""

    def leaf(item: Any, before: Any) -> Any:
        if not isinstance(item, _Placeholder):
            return item
        if isinstance(before, torch.Tensor) and tuple(before.shape) == item.shape and before.dtype == item.dtype:
            tensor = before
        else:
            home = device if item.on_parameter_device else torch.device("cpu")
            tensor = torch.empty(item.shape, dtype=item.dtype, device=home)
        tensors.append(tensor)
        return tensor

    return _map(description, own, leaf)
