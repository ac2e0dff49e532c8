"""Ranks that train different weights, or mean different optimizers, in what JAX compiles."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from error_codes import ends_with
from worlds import Keeper, World

from horovod.base.errors import TrainingCode

LONG = 20  # steps, more than those in which words are exchanged


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """The warnings of different weights, each behind the file that it points to."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    code = TrainingCode.DIFFERENT_WEIGHTS.value
    found += [f"{one.filename}: {one.message}" for one in caught if code in str(one.message)]


def _params(differ: bool = False, broadcast: bool = False) -> dict[str, Any]:
    import jax.numpy as jnp

    import horovod.jax as hvd

    last = jnp.ones((3, 2)) + (hvd.rank() if differ else 0)
    params = {"first": {"bias": jnp.zeros(0), "kernel": jnp.full((4, 3), 0.5, "bfloat16")}, "last": last}
    return hvd.broadcast_parameters(params) if broadcast else params


def _loss(params: Any) -> Any:
    return (params["first"]["kernel"].astype("float32") @ params["last"]).sum() ** 2


def _steps(
    params: Any,
    state: Any,
    optimizer: Any,
    steps: int = 4,
    loss: Callable[[Any], Any] = _loss,
    scanned: bool = False,
    gives_params: bool = True,
) -> Any:
    """What is left after so many compiled steps."""
    import jax
    import optax

    def step(carried: Any, _: Any) -> Any:
        params, state = carried
        gradients = jax.grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params if gives_params else None)
        return (optax.apply_updates(params, updates), state), None

    if scanned:
        run = jax.jit(lambda *carried: jax.lax.scan(step, carried, length=steps)[0], donate_argnums=(0, 1))
        params, state = run(params, state)
    else:
        run = jax.jit(lambda *carried: step(carried, None)[0], donate_argnums=(0, 1))
        for _ in range(steps):
            params, state = run(params, state)
    return jax.block_until_ready((params, state))


def _different_weights() -> dict[str, list[str]]:
    import optax

    import horovod.jax as hvd

    def told(
        change: str = "", passes: int = 1, groups: int | None = None, op: int = hvd.Average, **options: Any
    ) -> list[str]:
        hvd.join()  # so that steps count anew
        optimizer = hvd.DistributedOptimizer(optax.adam(0.1), backward_passes_per_step=passes, groups=groups, op=op)
        params = _params(change in ("parameter", "broadcast"), change == "broadcast")
        state = optimizer.init(params)
        if change == "state":
            inner = state if passes == 1 else state.inner
            inner[0].mu["last"] = inner[0].mu["last"] + hvd.rank()
        with _warnings() as found:
            _steps(params, state, optimizer, **options)
        return found

    return {
        "parameter": told("parameter"),
        "state": told("state"),
        "scanned": told("parameter", scanned=True),
        "passes": told("parameter", passes=2, groups=2, steps=6),
        "adasum": told("parameter", op=hvd.Adasum),
        "state alone": told("state", gives_params=False),
        "quiet: broadcast": told("broadcast", steps=LONG, groups=2),
        "quiet: equal": told(scanned=True, steps=LONG),
        "quiet: parameters that are not given": told("parameter", gives_params=False, loss=lambda one: 0 * _loss(one)),
        "quiet: own state with Adasum": told("state", op=hvd.Adasum, loss=lambda one: 0 * _loss(one)),
    }


def test_ranks_that_train_different_weights_are_told_so(jax_pair: World) -> None:
    on_0, on_1 = jax_pair.run(_different_weights)
    for case, told in on_0.items():
        assert len(told) == (0 if case.startswith("quiet") else 1), (case, told)
        assert all(one.startswith(__file__) for one in told), "the warning must point to the script"
    assert not any(on_1.values())
    for case in ("parameter", "scanned", "passes", "adasum"):
        for part in ("step 2", "parameter ['last']", "rank 1", "hvd.broadcast_parameters("):
            assert part in on_0[case][0], case
    assert "'value' of state [0].mu['last']" in on_0["state"][0]
    assert "'value' of state [0].mu['last']" in on_0["state alone"][0]


