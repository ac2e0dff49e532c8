"""Keras on PyTorch: a Backend (backends.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from horovod import torch as hvd
from horovod._keras import held
from horovod.common.basics import Sum
from horovod.common.broadcast_order import check_broadcast
from horovod.common.gradients import Reduction, identity, name_of_group
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.unreduced import Steps

Compression = hvd.Compression
barrier = hvd.barrier
no_compression = Compression.none
compares_steps = True


def reduced_but_local(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    local: set[int],
    reduction: Reduction,
    optimizer: Any = None,
    made: Made | None = None,
) -> list[Any]:
    """The reduced gradients, None for a variable without one. Gradients of variables in `local` are not reduced."""
    if not reduction.communicates():
        return list(gradients)
    results, places = reduction.parted(gradients, variables, local)
    trained = {_name(place, variables[place]): variables[place] for place in places}
    called = str if made is None else made.called
    wire = f"allreduce.{called(next(iter(trained), ''))}.same_weights"
    counted = held.counted(wire, trained, reduction.process_set, optimizer, _values, made)
    if counted is not None and counted.is_due():
        counted.compare()
    started = []
    for group in reduction.grouped([variables[place] for place in places]):
        members = [places[index] for index in group]
        packed = [reduction.compression.compress(_whole(gradients[place])) for place in members]
        handle = hvd.grouped_allreduce_async(
            [small for small, _ in packed],
            name=called(name_of_group([_name(place, variables[place]) for place in members])),
            op=reduction.op,
            prescale_factor=reduction.prescale,
            postscale_factor=reduction.postscale,
            process_set=reduction.process_set,
        )
        started.append((members, packed, handle))
    for members, packed, handle in started:
        for place, (_, context), result in zip(members, packed, hvd.synchronize(handle), strict=True):
            results[place] = reduction.compression.decompress(result, context)
    return results


def agreed(gradients: Sequence[Any], variables: Sequence[Any], local: set[int], reduction: Reduction) -> list[Any]:
    """The gradients, of which a local one is not finite anywhere if one of any rank is not."""
    results = list(gradients)
    if not local or not reduction.communicates():
        return results
    stay = [place for place, one in enumerate(variables) if identity(one) in local and gradients[place] is not None]
    own = sum((results[place].detach().float() * 0.0).sum() for place in stay) if stay else torch.zeros(())
    poison = hvd.allreduce(torch.as_tensor(own), name="gradients.finite", process_set=reduction.process_set)
    for place in stay:
        results[place] = results[place] + poison.to(results[place].dtype)
    return results


def applied(optimizer: Any, steps: Steps, gradients: Sequence[Any]) -> None:
    """Nothing is traced."""
    steps.add()


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> object:
    check_broadcast("broadcast_variables", (variable.name for variable in variables), process_set)
    tensors = [getattr(variable, "value", variable).detach() for variable in variables]
    handles = [
        hvd.broadcast_async_(tensor, root_rank, name=f"variable.{place}", process_set=process_set)
        for place, tensor in enumerate(tensors)
    ]
    return [hvd.synchronize(handle) for handle in handles]


class Aggregation:
    """Gradients of several backward passes, summed up on this rank before they are reduced."""

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes = passes
        self._average = average
        self._counter = 0
        self._sums: dict[int, torch.Tensor] = {}  # identity of a variable -> the sum of its gradients

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        use: Callable[[list[Any]], object],
        skip: Callable[[], object],
    ) -> None:
        keys = [identity(variable) for variable in variables]
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient is not None:
                known = self._sums.get(key)
                self._sums[key] = gradient.detach().clone() if known is None else known.add_(gradient.detach())
        self._counter += 1
        if self._counter < self._passes:
            skip()
            return
        taken, self._sums, self._counter = self._sums, {}, 0
        if self._average:
            taken = {key: total / self._passes for key, total in taken.items()}
        use([taken.get(key) for key in keys])


def allreduce(value: Any, name: str | None, op: int, prescale: float, postscale: float, compression: Any) -> Any:
    return hvd.allreduce(
        _tensor(value),
        name=name,
        op=op,
        prescale_factor=prescale,
        postscale_factor=postscale,
        compression=compression,
    ).detach()


def differentiable_sum(value: torch.Tensor, name: str) -> Any:
    return hvd.allreduce(value, name=name, op=Sum)


def allgather(value: Any, name: str | None) -> Any:
    return hvd.allgather(_tensor(value), name=name).detach()


def broadcast(value: Any, root_rank: int, name: str | None) -> Any:
    return hvd.broadcast(_tensor(value), root_rank, name=name).detach()


def reducescatter(value: Any, name: str | None, op: int) -> Any:
    return hvd.reducescatter(_tensor(value), name=name, op=op).detach()


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    value = getattr(value, "value", value)  # the tensor of a keras.Variable
    return value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().contiguous()


def _name(place: int, variable: Any) -> str:
    return f"gradient.{place}.{variable.name}"


def _values(variable: Any) -> np.ndarray[Any, Any]:
    value = variable.value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # NumPy has no bfloat16
