"""The operations in what JAX compiles: values, control flow, order, errors."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import World

from horovod.base.errors import OperationCode, code_of


def _same_as_outside() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    mine = jnp.arange(4.0) + hvd.rank()
    for call in (
        hvd.allreduce,
        lambda x: hvd.allreduce(x, op=hvd.Max),
        lambda x: hvd.allreduce(x, op=hvd.Adasum),
        lambda x: hvd.allreduce(x, compression=hvd.Compression.bf16, prescale_factor=0.3, op=hvd.Sum),
        lambda x: hvd.allreduce(x.astype("bfloat16"), op=hvd.Sum),
        lambda x: hvd.allreduce(x > 1, op=hvd.Product),
        hvd.allgather,
        lambda x: hvd.broadcast(x, root_rank=1),
        hvd.alltoall,
        lambda x: hvd.reducescatter(x[:3], op=hvd.Sum),
        lambda x: hvd.grouped_allreduce([x, x.astype("int32"), 2 * x], op=hvd.Sum),
        lambda x: hvd.grouped_allgather([x, x.astype("float16")]),
        lambda x: hvd.allreduce(x.reshape(2, 2).T, op=hvd.Sum, name='a "name", 名'),
        lambda x: hvd.allreduce(x[:0]),
        lambda x: hvd.allgather(x[:0]),
        lambda x: hvd.allreduce(x.astype("float8_e4m3fn"), op=hvd.Sum),
        lambda x: hvd.grouped_allgather([x.astype("float8_e5m2"), x.astype("bfloat16")]),
    ):
        outside, inside = call(mine), jax.jit(call)(mine)
        jax.tree.map(np.testing.assert_array_equal, inside, outside)


def test_results_are_those_of_calls_outside(jax_pair: World) -> None:
    jax_pair.run(_same_as_outside)


def _control_flow() -> None:
    import jax
    import jax.numpy as jnp
    from jax import lax

    import horovod.jax as hvd

    mine = jnp.ones(2) * (1 + hvd.rank())

    @jax.jit
    def scanned(x):
        return lax.scan(lambda carry, _: (hvd.allreduce(carry) + 1, hvd.allgather(carry).sum()), x, length=3)

    last, seen = scanned(mine)
    assert last.tolist() == [4.5, 4.5]
    assert seen.tolist() == [6, 10, 14]
    looped = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, carry: hvd.allreduce(carry, op=hvd.Sum), x))
    assert looped(mine).tolist() == [12, 12]
    untimed = jax.jit(lambda x: lax.while_loop(lambda c: c[0] < 40, lambda c: hvd.allreduce(c, op=hvd.Sum), x))
    assert untimed(mine).tolist() == [48, 48]
    chosen = jax.jit(lambda x, way: lax.cond(way, lambda y: hvd.allreduce(y, op=hvd.Sum), lambda y: y, x))
    assert chosen(mine, True).tolist() == [3, 3]
    assert chosen(mine, False).tolist() == mine.tolist()
    donated = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum), donate_argnums=0)
    assert donated(mine + 0).tolist() == [3, 3]


def test_in_scan_loops_and_branches(jax_pair: World) -> None:
    jax_pair.run(_control_flow)


def _many_calls(rows: int) -> list[int]:
    """Calls of many sizes that need nothing of each other, between calculations that take one rank longer."""
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    @jax.jit
    def step(square):
        results = []
        for place in range(20):
            other = square
            for _ in range((place + hvd.rank()) % 3):
                other = jnp.tanh(other @ square)
            size = (place + 1) * (5000 if place % 2 else 1)
            results.append(hvd.allreduce(jnp.full(size, place) + 0 * other.sum(), op=hvd.Sum))
        hvd.allreduce(square[0, 0])  # nobody needs it
        return results

    mine = jnp.ones((rows if hvd.rank() else 3, rows if hvd.rank() else 3)) / rows
    return [float(one[0]) for _ in range(2) for one in step(mine)]


def test_calls_run_in_the_order_of_the_program_whatever_the_shapes(jax_pair: World) -> None:
    """Else calls of different sizes would meet, since they have no names."""
    assert jax_pair.run(_many_calls, 100) == [[2.0 * place for place in range(20)] * 2] * 2


def _other_shapes() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    compiled = []

    @jax.jit
    def step(rows):
        compiled.append(rows.shape)
        return hvd.allreduce(rows.sum(0), op=hvd.Sum), hvd.allreduce(rows.mean(), name="loss")

    for turn in range(2):
        for place in range(4):
            count = 1 + (place + hvd.rank()) % 3  # each rank's batches have sizes of their own
            total, mean = step(jnp.full((count, 2), float(place)))
            counts = [1 + (place + rank) % 3 for rank in range(hvd.size())]
            assert (total.tolist(), mean) == ([place * sum(counts)] * 2, place)
        assert len(compiled) == 3, (turn, compiled)
    for width in (2, 5, 2):  # what travels has other sizes as well, under the same name
        assert step(jnp.ones((1, width)))[0].tolist() == [2] * width


def test_functions_that_are_compiled_anew_for_other_shapes(jax_pair: World) -> None:
    jax_pair.run(_other_shapes)


def _joined() -> tuple[int, list[float]]:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    step = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    results = [step(jnp.ones(2) * turn) for turn in range(1, 3 + hvd.rank())]  # one more on rank 1
    return hvd.join(), [float(one[0]) for one in results]


def test_join_waits_for_compiled_functions_and_gives_zeros_to_those_of_others(jax_pair: World) -> None:
    assert jax_pair.run(_joined) == [(1, [2.0, 4.0]), (1, [2.0, 4.0, 3.0])]


def _equal_calls() -> tuple[float, int]:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    both = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="a") + hvd.allreduce(x, op=hvd.Sum, name="a"))
    compiled = both.lower(jnp.float32(1)).compile().as_text()
    return float(both(jnp.float32(1))), compiled.count('custom_call_target="horovod"')


def test_equal_calls_stay_two(jax_pair: World) -> None:
    assert jax_pair.run(_equal_calls) == [(4.0, 2)] * 2


def _in_place() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    def of_computed(x):
        return hvd.grouped_allreduce([x + 1, 2 * x], op=hvd.Sum)

    large = jnp.ones(100_000)
    assert jax.jit(of_computed).lower(large).compile().memory_analysis().temp_size_in_bytes < large.nbytes
    mine = jnp.ones(3) * (1 + hvd.rank())

    @jax.jit
    def of_what_is_needed_later(x):
        computed = x + 1
        total, same = hvd.grouped_allreduce([computed, computed], op=hvd.Sum)
        return total, same, hvd.broadcast(x, root_rank=1), computed, x

    found = of_what_is_needed_later(mine)
    own = 1 + hvd.rank()
    assert [one.tolist() for one in found] == [[5] * 3, [5] * 3, [2] * 3, [own + 1] * 3, [own] * 3]
    assert mine.tolist() == [own] * 3


def test_results_take_the_memory_of_what_is_not_needed_any_more(jax_pair: World) -> None:
    jax_pair.run(_in_place)


def _disagreement() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd
    from horovod.jax.waiting import end_compiled_calls

    reduce = jax.jit(lambda x: hvd.allreduce(x, name="of-two-sizes"))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        reduce(jnp.ones(2 + hvd.rank())).block_until_ready()
    assert code_of(str(caught.value).splitlines()[0]) is OperationCode.MISMATCHED
    assert "of-two-sizes" in str(caught.value)
    end_compiled_calls()
    gather = jax.jit(hvd.allgather)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        gather(jnp.ones(2 + hvd.rank())).block_until_ready()
    assert code_of(str(caught.value).splitlines()[0]) is OperationCode.MISMATCHED
    end_compiled_calls()
    for rows in (2, 300):  # XLA runs small functions in another way
        gradients = jax.jit(hvd.grad(lambda tree: (tree["a"] @ tree["b"]).sum(), groups=2))
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(
                gradients({"a": jnp.ones((rows, 2 + hvd.rank())), "b": jnp.ones((2 + hvd.rank(), rows))})
            )
        assert code_of(str(caught.value).splitlines()[0]) is OperationCode.MISMATCHED
        end_compiled_calls()
    assert reduce(jnp.ones(2)).tolist() == [1, 1]


def test_ranks_that_do_not_agree_get_an_error_with_our_sentence(jax_pair: World) -> None:
    jax_pair.run(_disagreement)
