"""jax.grad, jax.jvp, jax.vmap and jax.checkpoint of the operations, outside of compiled functions and in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode


def _both(function: Any, *arguments: Any) -> Any:
    """The result, which is the same outside of a compiled function and in it."""
    import jax

    outside, inside = function(*arguments), jax.jit(function)(*arguments)
    jax.tree.map(lambda *two: np.testing.assert_allclose(*two, rtol=1e-6), inside, outside)
    return jax.tree.map(np.asarray, outside)


def _gradients() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    rank = hvd.rank()
    mine = jnp.arange(4.0) + 10 * rank
    weight = jnp.arange(1.0, 9.0) * (1 + rank)  # of results, so that gradients differ between ranks

    def gradient(call: Any) -> list[float]:
        def loss(x: Any) -> Any:
            result = call(x)
            return (result * weight[: result.size].reshape(result.shape)).sum()

        return _both(jax.grad(loss), mine).tolist()

    own = (1 + rank) * np.arange(1.0, 9.0)
    total, average = 3 * np.arange(1.0, 9.0), 1.5 * np.arange(1.0, 9.0)
    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0)) == (2 * total[:4]).tolist()
    assert gradient(hvd.allreduce) == average[:4].tolist()
    assert gradient(lambda x: hvd.allreduce(x, name="mine", compression=hvd.Compression.bf16)) == average[:4].tolist()
    assert gradient(hvd.allgather) == average[4 * rank : 4 * rank + 4].tolist()
    assert gradient(lambda x: hvd.broadcast(x, root_rank=1)) == (average[:4] * rank).tolist()
    # Rows 0 and 1 of every rank went to rank 0.
    assert gradient(hvd.alltoall) == [1 + 2 * rank, 2 + 2 * rank, 2 + 4 * rank, 4 + 4 * rank]
    assert gradient(hvd.reducescatter) == [1, 2, 2, 4]
    assert gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=0.5)) == [1, 2, 2, 4]
    assert gradient(lambda x: sum(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum))) == (3 * total[:4]).tolist()
    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Max)) == (2 * np.arange(1.0, 5.0)).tolist()
    assert own.size == weight.size


def test_gradients_are_those_of_the_other_frameworks(jax_pair: World) -> None:
    jax_pair.run(_gradients)


def _uneven_rows() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    rank = hvd.rank()
    weight = jnp.arange(1.0, 4.0)
    gathered = jax.grad(lambda x: (hvd.allgather(x) * weight).sum())(jnp.ones(1 + rank))
    assert gathered.tolist() == ([1] if rank == 0 else [2, 3])

    def loss(x: Any) -> Any:
        rows, received = hvd.alltoall(x, splits=[1, 2])
        assert received.tolist() == [1 + rank] * 2
        return (rows * jnp.arange(1.0, 1 + rows.size)).sum()

    assert jax.grad(loss)(jnp.ones(3)).tolist() == ([1, 1, 2] if rank == 0 else [2, 3, 4])
    assert jax.grad(lambda x: (hvd.reducescatter(x) ** 2).sum())(jnp.arange(3.0)).tolist() == [0, 2, 4]


def test_gradients_of_uneven_rows(jax_pair: World) -> None:
    jax_pair.run(_uneven_rows)


def _forward_mode_and_others() -> None:
    import jax
    import jax.numpy as jnp
    from jax import lax

    import horovod.jax as hvd

    mine = jnp.ones(2) * (1 + hvd.rank())

    def loss(x: Any) -> Any:
        return (hvd.allreduce(x, op=hvd.Sum) ** 2).sum()

    value, tangent = _both(lambda x: jax.jvp(loss, (x,), (jnp.ones(2),)), mine)
    assert (value, tangent) == (18, 24)
    assert _both(jax.grad(jax.checkpoint(loss)), mine).tolist() == [12, 12]
    np.testing.assert_allclose(_both(jax.hessian(loss), mine), 8 * np.eye(2))

    def chain(x: Any) -> Any:
        return lax.scan(lambda carry, _: (hvd.allreduce(2 * carry), None), x, length=3)[0].sum()

    assert _both(jax.grad(chain), mine).tolist() == [8, 8]
    assert _both(jax.grad(jax.checkpoint(chain)), mine).tolist() == [8, 8]
    branch = jax.grad(lambda x: lax.cond(x.sum() > 0, lambda y: hvd.allreduce(y, op=hvd.Sum), jnp.sin, x).sum())
    assert _both(branch, mine).tolist() == [2, 2]
    for op in (hvd.Max, hvd.Adasum):
        with pytest.raises(NotImplementedError, match=ends_with(OperationCode.UNDEFINED_REDUCTION)):
            jax.jvp(lambda x, op=op: hvd.allreduce(x, op=op), (mine,), (mine,))


def test_forward_mode_checkpoints_and_control_flow(jax_pair: World) -> None:
    jax_pair.run(_forward_mode_and_others)


def _mapped() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    elements = jnp.arange(24.0).reshape(3, 4, 2) + 100 * hvd.rank()
    for call in (
        hvd.allreduce,
        hvd.allgather,
        lambda x: hvd.broadcast(x, root_rank=1),
        hvd.alltoall,
        hvd.reducescatter,
        lambda x: hvd.grouped_allreduce([x, jnp.ones(2)], op=hvd.Sum)[0],
        jax.grad(lambda x: (hvd.allgather(x) ** 2).sum()),
    ):
        one_by_one = jnp.stack([call(element) for element in elements])
        np.testing.assert_array_equal(_both(jax.vmap(call), elements), one_by_one)
        last = jnp.moveaxis(elements, 0, 2)
        np.testing.assert_array_equal(_both(jax.vmap(call, in_axes=2), last), one_by_one)
    with pytest.raises(NotImplementedError, match=ends_with(OperationCode.NOT_COMPILABLE)):
        jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum))(elements)


def test_vmap_is_the_same_as_one_by_one(jax_pair: World) -> None:
    jax_pair.run(_mapped)
