"""Broadcasts of parameters; the functions for objects."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet.gluon.parameter import DeferredInitializationError, Parameter, ParameterDict

from horovod.base.errors import TrainingCode, coded
from horovod.common.broadcast_order import check_broadcast
from horovod.common.ops.handles import synchronize
from horovod.common.ops.objects import allgather_object, broadcast_object
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.mxnet.arrays import COLLECTIVES, MXNetFramework
from horovod.mxnet.errors import mxnet_errors

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


@mxnet_errors
def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites parameters in place with their values on rank `root_rank`. Call it before training. Example:

        >>> hvd.broadcast_parameters(model.collect_params(), root_rank=0)

    A parameter whose shape is not known yet is broadcast as soon as the first batch has given it one.

    Args:
        params: a ParameterDict or a dict of parameters or arrays, as `model.collect_params()` and
            `module.get_params()` return them; of the same names, shapes and dtypes on all ranks.
        root_rank: the rank whose values count; a global rank of the process set.
        prefix: of the names on the wire; give two models that are broadcast at once different ones.
        process_set: the ranks that take part.

    Raises:
        ValueError: params of another kind, or an array that can't be sent.
        HorovodInternalError: shapes or dtypes differ between ranks, or a rank was lost.
    """
    if not isinstance(params, dict | ParameterDict):
        raise ValueError(
            coded(
                TrainingCode.INVALID_ARGUMENT,
                f"invalid params of type: {type(params).__name__}. Pass model.collect_params(), or a dict of arrays.",
            )
        )
    check_broadcast("broadcast_parameters", (f"{prefix or ''}{key}" for key in sorted(params)), process_set)
    handles = []
    for key, value in sorted(params.items()):
        name = f"{prefix or ''}parameter.{key}"
        if not isinstance(value, Parameter):
            arrays = [value]
        else:
            try:
                arrays = value.list_data()
            except DeferredInitializationError:
                _broadcast_when_made(value, root_rank, name, process_set)
                continue
        handles += _started(arrays, root_rank, name, process_set)
    _wait(handles)


def _started(arrays: list[Any], root_rank: int, name: str, process_set: ProcessSet) -> list[Any]:
    return [
        COLLECTIVES.broadcast_async_(array, root_rank, name if place == 0 else f"{name}.{place}", process_set)
        for place, array in enumerate(arrays)
    ]


def _wait(handles: list[Any]) -> None:
    for handle in handles:
        synchronize(handle, MXNetFramework.current_stream)


def _broadcast_when_made(parameter: Any, root_rank: int, name: str, process_set: ProcessSet) -> None:
    """MXNet calls `_init_impl` with the first values of a parameter, when it knows the shape."""

    @mxnet_errors
    def init_and_broadcast(*arguments: Any, **options: Any) -> None:
        del parameter._init_impl  # the method of the class is visible again
        parameter._init_impl(*arguments, **options)
        with mx.autograd.pause():
            _wait(_started(parameter.list_data(), root_rank, name, process_set))

    parameter._init_impl = init_and_broadcast
