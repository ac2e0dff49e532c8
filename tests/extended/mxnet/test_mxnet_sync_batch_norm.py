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

    for begin, array in ((mx.npx.reset_np, mx.nd.array), (mx.npx.set_np, mx.np.array)):
        begin()
        try:
            _compare_on(array, options)
        finally:
            mx.npx.reset_np()


def _compare_on(array: Any, options: dict[str, Any]) -> None:
    import mxnet as mx

    import horovod.mxnet as hvd

    rows = np.random.default_rng(1).normal(2.0, 3.0, size=(5, 2, 4, 4)).astype("float32")
    mine = [slice(0, 2), slice(2, 5)][hvd.rank()]
    models = _layers(mx.gluon.nn.BatchNorm, **options), _layers(hvd.SyncBatchNorm, **options)
    found = []
    for model, part in zip(models, (slice(0, 5), mine), strict=True):
        data = array(rows[part])
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
    data = array(rows)  # not in training: the running statistics
    np.testing.assert_allclose(model(data).asnumpy(), alone(data).asnumpy(), rtol=1e-3, atol=1e-4)
    model.hybridize()
    with pytest.raises(NotImplementedError, match=ends_with(OperationCode.NOT_COMPILABLE)):
        model(data)


@pytest.mark.parametrize("options", [{}, {"scale": False, "momentum": 0.5}])
def test_it_normalizes_as_one_process(mxnet_pair: World, options: dict[str, Any]) -> None:
    mxnet_pair.run(_compare, options)


def _float16_and_no_rows() -> None:
    """On parameters of float32, as gluon has them; and a rank without a batch."""
    import mxnet as mx

    import horovod.mxnet as hvd

    mx.npx.set_np()
    try:
        layer = hvd.SyncBatchNorm(in_channels=2, prefix="float16_")
        layer.cast("float16")
        layer.initialize()
        for rows in ([2, 2], [4, 0]):
            values = np.array([[0, 1], [0, 2], [2, 3], [2, 2]], dtype="float16")
            mine = slice(0, rows[0]) if hvd.rank() == 0 else slice(rows[0], 4)
            data = mx.np.array(values[mine], dtype="float16")
            data.attach_grad()
            with mx.autograd.record():
                output = layer(data)
                loss = (output * mx.np.array(values[mine], dtype="float16") ** 2).sum()
            loss.backward()
            mean, deviation = values.mean(0), values.std(0)
            normal = (values - mean) / deviation
            slope = values**2
            gradient = (slope - slope.mean(0) - normal * (slope * normal).mean(0)) / deviation
            assert output.dtype == np.float16
            np.testing.assert_allclose(output.asnumpy(), normal[mine], atol=5e-3)
            np.testing.assert_allclose(data.grad.asnumpy(), gradient[mine], atol=5e-2)
    finally:
        mx.npx.reset_np()


def test_float16_and_a_rank_without_a_batch(mxnet_pair: World) -> None:
    mxnet_pair.run(_float16_and_no_rows)
