"""Gradients that are the same on all ranks: `DistributedTrainer` for gluon, `DistributedOptimizer` for modules."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import mxnet as mx

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Average
from horovod.common.gradients import Reduction, Taken, name_of_group, refuse
from horovod.common.ops.handles import AnyHandle, synchronize
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.mxnet import plain_trainers as plain_trainers
from horovod.mxnet import same_weights, sparse
from horovod.mxnet.arrays import COLLECTIVES, MXNetFramework
from horovod.mxnet.compression import Compression
from horovod.mxnet.errors import mxnet_errors

__all__ = ["DistributedOptimizer", "DistributedTrainer"]


_OPTIMIZER: Final = Taken(
    "an optimizer of mx.optimizer",
    "mx.optimizer.create('sgd', learning_rate=0.01)",
    (mx.optimizer.Optimizer,),
    "(learning_rate=...)",
)


class DistributedTrainer(mx.gluon.Trainer):
    """A gluon Trainer whose gradients are averaged over the ranks before each step. Example:

        >>> trainer = hvd.DistributedTrainer(model.collect_params(), "sgd", {"learning_rate": 0.1 * hvd.size()})
        >>> with mx.autograd.record():
        ...     loss = loss_of(model(data), label)
        >>> loss.backward()
        >>> trainer.step(batch_size)

    `trainer.allreduce_grads()` averages them alone; gradients may be clipped between it and `trainer.update()`.

    Args:
        params, optimizer, optimizer_params: as for mx.gluon.Trainer. Parameters in a dict are used in sorted order.
            If batches have different sizes, the average is over the ranks, not over the samples.
        compression: how gradients travel, for example hvd.Compression.fp16.
        gradient_predivide_factor: gradients are divided by it before they are summed, and by the rest of the number of
            ranks afterwards.
        prefix: of the names on the wire. Without it the second trainer that takes a step has names with #2, and
            so on, so use several in the same order on all ranks.
        num_groups: in how many operations the gradients are sent; 0: each gradient in a separate one, all at once.
        process_set: the ranks that take part; others make steps with their own gradients.
        op: hvd.Average, hvd.Sum or hvd.Adasum, applied to the gradients.

    Raises:
        TypeError: `optimizer` is a class, None or something else that is neither an optimizer nor the name of one.
        ValueError: arguments that contradict each other, or a parameter on several devices, or on a GPU.
        HorovodInternalError: the ranks' gradients do not fit together, or a rank was lost; raised by a step.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        op: int = Average,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer reduces gradients itself, so it takes the optimizer out of the "
                "DistributedOptimizer that it was given.",
                stacklevel=2,
            )
            optimizer = optimizer._optimizer
        if not isinstance(optimizer, (str, mx.optimizer.Optimizer)):
            raise refuse(optimizer, "hvd.DistributedTrainer", _OPTIMIZER)
        self._reduction = _reduction(compression, gradient_predivide_factor, num_groups, process_set, op)
        self._prefix = f"{prefix or ''}gradient"
        self._made = Made([self._prefix], process_set, late=True)
        self._are_reduced = False  # whether the gradients that update() is to use are reduced
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)

    def _allreduce_grads(self) -> None:
        trained = [(place, param) for place, param in enumerate(self._params) if param.grad_req != "null"]
        for _, param in trained:
            if len(param.list_grad()) != 1:
                raise ValueError(
                    coded(
                        TrainingCode.INVALID_ARGUMENT,
                        f"DistributedTrainer: parameter {param.name} is on {len(param.list_grad())} devices "
                        f"({', '.join(map(str, param.list_ctx()))}), and Horovod has one process for each device.",
                    )
                )
        gradients = [param.list_grad()[0] for _, param in trained]
        if trained and self._reduction.communicates():
            with self._made.step(alone=True):
                first = f"{self._prefix}.{trained[0][0]}"
                same_weights.compare_trainer(self, first, self._reduction.process_set, self._made)
                _reduce(self._reduction, self._prefix, [place for place, _ in trained], gradients, self._made)
        self._are_reduced = True

    def _update(self, ignore_stale_grad: bool = False) -> None:
        if not self._are_reduced and self._reduction.communicates():
            raise ValueError(
                coded(
                    TrainingCode.NOT_REDUCED,
                    "DistributedTrainer.update() was called without allreduce_grads() since the last update: each rank "
                    "would take a different step. Call step(), or allreduce_grads() before update().",
                )
            )
        self._are_reduced = False
        super()._update(ignore_stale_grad)


