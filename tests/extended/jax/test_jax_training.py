"""DistributedOptimizer, value_and_grad and the broadcasts: N ranks train as one process does on the joined batch."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode, TrainingCode
from horovod.common.ops import collectives

ROWS = 8  # of a joined batch
STEPS = 6


def _data() -> tuple[Any, Any]:
    rows = np.random.default_rng(5).normal(size=[STEPS, ROWS, 3]).astype(np.float32)
    return rows, np.tanh(rows @ np.array([[1.0, 2.0], [-2.0, 0.5], [0.5, 1.0]], np.float32))


def _model() -> dict[str, Any]:
    generator = np.random.default_rng(7)
    return {
        "first": {"kernel": generator.normal(size=[3, 4]).astype(np.float32), "bias": np.zeros(4, np.float32)},
        "last": generator.normal(size=[4, 2]).astype(np.float32),
    }


def _loss(params: Any, rows: Any, targets: Any) -> Any:
    import jax.numpy as jnp

    hidden = jnp.tanh(rows @ params["first"]["kernel"] + params["first"]["bias"])
    return ((hidden @ params["last"] - targets) ** 2).mean()


def _train(optimizer: Any, part: slice, passes: int = 1, gradients_of: Any = None, compiled: bool = True) -> Any:
    """The weights after all steps. part: of each batch; in equal parts for each pass."""
    import jax
    import optax

    gradients_of = gradients_of or jax.grad(_loss)

    def step(params: Any, state: Any, rows: Any, targets: Any) -> Any:
        updates, state = optimizer.update(gradients_of(params, rows, targets), state, params)
        return optax.apply_updates(params, updates), state

    if compiled:
        step = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(jax.numpy.array, _model())
    state = optimizer.init(params)
    for rows, targets in zip(*_data(), strict=True):
        for one in range(passes):
            mine = slice(part.start + one * part.step, part.stop, part.step * passes)
            params, state = step(params, state, rows[mine], targets[mine])
    return jax.tree.map(np.asarray, params)


def _same_as_one_process() -> None:
    import jax
    import optax

    import horovod.jax as hvd

    everything, own = slice(0, ROWS, 1), slice(hvd.rank(), ROWS, hvd.size())

    def same(found: Any, expected: Any, **tolerance: float) -> None:
        tolerance = {"rtol": 2e-5, "atol": 1e-6, **tolerance}
        jax.tree.map(lambda *two: np.testing.assert_allclose(*two, **tolerance), found, expected)

    momentum = optax.sgd(0.1, momentum=0.9)
    same(_train(hvd.DistributedOptimizer(momentum), own), _train(momentum, everything))
    adam = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))
    expected = _train(adam, everything)
    same(_train(hvd.DistributedOptimizer(adam, gradient_predivide_factor=4.0, groups=2), own), expected)
    averaged = hvd.DistributedOptimizer(adam, backward_passes_per_step=2, average_aggregated_gradients=True)
    same(_train(averaged, own, passes=2), expected)
    plain = _train(optax.sgd(0.1), everything)
    summed = hvd.DistributedOptimizer(optax.sgd(0.05), backward_passes_per_step=2)
    same(_train(summed, own, passes=2, compiled=False), plain)
    same(_train(adam, own, gradients_of=hvd.grad(_loss)), expected)
    with_value = hvd.value_and_grad(_loss, groups=3, op=hvd.Sum)
    same(_train(optax.sgd(0.05), own, gradients_of=lambda *given: with_value(*given)[1]), plain)
    half = hvd.DistributedOptimizer(optax.sgd(0.1), compression=hvd.Compression.fp16)
    same(_train(half, own), plain, rtol=1e-2, atol=1e-2)
    # The same data on all ranks: Adasum of equal updates is the update.
    same(_train(hvd.DistributedOptimizer(adam, op=hvd.Adasum), everything), expected, rtol=1e-3, atol=1e-4)


def _small_floats() -> None:
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd

    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), op=hvd.Sum)
    params = {"b": jnp.zeros(2, "bfloat16"), "f": jnp.zeros(2, "float8_e4m3fn"), "g": jnp.zeros(2, "float8_e5m2")}

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        gradients = jax.tree.map(lambda one: jnp.full_like(one, -1 - hvd.rank()), params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for turn in (1, 2):
        params, state = step(params, state)
        assert {one.dtype.name for one in params.values()} == {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
        assert [one.astype("float32").tolist() for one in params.values()] == [[3 * turn] * 2] * 3


def test_bfloat16_and_float8_keep_their_dtypes(jax_pair: World) -> None:
    jax_pair.run(_small_floats)


def test_training_is_that_of_one_process_on_the_joined_batch(jax_pair: World) -> None:
    jax_pair.run(_same_as_one_process)


def _travels_during_the_backward_pass(fifo: str) -> None:
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd

    rank = hvd.rank()
    params = [jnp.eye(128) for _ in range(6)]
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), groups=3)

    def loss_of(params: Any, rows: Any) -> Any:
        for layer in params:
            rows = jnp.tanh(rows @ layer)
        return (rows**2).mean()

    def tell(first: Any) -> Any:
        if rank == 0:
            Path(fifo).write_text("the first layer has its gradient")
        return first

    @jax.jit
    def step(params: Any, rows: Any) -> Any:
        gradients = jax.grad(loss_of)(params, rows)
        told = jax.pure_callback(tell, jax.ShapeDtypeStruct((), "float32"), gradients[0][0, 0])
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates), told

    if rank == 1:
        # Rank 0 waits for this rank with the gradients of the last layers, and computes that of the first layer.
        assert "gradient" in Path(fifo).read_text()
    found, _ = jax.block_until_ready(step(params, jnp.full((64, 128), 1.0 + rank)))
    for layer in found:
        np.testing.assert_array_equal(*hvd.allgather_object(np.asarray(layer)))


def test_gradients_travel_while_the_backward_pass_goes_on(jax_pair: World, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    jax_pair.run(_travels_during_the_backward_pass, str(tmp_path / "fifo"))


def _derivatives_of_updates() -> None:
    import jax

    import horovod.jax as hvd

    rows, targets = (part[0, hvd.rank() :: hvd.size()] for part in _data())
    params = jax.tree.map(jax.numpy.array, _model())

    def loss_after(rate: Any, groups: int) -> Any:
        gradients = hvd.grad(_loss, groups=groups)(params, rows, targets)
        after = jax.tree.map(lambda one, gradient: one - rate * gradient, params, gradients)
        return _loss(after, rows, targets)

    def slope(rate: Any, groups: int) -> Any:
        return jax.jvp(lambda one: jax.grad(loss_after)(one, groups), (rate,), (1.0,))

    expected = jax.jit(slope, static_argnums=1)(0.1, 1)
    found = jax.jit(jax.vmap(lambda rate: slope(rate, 3)))(jax.numpy.full(2, 0.1))
    np.testing.assert_allclose(found, [[one, one] for one in expected], rtol=1e-4)


def test_updates_of_several_calls_have_derivatives(jax_pair: World) -> None:
    jax_pair.run(_derivatives_of_updates)


def _arguments() -> None:
    import optax

    import horovod.jax as hvd

    for code, options in (
        (TrainingCode.CONTRADICTORY_ARGUMENTS, {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
        (TrainingCode.INVALID_ARGUMENT, {"backward_passes_per_step": 0}),
        (TrainingCode.INVALID_GROUPS, {"groups": 0}),
    ):
        with pytest.raises(ValueError, match=ends_with(code)):
            hvd.DistributedOptimizer(optax.sgd(0.1), **options)
    flax = pytest.importorskip("flax.linen")
    for wrong, fact in (
        (optax.adam, "function adam"),
        (optax.GradientTransformation, "class optax"),
        (flax.Dense(1), "Dense, which is a model"),
        ("adam", "string 'adam'"),
        (None, "None"),
    ):
        with pytest.raises(TypeError, match=ends_with(TrainingCode.INVALID_ARGUMENT, fact, "optax.adam(1e-3)")):
            hvd.DistributedOptimizer(wrong)


def test_arguments_that_make_no_sense(jax_pair: World) -> None:
    jax_pair.run(_arguments)


def _broadcasts() -> None:
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd

    rank = hvd.rank()
    tree = {
        "weights": [jnp.full(3, rank), np.full((2, 2), rank, "float16"), jnp.bfloat16(rank)],
        "key": jax.random.key(rank),
        "epoch": rank,
        "nothing": None,
    }
    received = hvd.broadcast_parameters(tree, root_rank=1)
    assert jax.tree.structure(received) == jax.tree.structure(tree)
    assert [one.astype("float32").tolist() for one in received["weights"]] == [[1, 1, 1], [[1, 1], [1, 1]], 1]
    assert received["key"] == jax.random.key(1)
    assert received["epoch"] == 1
    optimizer = optax.adam(0.1)
    _, state = optimizer.update({"w": jnp.ones(2) * (1 + rank)}, optimizer.init({"w": jnp.ones(2)}))
    gathered = hvd.allgather_object(hvd.broadcast_optimizer_state(state))
    jax.tree.map(np.testing.assert_array_equal, *gathered)
    for other in ({"w": jnp.ones(2 + rank)}, {f"w{rank}": jnp.ones(2)}):
        with pytest.raises(ValueError, match=ends_with(TrainingCode.DIFFERENT_MODELS, "rank 0", "rank 1")):
            hvd.broadcast_parameters(other)


def test_broadcasts_of_trees(jax_pair: World) -> None:
    jax_pair.run(_broadcasts)


def _flax_models() -> None:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen, nnx

    import horovod.jax as hvd

    rank = hvd.rank()
    model = linen.Dense(2)
    params = hvd.broadcast_parameters(model.init(jax.random.key(rank), jnp.ones((1, 3))))
    jax.tree.map(np.testing.assert_array_equal, *hvd.allgather_object(params))
    module = nnx.Linear(3, 2, rngs=nnx.Rngs(rank))
    nnx.update(module, hvd.broadcast_parameters(nnx.state(module)))
    optimizer = nnx.Optimizer(module, hvd.DistributedOptimizer(optax.sgd(0.1)), wrt=nnx.Param)

    @nnx.jit
    def step(module: Any, optimizer: Any, rows: Any) -> None:
        optimizer.update(module, nnx.grad(lambda one: (one(rows) ** 2).mean())(module))

    step(module, optimizer, jnp.ones((4, 3)) * (1 + rank))
    kernels = hvd.allgather_object(np.asarray(module.kernel[...]))
    np.testing.assert_array_equal(*kernels)


def test_flax_models(jax_pair: World) -> None:
    pytest.importorskip("flax", reason="flax is not installed")
    jax_pair.run(_flax_models)


def _places_of_the_optimizer() -> None:
    """Wherever it is among Optax's transformations, the sum of 1 and 2 is taken once, or the place is refused."""
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd

    params = {"x": jnp.zeros(2), "y": jnp.zeros(2)}
    own = {name: jnp.full(2, hvd.rank() + 1.0) for name in params}

    def ours(inner: Any = None) -> Any:
        return hvd.DistributedOptimizer(inner or optax.sgd(1.0), op=hvd.Sum)

    def after(optimizer: Any, steps: int, start: Any = params, gradients: Any = own) -> Any:
        state = optimizer.init(start)
        for _ in range(steps):
            updates, state = jax.jit(optimizer.update)(gradients, state, start)
            start = optax.apply_updates(start, updates)
        return start

    is_x = {"x": True, "y": False}
    both = {"x": "a", "y": "b"}
    for optimizer, steps, expected in (
        (optax.chain(optax.scale(2.0), ours()), 1, -6.0),
        (optax.chain(ours(), optax.scale(2.0)), 1, -6.0),
        (optax.MultiSteps(ours(), 2), 4, -6.0),
        (ours(optax.MultiSteps(optax.sgd(1.0), 2)), 4, -6.0),
        (ours(optax.apply_if_finite(optax.sgd(1.0), 3)), 1, -3.0),
        (optax.multi_transform({"a": ours(), "b": ours(optax.sgd(1.0, momentum=0.0))}, both), 1, -3.0),
    ):
        for value in jax.tree.leaves(after(optimizer, steps)):
            np.testing.assert_array_equal(value, [expected] * 2)
    masked = after(optax.masked(ours(), is_x), 1)  # Optax passes on what is masked, as it is
    np.testing.assert_array_equal(masked["x"], [-3.0] * 2)
    np.testing.assert_array_equal(masked["y"], [hvd.rank() + 1.0] * 2)
    lookahead = after(optax.lookahead(ours(), 2, 0.5), 2, optax.LookaheadParams(params, params))
    np.testing.assert_array_equal(lookahead.slow["x"], [-3.0] * 2)

    skips = optax.MultiSteps(optax.chain(ours()), 2, should_skip_update_fn=optax.skip_not_finite)
    for refused in (optax.apply_if_finite(ours(), 3), skips):
        with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "apply_if_finite")):
            refused.init(params)


