"""SyncBatchNorm for Flax: two ranks have the rows, statistics and gradients of one process with the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import TrainingCode

pytest.importorskip("flax", reason="flax is not installed")

STEPS = 3
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def _same(found: Any, expected: Any) -> None:
    import jax

    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda *two: np.testing.assert_allclose(*two, **CLOSE), found, expected)


def _rows(rank: int | None, border: int = 4) -> Any:
    """Of a batch of eight images with three channels, all, or those of a rank."""
    images = np.random.default_rng(5).normal(3.0, 2.0, [8, 2, 2, 3]).astype(np.float32)
    return images if rank is None else images[:border] if rank == 0 else images[border:]


def _linen() -> None:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen

    import horovod.jax as hvd
    from horovod.jax.linen import SyncBatchNorm

    def trained(layer: Any, optimizer: Any, rows: Any) -> Any:
        class Model(linen.Module):
            @linen.compact
            def __call__(self, images: Any, train: bool) -> Any:
                exact = {"use_fast_variance": False}
                first = layer(use_running_average=not train, name="first", **exact)
                hidden = first(linen.Conv(4, (2, 2))(images)).mean((1, 2))
                return linen.Dense(1)(layer(axis=1, name="second", **exact)(hidden, not train))

        model = Model()
        variables = model.init(jax.random.key(0), rows, True)
        params, averages, state = variables["params"], variables["batch_stats"], optimizer.init(variables["params"])

        @jax.jit
        def step(params: Any, averages: Any, state: Any) -> Any:
            def loss_of(params: Any) -> Any:
                given = {"params": params, "batch_stats": averages}
                found, changed = model.apply(given, rows, True, mutable=["batch_stats"])
                return jnp.mean((found[:, 0] - rows[:, 0, 0, 0]) ** 2), changed["batch_stats"]

            gradients, averages_now = jax.grad(loss_of, has_aux=True)(params)
            updates, state_now = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), averages_now, state_now

        for _ in range(STEPS):
            params, averages, state = step(params, averages, state)
        evaluated = model.apply({"params": params, "batch_stats": averages}, _rows(None), False)
        return params, averages, evaluated

    sgd = optax.sgd(1e-2)
    found = trained(SyncBatchNorm, hvd.DistributedOptimizer(sgd), _rows(hvd.rank()))
    _same(found, trained(linen.BatchNorm, sgd, _rows(None)))

    # Batches of 6 and 2 rows of which some are left out, without parameters, and outside of compiled functions.
    mask = np.arange(8 * 2 * 2).reshape(8, 2, 2, 1) % 3 > 0
    part = slice(0, 6) if hvd.rank() == 0 else slice(6, 8)
    plain = {"use_bias": False, "use_scale": False, "use_running_average": False, "use_fast_variance": False}
    expected, changed = linen.BatchNorm(**plain).apply({}, _rows(None), mask=mask, mutable=["batch_stats"])
    own, changed_here = SyncBatchNorm(**plain).apply({}, _rows(hvd.rank(), 6), mask=mask[part], mutable=["batch_stats"])
    _same((own, changed_here), (expected[part], changed))
    half = SyncBatchNorm(**plain).apply({}, jnp.ones((2, 3), "bfloat16"), mutable=["batch_stats"])[0]
    assert half.dtype == "bfloat16"
    with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "axis_name")):
        SyncBatchNorm(axis_name="batch", **plain).apply({}, jnp.ones((2, 3)), mutable=["batch_stats"])


def test_linen_trains_as_one_process(jax_pair: World) -> None:
    jax_pair.run(_linen)


def _nnx() -> None:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import horovod.jax as hvd
    from horovod.jax.nnx import SyncBatchNorm

    def trained(layer: Any, optimizer: Any, rows: Any) -> Any:
        class Model(nnx.Module):
            def __init__(self, rngs: Any) -> None:
                self.conv = nnx.Conv(3, 4, (2, 2), rngs=rngs)
                exact = {"rngs": rngs, "use_fast_variance": False}
                self.first, self.second = layer(4, **exact), layer(4, axis=1, **exact)
                self.last = nnx.Linear(4, 1, rngs=rngs)

            def __call__(self, images: Any) -> Any:
                return self.last(self.second(self.first(self.conv(images)).mean((1, 2))))

        model = Model(nnx.Rngs(0))
        distributed = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, distributed: Any) -> None:
            def loss_of(model: Any) -> Any:
                return jnp.mean((model(rows)[:, 0] - rows[:, 0, 0, 0]) ** 2)

            distributed.update(model, nnx.grad(loss_of)(model))

        for _ in range(STEPS):
            step(model, distributed)
        state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
        evaluated = nnx.view(model, use_running_average=True)(_rows(None))
        return state, evaluated

    sgd = optax.sgd(1e-2)
    found = trained(SyncBatchNorm, hvd.DistributedOptimizer(sgd), _rows(hvd.rank()))
    _same(found, trained(nnx.BatchNorm, sgd, _rows(None)))
    with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "axis_name")):
        SyncBatchNorm(4, rngs=nnx.Rngs(0), axis_name="batch")


def test_nnx_trains_as_one_process(jax_pair: World) -> None:
    jax_pair.run(_nnx)


def _gradients() -> None:
    """Of the whole batch's loss with respect to the rows themselves, which reach it through the statistics too."""
    import jax
    import jax.numpy as jnp
    from flax import linen

    import horovod.jax as hvd
    from horovod.jax.linen import SyncBatchNorm

    weights = np.random.default_rng(1).normal(size=[8, 2, 2, 3]).astype(np.float32)

    def gradient(layer: Any, rows: Any, own: Any) -> Any:
        def loss_of(rows: Any) -> Any:
            found, _ = layer.apply({}, rows, mutable=["batch_stats"])
            return jnp.sum(found * own)

        return jax.grad(loss_of)(rows)

    plain = {"use_bias": False, "use_scale": False, "use_running_average": False, "use_fast_variance": False}
    part = slice(0, 5) if hvd.rank() == 0 else slice(5, 8)
    found = gradient(SyncBatchNorm(**plain), _rows(hvd.rank(), 5), weights[part])
    expected = gradient(linen.BatchNorm(**plain), _rows(None), weights)[part]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_gradients_of_uneven_batches(jax_pair: World) -> None:
    jax_pair.run(_gradients)
