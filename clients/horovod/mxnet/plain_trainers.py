"""gluon's trainers and modules that are not distributed, though hvd.init() was called (common/unreduced.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from horovod.common import unreduced
from horovod.common.unreduced import Trained, steps_of


def _watch() -> None:
    """Replaces the parts that all steps end with."""
    unreduced.replace(mx.gluon.Trainer, "_update", _update)
    unreduced.replace(mx.mod.Module, "update", _update_module)


unreduced.when_in_a_world(_watch)


def _update(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
    original(trainer, *args, **kwargs)
    steps_of(trainer, lambda: _trained_by_trainer(trainer)).add()


def _trained_by_trainer(trainer: Any) -> Trained | None:
    if trainer._distributed:  # by a kvstore of MXNet
        return None
    return Trained(
        type(trainer._optimizer).__name__,
        sum(_least(one.shape, one._grad_stype) for one in trainer._params if one.grad_req != "null"),
        "Write trainer = hvd.DistributedTrainer(model.collect_params(), ...) in place of gluon.Trainer(...).",
    )


def _least(shape: Sequence[int], storage: str | None) -> int:
    """Bytes that a reduction of a gradient sends at least: one for each number, and a row of those with few rows."""
    return math.prod(shape[1:] if storage == "row_sparse" else shape)


def _update_module(original: Any, module: Any) -> None:
    original(module)
    # By the optimizer, which the modules of a BucketingModule have in common.
    steps_of(module._optimizer, lambda: _trained_by_module(module)).add()


def _trained_by_module(module: Any) -> Trained | None:
    if module._kvstore is not None and "dist" in module._kvstore.type:
        return None
    trained = set(module._param_names) - set(module._fixed_param_names or ())
    group = module._exec_group
    storage = {
        name: next((one.stype for one in on_devices if one is not None), None)
        for name, on_devices in zip(group.param_names, group.grad_arrays, strict=True)
    }
    return Trained(
        type(module._optimizer).__name__,
        sum(_least(one.shape, storage.get(name)) for name, one in module._arg_params.items() if name in trained),
        "Pass optimizer=hvd.DistributedOptimizer(optimizer) with kvstore=None to fit() or init_optimizer().",
    )
