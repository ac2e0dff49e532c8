"""hvd.SyncBatchNorm: batch normalization with the mean and variance of the batches of all ranks together."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from horovod.base.errors import OperationCode, coded
from horovod.common.basics import Sum, is_initialized, size
from horovod.common.process_sets import global_process_set
from horovod.mxnet.arrays import COLLECTIVES
from horovod.mxnet.errors import kept, mxnet_errors
from horovod.worker.runtime.context import current, is_member


class SyncBatchNorm(mx.gluon.nn.BatchNorm):
    """gluon.nn.BatchNorm over the batches of all ranks; their sizes may differ. Example:

        >>> model.add(mx.gluon.nn.Conv2D(8, 3), hvd.SyncBatchNorm(), mx.gluon.nn.Activation("relu"))

    Arguments, parameters and running statistics are those of gluon.nn.BatchNorm. All ranks name the layer alike, and
    call it once in a forward pass. It is a call of Python, so neither it nor a block around it can be hybridized.

    Raises:
        NotImplementedError: it is hybridized, in a world of several ranks or one that may grow.
        HorovodInternalError: a rank was lost. In a backward pass, which MXNet runs later, MXNet prints this error; it
            is raised where a collective or a step of the trainer gets to a gradient, and hvd.elastic.run goes back to
            the last commit. Elsewhere, waiting for a gradient raises an MXNetError.
    """

    def forward(self, x: Any, *args: Any) -> Any:
        if isinstance(x, mx.sym.Symbol) and is_member() and (size() > 1 or current().settings.may_grow):
            raise NotImplementedError(
                coded(
                    OperationCode.NOT_COMPILABLE,
                    f"SyncBatchNorm: {self.name} is hybridized, or a block around it is, and would normalize each "
                    "rank's batches alone. Leave out hybridize().",
                )
            )
        is_alone = not is_initialized() or size() == 1
        if is_alone or not mx.autograd.is_training() or self._kwargs["use_global_stats"]:
            return super().forward(x, *args)
        axis = self._kwargs["axis"]
        for param in (self.gamma, self.beta, self.running_mean, self.running_var):
            param.shape = (x.shape[axis],)
            param._finish_deferred_init()
        normalize = _Normalize(axis, self._kwargs["eps"], f"sync_batch_norm.{self.name}")
        output = normalize(x)
        shape = normalize.per_channel(x)
        if not self._kwargs["fix_gamma"]:
            output = output * self.gamma.data().astype(x.dtype).reshape(shape)  # float32 beside a float16 batch
        output = output + self.beta.data().astype(x.dtype).reshape(shape)
        momentum = self._kwargs["momentum"]
        with mx.autograd.pause():
            for running, found in ((self.running_mean, normalize.mean), (self.running_var, normalize.variance)):
                values = running.data()
                values[:] = values * momentum + _like(values, found.astype(values.dtype)) * (1 - momentum)
        return output


def _like(sample: Any, array: Any) -> Any:
    """`array`, an mx.nd one, as an mx.np one if `sample` is."""
    return array.as_np_ndarray() if isinstance(sample, mx.np.ndarray) else array


class _Normalize(mx.autograd.Function):
    """Without the parameters, whose gradients MXNet finds by itself. Sums are taken in double precision.

    It computes with mx.nd arrays, as MXNet gives gradients to backward() whatever forward() returned.
    """

    def __init__(self, axis: int, eps: float, name: str) -> None:
        super().__init__()
        self._axis, self._eps, self._name = axis, eps, name
        self.mean: Any = None
        self.variance: Any = None

    def per_channel(self, x: Any) -> tuple[int, ...]:
        shape = [1] * len(x.shape)
        shape[self._axis] = -1
        return tuple(shape)

    def _sums(self, *values: Any) -> list[Any]:
        dims = tuple(dim for dim in range(len(values[0].shape)) if dim != self._axis % len(values[0].shape))
        return [one.sum(axis=dims) for one in values]

    @mxnet_errors
    def _of_all(self, name: str, arrays: list[Any]) -> tuple[Any, ...]:
        arguments = (arrays, True, Sum, f"{self._name}.{name}", 1.0, 1.0, global_process_set)
        return COLLECTIVES.wait(COLLECTIVES.start_allreduces, *arguments)

    def forward(self, x: Any) -> Any:
        wide = x.as_nd_ndarray().astype("float64")
        own = mx.nd.full((1,), x.size / x.shape[self._axis], dtype="float64")
        count, sums, squares = self._of_all("statistics", [own, *self._sums(wide, wide * wide)])
        self._count = count.asscalar()
        self.mean = sums / self._count
        self.variance = squares / self._count - self.mean * self.mean
        shape = self.per_channel(x)
        self._scale = (1 / (self.variance + self._eps).sqrt()).reshape(shape)
        self._output = (wide - self.mean.reshape(shape)) * self._scale
        return _like(x, self._output.astype(x.dtype))

    @mx.util.use_np_shape  # otherwise a 0 in a shape means an unknown size, and a rank may have no rows
    def backward(self, gradient: Any) -> Any:
        wide = gradient.astype("float64")
        shape = self.per_channel(gradient)
        with kept():
            sums = self._of_all("gradients", self._sums(wide, wide * self._output))
        even, sloped = (one.reshape(shape) / self._count for one in sums)
        return (self._scale * (wide - even - self._output * sloped)).astype(gradient.dtype)