def _reduced_twice() -> None:
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd

    def loss(params: Any) -> Any:
        return params.sum() * (hvd.rank() + 1.0)

    for compiled in (False, True):
        for passes in (1, 2):
            for op in (hvd.Sum, hvd.Average):
                optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), op=op, backward_passes_per_step=passes)

                def step(params: Any, op: int = op, optimizer: Any = optimizer) -> Any:
                    gradients = hvd.grad(loss, op=op)(params)
                    return optimizer.update(gradients, optimizer.init(params), params)[0]

                run = jax.jit(step) if compiled else step
                if op == hvd.Sum:
                    with pytest.raises(ValueError, match=ends_with(TrainingCode.REDUCED_TWICE, "hvd.grad")):
                        run(jnp.zeros(2))
                elif passes == 1:
                    np.testing.assert_array_equal(run(jnp.zeros(2)), [-1.5] * 2)


def test_gradients_are_reduced_once(jax_pair: World) -> None:
    jax_pair.run(_places_of_the_optimizer)
    jax_pair.run(_reduced_twice)


def _different_weights() -> list[list[str]]:
    import jax
    import optax

    import horovod.jax as hvd

    def told(change: str) -> list[str]:
        collectives.join(-1)  # so that steps count anew
        optimizer = hvd.DistributedOptimizer(optax.adam(0.1))
        params = jax.tree.map(jax.numpy.array, _model())
        if change == "parameter":
            params["last"] += hvd.rank()
        state = optimizer.init(params)
        if change == "state":
            state[0].mu["last"] = state[0].mu["last"] + hvd.rank()
        if change == "broadcast":
            params["last"] += hvd.rank()
            params = hvd.broadcast_parameters(params)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for rows, targets in zip(*_data(), strict=True):
                gradients = jax.grad(_loss)(params, rows, targets)
                updates, state = optimizer.update(gradients, state, params)
                params = optax.apply_updates(params, updates)
        code = TrainingCode.DIFFERENT_WEIGHTS.value
        return [f"{one.filename}: {one.message}" for one in caught if code in str(one.message)]

    return [told(change) for change in ("parameter", "state", "broadcast", "")]


