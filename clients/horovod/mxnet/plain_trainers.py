"""gluon's trainers that are not distributed, though hvd.init() was called (common/unreduced.py)."""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any

import mxnet as mx

from horovod.common import unreduced
from horovod.common.unreduced import Steps, Trained

_MARK = "_hvd_counts"
_steps: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()  # by trainer


def _watch() -> None:
    """Replaces the part that all steps end with, until it is known that something reduces gradients."""
    original = mx.gluon.Trainer._update
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not unreduced.watch.is_over:
            reference = weakref.ref(self)
            _steps.setdefault(self, Steps(lambda: _trained(reference()))).add()
        if unreduced.watch.is_over and mx.gluon.Trainer._update is update:
            mx.gluon.Trainer._update = original

    setattr(update, _MARK, True)
    mx.gluon.Trainer._update = update


def _trained(trainer: Any) -> Trained | None:
    if trainer is None or trainer._distributed:  # by a kvstore of MXNet
        return None
    return Trained(
        type(trainer._optimizer).__name__,
        sum(math.prod(one.shape) for one in trainer._params if one.grad_req != "null"),  # a byte each at least
        "Write trainer = hvd.DistributedTrainer(model.collect_params(), ...) in place of gluon.Trainer(...).",
    )


unreduced.when_in_a_world(_watch)
