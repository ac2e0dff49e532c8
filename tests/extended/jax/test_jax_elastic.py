"""JaxState, and that training goes on after a rank was killed, with fewer ranks and with another in its place."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import World

BATCHES = 6
ROWS = 12  # of a batch; 1 to 3 ranks share them evenly
KILLED_AT = 1
WAITS_AT = 3  # for the world to have its size again


def _state() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    rank = hvd.rank()
    step = jax.jit(lambda tree: jax.tree.map(lambda one: one + 1, tree), donate_argnums=0)
    shape = 2 if rank == 0 else 3  # a newcomer may have begun otherwise
    state = hvd.elastic.JaxState(params={"w": jnp.full(shape, rank)}, key=jax.random.key(rank), batch=rank)
    state.sync()
    assert (state.params["w"].tolist(), state.key, state.batch) == ([0, 0], jax.random.key(0), 0)
    state.params = step(state.params)
    state.batch = 1
    state.commit()
    state.params = step(state.params)  # the memory of what was committed is used for the result
    state.batch = 2
    state.restore()
    assert (state.params["w"].tolist(), state.batch) == ([1, 1], 1)
    state.params = step(state.params)
    state.restore()
    assert state.params["w"].tolist() == [1, 1]


def test_a_state_keeps_copies_and_sends_trees(jax_pair: World) -> None:
    jax_pair.run(_state)


def _kept_as_they_are() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    with jax.enable_x64(True):
        wide = jnp.full(2, 2**41)
    mine = {
        "scalar": np.int64(2**40),
        "small": np.float32(0.1),
        "array": np.array([1 + 2.0**-40]),
        "number": 2**70,
        "fraction": 0.1,
        "wide": wide,
        "weights": np.ones(2, np.float32),
    }
    theirs = {"scalar": np.int64(0), "small": np.float32(0), "array": np.zeros(3), "number": 0, "fraction": 0.0}
    values = mine if hvd.rank() == 0 else theirs | {"wide": jnp.zeros(1), "weights": np.zeros(2, np.float32)}
    state = hvd.elastic.JaxState(**values, tree={"scalar": values["scalar"]})
    state.sync()
    for turn in range(2):
        for name, expected in mine.items():
            found = getattr(state, name)
            assert type(found) is (type(wide) if name == "weights" else type(expected)), (name, turn)
            assert getattr(found, "dtype", None) == getattr(expected, "dtype", None)
            np.testing.assert_array_equal(found, expected)
        assert (type(state.tree["scalar"]), state.tree["scalar"]) == (np.int64, 2**40)
        state.scalar, state.array = np.int64(1), np.zeros(1)
        state.restore()
    found = hvd.broadcast_parameters({name: mine[name] for name in mine if name != "weights"})
    assert [type(one) for one in found.values()] == [type(mine[name]) for name in found]
    assert found["scalar"] == 2**40


def test_values_of_64_bits_come_back_as_they_were(jax_pair: World) -> None:
    jax_pair.run(_kept_as_they_are)


class Held:
    """An object of a script, which trains what it holds."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.steps = 0


def _modules_of_flax(held: bool) -> list[Any]:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import horovod.jax as hvd

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(hvd.rank()))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    both = Held(model, optimizer)
    values = {"held": [both], "scale": jnp.full(2, hvd.rank())} if held else {"model": model, "optimizer": optimizer}
    state = hvd.elastic.JaxState(**values, batch=0)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        gradients = nnx.grad(lambda model: model(jnp.ones([1, 2])).sum() ** 2)(model)
        optimizer.update(model, hvd.allreduce(gradients))

    def arrays() -> list[Any]:
        return [np.asarray(one).tolist() for one in jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))]

    state.sync()
    assert hvd.allgather_object(arrays()) == [arrays()] * 2
    step(model, optimizer)
    both.steps = 1
    state.commit()
    committed = arrays()
    assert hvd.allgather_object(committed) == [committed] * 2
    for _ in range(2):
        step(model, optimizer)
        both.steps += 1
        assert arrays() != committed
        state.restore()
        assert arrays() == committed
    if held:
        assert (state.held[0], both.model, both.optimizer, both.steps) == (both, model, optimizer, 1)
        assert state.scale.tolist() == [0, 0]
    return committed