def test_ranks_that_train_different_weights_are_told_so_outside_of_compiled_functions(jax_pair: World) -> None:
    (parameter, state, *quiet), on_1 = jax_pair.run(_different_weights)
    assert (len(parameter), len(state)) == (1, 1)
    assert parameter[0].startswith(__file__), "the warning must point to the script"
    for part in ("step 2", "parameter ['last']", "rank 1", "hvd.broadcast_parameters("):
        assert part in parameter[0]
    assert "state [0].mu['last']" in state[0]
    assert quiet == [[], []]
    assert on_1 == [[], [], [], []]


# -- two optimizers of equal trees -------------------------------------------------------------------------------------
def _of_two(compiled: bool, same_order: bool, made_otherwise: bool = False) -> list[float]:
    """Averages of both, whose gradients are 1 and 100 on all ranks."""
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd

    def make_first() -> Any:
        return hvd.DistributedOptimizer(optax.sgd(1.0))

    def make_second() -> Any:
        return hvd.DistributedOptimizer(optax.sgd(1.0))

    makers = [make_first, make_second]
    made = {maker: maker() for maker in (makers[::-1] if made_otherwise and hvd.rank() == 1 else makers)}
    first, second = made[make_first], made[make_second]
    updates = {optimizer: jax.jit(optimizer.update) if compiled else optimizer.update for optimizer in (first, second)}
    params = {"w": jnp.ones(1), "b": jnp.ones(2)}
    found = {}
    for _ in range(3):
        order = [(first, 1.0), (second, 100.0)]
        for optimizer, scale in order if same_order or hvd.rank() == 0 else order[::-1]:
            gradients = jax.tree.map(lambda one, scale=scale: one * scale, params)
            found[scale] = updates[optimizer](gradients, optimizer.init(params), params)[0]["w"]
            jax.block_until_ready(found[scale])
    return [-found[scale].item() for scale in (1.0, 100.0)]