def _of_functions() -> dict[str, list[str]]:
    """Loops with hvd.grad, which a script may make anew in each step, and a plain optimizer."""
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    def told(key: str, differ: bool, compiled: bool, anew: bool = False, steps: int = LONG) -> list[str]:
        params = {key: _params(differ)}  # a model by its keys

        def loss(params: Any, task: Any) -> Any:
            return _loss(params[key]) * task

        def other_loss(task: Any, params: Any) -> Any:
            return _loss(params[key]) + task

        def make(number: int) -> Any:
            # Ranks draw other tasks, of one model.
            if number % 3 == hvd.rank():
                gradients = hvd.grad(other_loss, argnums=1)
                return lambda params: gradients(jnp.array(float(hvd.rank())), params)
            both = hvd.value_and_grad(loss)
            return lambda params: both(params, jnp.array(1.0 + hvd.rank()))[1]

        def step(params: Any, gradients: Any) -> Any:
            return jax.tree.map(
                lambda one, gradient: one - (1e-3 * gradient).astype(one.dtype), params, gradients(params)
            )

        fixed = [make(0), make(1), make(2)]
        compiled_steps = [jax.jit(lambda params, one=one: step(params, one)) for one in fixed]
        with _warnings() as found:
            for number in range(steps):
                if compiled:
                    params = jax.block_until_ready(compiled_steps[number % 3](params))
                else:
                    params = step(params, make(number) if anew else fixed[number % 3])
        return found

    return {
        "eager": told("a", True, False),
        "compiled": told("b", True, True),
        "made anew": told("c", True, False, True),
        "quiet: eager": told("d", False, False),
        "quiet: compiled": told("e", False, True),
        "quiet: made anew": told("f", False, False, True),
    }


def test_functions_of_different_weights_are_told_so(jax_pair: World) -> None:
    on_0, on_1 = jax_pair.run(_of_functions)
    for case, told in on_0.items():
        assert len(told) == (0 if case.startswith("quiet") else 1), (case, told)
        for part in ("step 2", "['last']", "rank 1", "hvd.broadcast_parameters("):
            assert all(part in one for one in told), case
    assert not any(on_1.values())


def _in_process_sets() -> list[str]:
    import optax

    import horovod.jax as hvd

    outer, inner = hvd.add_process_set([0, 2]), hvd.add_process_set([1])
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), process_set=inner if hvd.rank() == 1 else outer)
    params = _params(differ=True)
    with _warnings() as found:
        _steps(params, optimizer.init(params), optimizer, LONG)
    return found


def test_the_ranks_of_a_process_set_are_compared() -> None:
    with Keeper(3, "shm", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, preloaded="preloaded_jax") as keeper:
        on_0, *others = keeper.get().run(_in_process_sets)
    assert len(on_0) == 1
    assert "rank 2 differs from that of rank 0" in on_0[0]
    assert not any(others)


# -- settings ----------------------------------------------------------------------------------------------------------
EVERY = 20  # steps


@pytest.fixture(scope="module")
def strict_world() -> Iterator[World]:
    settings = {"HOROVOD_DIFFERENT_WEIGHTS": "error", "HOROVOD_COMPARE_WEIGHTS_STEPS": str(EVERY)}
    with Keeper(2, "shm", settings, preloaded="preloaded_jax") as keeper:
        yield keeper.get()


def _errors(differs_after: int) -> tuple[int, str]:
    """The step in which there is one, and its text."""
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd
    from horovod.jax.waiting import end_compiled_calls

    hvd.join()
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1, momentum=0.9))
    params = {"w": jnp.ones(3)}
    state = optimizer.init(params)
    step = jax.jit(lambda params, state: optimizer.update(params, state, params))
    for number in range(1, 2 * EVERY + 1):
        if number == differs_after + 1:
            params["w"] = params["w"] + hvd.rank()
        try:
            _, state = jax.block_until_ready(step(params, state))
        except jax.errors.JaxRuntimeError as error:
            end_compiled_calls()
            return number, str(error)
    return 0, ""


@pytest.mark.parametrize(("differs_after", "step"), [(0, 2), (17, EVERY), (EVERY, 2 * EVERY)])
def test_an_error_on_all_ranks_and_repeated_comparisons(strict_world: World, differs_after: int, step: int) -> None:
    for found, text in strict_world.run(_errors, differs_after):
        assert found == step
        sentence = text.splitlines()[0]
        assert re.search(
            ends_with(TrainingCode.DIFFERENT_WEIGHTS, f"step {step}", "parameter ['w']", "rank 1"), sentence
        )
        assert sentence.startswith("INVALID_ARGUMENT"), "an elastic job would begin another world"


# -- worlds ------------------------------------------------------------------------------------------------------------
def _in_each_world() -> list[int]:
    """How often this rank was told in each; the function is compiled once."""
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd

    optimizer = hvd.DistributedOptimizer(optax.sgd(0.0))
    traced = []

    @jax.jit
    def step(params: Any) -> Any:
        traced.append(1)
        return optax.apply_updates(params, optimizer.update(params, optimizer.init(params), params)[0])

    told = []
    for differ in (0.0, 1.0):
        params = {"in_each_world": jnp.ones(3) + differ * hvd.rank()}
        with _warnings() as found:
            for _ in range(LONG):
                params = step(params)
            jax.block_until_ready(params)
        told.append(len(found))
        if not differ:
            hvd.shutdown()
            hvd.init()
    assert len(traced) == 1
    return told


def test_each_world_compares(jax_pair: World) -> None:
    assert jax_pair.run(_in_each_world) == [[0, 1], [0, 0]]