# Attributes of the DistributedOptimizer itself; it takes all others from its inner optimizer.
_OWN: Final = ("_optimizer", "_reduction", "_made")


class DistributedOptimizer(mx.optimizer.Optimizer):
    """An optimizer that averages each gradient over the ranks before `optimizer` uses it. Example:

        >>> optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.1 * hvd.size()))
        >>> module.init_optimizer(kvstore=None, optimizer=optimizer)

    For gluon take `DistributedTrainer`, which sends all gradients at once.

    Args:
        optimizer: an mx.optimizer.Optimizer. Its attributes are those of this one.
        gradient_predivide_factor, process_set, op: as for `DistributedTrainer`.
        num_groups: in how many operations gradients are sent that MXNet updates in one call.

    Raises what `DistributedTrainer` does.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        op: int = Average,
    ) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise refuse(optimizer, "hvd.DistributedOptimizer", _OPTIMIZER)
        self._optimizer = optimizer
        self._reduction = _reduction(Compression.none, gradient_predivide_factor, num_groups, process_set, op)
        self._made = Made(["gradient"], process_set, late=True)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # asked for while the object is unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._optimizer, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._average(index, weight, grad, state)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._average(index, weight, grad, state)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def _average(self, *updated: Any) -> None:
        several = isinstance(updated[0], list | tuple)
        indices, weights, gradients, states = updated if several else ([one] for one in updated)
        if self._reduction.communicates():
            with self._made.step(alone=True):
                process_set = self._reduction.process_set
                same_weights.compare_updated(self, indices, weights, states, process_set, self._made)
                _reduce(self._reduction, "gradient", indices, gradients, self._made)

    def create_state(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state_multi_precision(index, weight)

    def set_learning_rate(self, lr: float) -> None:
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: dict[Any, float]) -> None:
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: dict[Any, float]) -> None:
        self._optimizer.set_wd_mult(args_wd_mult)


def _reduction(compression: Any, predivide: float, num_groups: int, process_set: ProcessSet, op: int) -> Reduction:
    if not isinstance(num_groups, int) or isinstance(num_groups, bool) or num_groups < 0:
        raise ValueError(
            coded(TrainingCode.INVALID_GROUPS, f"num_groups must be a number of groups, or 0, not {num_groups!r}.")
        )
    return Reduction(compression, op, predivide, num_groups, process_set)


@mxnet_errors
def _reduce(reduction: Reduction, prefix: str, keys: Sequence[Any], gradients: Sequence[Any], made: Made) -> None:
    """Averages the gradients in place. keys: what tells them apart, the same on all ranks. made: of the optimizer."""
    names = [f"{prefix}.{key}" for key in keys]
    rows = [
        (gradient, sparse.start(gradient, made.called(name), reduction.op, reduction.process_set))
        for gradient, name in zip(gradients, names, strict=True)
        if gradient.stype == "row_sparse"
    ]
    dense = [place for place, gradient in enumerate(gradients) if gradient.stype != "row_sparse"]
    packed = {place: reduction.compression.compress(gradients[place]) for place in dense}
    factors = (reduction.prescale, reduction.postscale, reduction.process_set)
    handles: list[AnyHandle] = []
    for group in reduction.grouped(dense):
        small = [packed[dense[index]][0] for index in group]
        name = made.called(name_of_group([names[dense[index]] for index in group]))
        if len(small) == 1:
            handles.append(COLLECTIVES.allreduce_async_(small[0], reduction.op, name, *factors))
        else:
            handles.append(COLLECTIVES.start_allreduces(small, True, reduction.op, name, *factors))
    for handle in handles:
        synchronize(handle, MXNetFramework.current_stream)
    for place, (small, context) in packed.items():
        if small is not gradients[place]:
            gradients[place][:] = reduction.compression.decompress(small, context)
    for gradient, wait in rows:
        wait().copyto(gradient)
