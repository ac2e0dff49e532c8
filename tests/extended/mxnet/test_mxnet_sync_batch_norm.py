"""hvd.SyncBatchNorm on two ranks is gluon's BatchNorm on the batches of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode


def _layers(normalization: type, **options: Any) -> Any:
    """Two layers, so that two normalizations are under way in a backward pass."""
    import mxnet as mx

    mx.random.seed(7)
    model = mx.gluon.nn.HybridSequential(prefix="model_")
    with model.name_scope():
        model.add(mx.gluon.nn.Conv2D(3, 2, in_channels=2), normalization(prefix="first_", **options))
        model.add(mx.gluon.nn.Conv2D(2, 2, in_channels=3), normalization(prefix="second_", **options))
    model.initialize(mx.init.Uniform(1.0))
    return model


def _compare(options: dict[str, Any]) -> None:
    import mxnet as mx

    import horovod.mxnet as hvd

    rows = np.random.default_rng(1).normal(2.0, 3.0, size=(5, 2, 4, 4)).astype("float32")
    mine = [slice(0, 2), slice(2, 5)][hvd.rank()]
    models = _layers(mx.gluon.nn.BatchNorm, **options), _layers(hvd.SyncBatchNorm, **options)
    found = []
    for model, part in zip(models, (slice(0, 5), mine), strict=True):
        data = mx.nd.array(rows[part])
        data.attach_grad()
        with mx.autograd.record():
            output = model(data)
            loss = (output * output * output).sum()
        loss.backward()
        found.append((model, output.asnumpy(), data.grad.asnumpy()))
    (alone, whole, whole_gradient), (model, output, gradient) = found
    np.testing.assert_allclose(output, whole[mine], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(gradient, whole_gradient[mine], rtol=1e-2, atol=1e-2)
    pairs = zip(alone.collect_params().values(), model.collect_params().values(), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(other.data().asnumpy(), one.data().asnumpy(), rtol=1e-4, atol=1e-5)
        if one.grad_req != "null":
            summed = hvd.allreduce(other.grad(), op=hvd.Sum)
            np.testing.assert_allclose(summed.asnumpy(), one.grad().asnumpy(), rtol=1e-2, atol=1e-2)
    data = mx.nd.array(rows)  # not in training: the running statistics
    np.testing.assert_allclose(model(data).asnumpy(), alone(data).asnumpy(), rtol=1e-3, atol=1e-4)
    model.hybridize()
    with pytest.raises(NotImplementedError, match=ends_with(OperationCode.NOT_COMPILABLE)):
        model(data)


@pytest.mark.parametrize("options", [{}, {"scale": False, "momentum": 0.5}])
def test_it_normalizes_as_one_process(mxnet_pair: World, options: dict[str, Any]) -> None:
    mxnet_pair.run(_compare, options)