@pytest.mark.parametrize("held", [False, True], ids=["by name", "in an object"])
def test_modules_of_flax_stay_the_objects_that_train(jax_pair: World, held: bool) -> None:
    pytest.importorskip("flax")
    first, second = jax_pair.run(_modules_of_flax, held)
    assert first == second


def _other_errors() -> None:
    import jax

    import horovod.jax as hvd

    @hvd.elastic.run
    def train(state: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        train(hvd.elastic.JaxState())


def test_other_errors_of_xla_are_raised(jax_pair: World) -> None:
    jax_pair.run(_other_errors)


def _rows() -> tuple[Any, Any]:
    rows = np.random.default_rng(5).normal(size=[ROWS, 3]).astype(np.float32)
    return rows, rows @ np.array([[1.0], [-2.0], [0.5]], np.float32)


def _alone() -> Any:
    """The weights after all steps of one process."""
    rows, targets = _rows()
    weight, velocity = np.zeros([3, 1]), np.zeros([3, 1])
    for _ in range(BATCHES):
        velocity = 0.9 * velocity + 2 / ROWS * rows.T @ (rows @ weight - targets)
        weight = weight - 0.1 * velocity
    return weight


def _train(victim: int, lives: str) -> tuple[list[int], Any]:
    """The size of each world, and the weights. lives: a file for the victim to remember that it has died."""
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd

    dies = int(os.environ["HOROVOD_RANK"]) == victim and not Path(lives).exists()
    hvd.init()
    whole = hvd.size()
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1, momentum=0.9), groups=2)
    weight = [jnp.full([rows, 1], 0.0 if hvd.rank() == 0 else 5.0) for rows in (2, 1)]
    state = hvd.elastic.JaxState(weight=weight, opt_state=optimizer.init(weight), batch=0)
    sizes = [hvd.size()]
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])

    @jax.jit
    def step(weight: Any, opt_state: Any, rows: Any, targets: Any) -> Any:
        gradient = jax.grad(lambda parts: ((rows @ jnp.concatenate(parts) - targets) ** 2).mean())(weight)
        updates, opt_state = optimizer.update(gradient, opt_state, weight)
        # The number of rows of the result is compiled into the function.
        return optax.apply_updates(weight, updates), opt_state, hvd.allgather(rows[:1]).shape[0]

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < BATCHES:
            if state.batch == KILLED_AT and dies:
                Path(lives).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            while state.batch == WAITS_AT and hvd.size() < whole:
                time.sleep(0.01)  # training takes its time meanwhile
                state.commit()
            own = [np.split(what, hvd.size())[hvd.rank()] for what in _rows()]
            state.weight, state.opt_state, count = step(state.weight, state.opt_state, *own)
            assert count == hvd.size()
            state.batch += 1
            state.commit()

    train(state)
    return sizes, np.concatenate(state.weight)


def test_the_survivors_of_a_killed_rank_go_on_and_take_another_in(tmp_path: Path) -> None:
    environment = {"HOROVOD_MIN_SIZE": "1", "HOROVOD_MAX_SIZE": "3", "HOROVOD_ELASTIC_SETTLE_SECONDS": "1"}
    victim = 0
    with World(3, "shm", environment, preloaded="preloaded_jax") as world:
        outcomes = world.outcomes(_train, victim, str(tmp_path / "lives"), before_replacing=[lambda: None])
    assert [outcome.text for outcome in outcomes] == [""] * 3
    for rank, outcome in enumerate(outcomes):
        sizes, weight = outcome.value
        assert sizes == ([3] if rank == victim else [3, 2, 3])
        np.testing.assert_allclose(weight, _alone(), rtol=1e-4)