@pytest.mark.parametrize("compiled", [False, True])
def test_two_optimizers_of_equal_trees(deadlocked_jax_pair: World, compiled: bool) -> None:
    assert deadlocked_jax_pair.run(_of_two, compiled, True) == [[1.0, 100.0]] * 2
    for outcome in deadlocked_jax_pair.outcomes(_of_two, compiled, False):  # a step waits for other ranks
        assert re.search(r"gradient\['b'\],gradient\['w'\]#2|gradient\['b'\]#2", str(outcome.error)), outcome
        assert OperationCode.DEADLOCK.value in str(outcome.error)
        assert "same order" in str(outcome.error)


def _of_two_made_otherwise(compiled: bool) -> list[float]:
    collectives.join(-1)  # so that steps count anew
    return _of_two(compiled, False, True)


@pytest.mark.parametrize("compiled", [False, True])
def test_two_optimizers_made_in_another_order(jax_pair: World, compiled: bool) -> None:
    for outcome in jax_pair.outcomes(_of_two_made_otherwise, compiled):
        assert re.search(ends_with(TrainingCode.DIFFERENT_ORDER, "rank 0", "rank 1"), str(outcome.error)), outcome


def _gradients_of_two(compiled: bool, keys: bool) -> tuple[list[float], list[str]]:
    """Averages for two models, that ranks compute in different orders, and the warnings; keys: of their own."""
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    collectives.join(-1)  # so that steps count anew
    found = {}
    order = [("first", 1.0), ("second", 100.0)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model, scale in order if hvd.rank() == 0 else order[::-1]:
            reduced = hvd.grad(lambda tree, scale=scale: sum(jax.tree.leaves(tree)).sum() * scale)
            tree = {model if keys else "w": jnp.full(1, scale)}
            found[scale] = jax.block_until_ready((jax.jit(reduced) if compiled else reduced)(tree))
    told = [str(one.message) for one in caught if TrainingCode.DIFFERENT_WEIGHTS.value in str(one.message)]
    return [jax.tree.leaves(found[scale])[0].item() for scale in (1.0, 100.0)], told


@pytest.mark.parametrize("compiled", [False, True])
def test_hvd_grad_tells_where_it_mixes_gradients_of_models_of_equal_trees(
    deadlocked_jax_pair: World, compiled: bool
) -> None:
    """Their weights differ. With keys of their own they never meet."""
    (mixed, told), (also_mixed, on_1) = deadlocked_jax_pair.run(_gradients_of_two, compiled, False)
    assert mixed == also_mixed == [50.5, 50.5]
    assert on_1 == []
    assert len(told) == 1
    for part in ("step 2", "parameter ['w'] (norm 100 on rank 0, 1 on rank 1)", "same order", "hvd.value_and_grad"):
        assert part in told[0]
    if not compiled:  # else the threads of XLA end a minute later
        for outcome in deadlocked_jax_pair.outcomes(_gradients_of_two, False, True):
            assert OperationCode.DEADLOCK.value in str(outcome.error)
