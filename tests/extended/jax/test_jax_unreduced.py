"""Updates of Optax that nothing reduces are told once; right loops are told nothing."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from unreduced_warnings import told
from worlds import World

STEPS = 110


def _loop(case: str) -> list[str]:
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd
    from horovod.jax import plain_updates

    for steps in (plain_updates._of_places, plain_updates._codes):
        steps.clear()  # of the same lines in other tests
    params = {"w": jnp.ones([64, 64]), "b": jnp.ones(64)}
    loss_of = lambda params: jnp.sum(params["w"] @ params["b"])  # noqa: E731

    def work() -> None:
        optimizer = optax.adam(1e-9)
        if case == "distributed":
            optimizer = hvd.DistributedOptimizer(optimizer)
        if case == "another is distributed":
            hvd.DistributedOptimizer(optimizer)

        def apply(gradients: Any, params: Any, state: Any) -> Any:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        def step(params: Any, state: Any) -> Any:
            take = hvd.grad if case == "hvd.grad" else jax.grad
            gradients = take(loss_of)(params)
            if case == "by hand in a function":
                gradients = hvd.grouped_allreduce([*jax.tree.leaves(gradients)], name="gradients")
                gradients = jax.tree.unflatten(jax.tree.structure(params), gradients)
            return apply(gradients, params, state)

        class Trainer:
            def step(self, params: Any, state: Any) -> Any:
                return step(params, state)

        take, applied = jax.jit(jax.grad(loss_of)), jax.jit(apply)
        evaluate = jax.jit(loss_of)

        def by_hand(params: Any, state: Any) -> Any:
            gradients = take(params)
            gradients = {name: hvd.allreduce(one, name=name) for name, one in gradients.items()}
            return applied(gradients, params, state)

        @jax.jit
        def epoch(params: Any, state: Any) -> Any:
            take_step = lambda carried, _: (step(*carried), None)  # noqa: E731
            scan = lambda _, carried: jax.lax.scan(take_step, carried, length=5)[0]  # noqa: E731
            return jax.lax.fori_loop(0, 2, scan, (params, state))

        run: Any = jax.jit(step, donate_argnums=(0, 1))
        if case == "by hand between functions":
            run = by_hand
        elif case == "two functions":
            run = lambda params, state: applied(take(params), params, state)  # noqa: E731
        elif case == "a method":
            run = jax.jit(Trainer().step)
        elif case == "eagerly":
            run = step
        elif "epochs" in case:
            run = epoch
        given, state = jax.tree.map(jnp.copy, params), optimizer.init(params)
        if case == "evaluated":
            given, state = run(given, state)
        calls = {"few steps": 90, "epochs": STEPS // 10 + 3, "few epochs": 10, "epochs by hand": STEPS // 10 + 3}
        for _ in range(calls.get(case, STEPS)):
            if case == "evaluated":
                evaluate(given)
                continue
            given, state = run(given, state)
            if case == "epochs by hand":
                given = hvd.allreduce(given, name="weights")
            if case == "a loss now and then":
                hvd.allreduce(evaluate(given), name="loss")

    return told(work)


FORGOTTEN = ["a function", "two functions", "a method", "eagerly", "a loss now and then", "epochs"]
RIGHT = [
    *("distributed", "another is distributed", "hvd.grad", "by hand in a function", "by hand between functions"),
    *("evaluated", "few steps", "few epochs", "epochs by hand"),
]


def _all(cases: list[str]) -> dict[str, list[str]]:
    import jax

    with jax.debug_nans(False):
        pass  # leaves a hook of this thread, which is none
    return {case: _loop(case) for case in cases}


def test_a_plain_optimizer_is_told_once_on_rank_0(jax_pair: World) -> None:
    on_0, on_1 = jax_pair.run(_all, FORGOTTEN)
    for case in FORGOTTEN:
        assert len(on_0[case]) == 1, case
        assert on_0[case][0].startswith(__file__), "the warning must point to the script"
        assert "optax.apply_updates has taken" in on_0[case][0]
        assert "hvd.DistributedOptimizer(optimizer)" in on_0[case][0]
        assert on_1[case] == []


def test_right_loops_are_told_nothing(jax_pair: World) -> None:
    assert jax_pair.run(_all, RIGHT) == [{case: [] for case in RIGHT}] * 2


def _hooks_after(case: str) -> list[bool]:
    import optax
    from jax._src import api

    _loop(case)
    assert pickle.loads(pickle.dumps(optax.apply_updates)) is optax.apply_updates
    return [hasattr(optax.apply_updates, "_hvd_shows_steps"), api._post_hook_state.value is not None]


def test_steps_are_not_counted_for_ever(jax_pair: World) -> None:
    assert jax_pair.run(_hooks_after, "few steps") == [[True, True]] * 2
    for case in ("a function", "by hand between functions"):
        assert jax_pair.run(_hooks_after, case) == [[False, False]] * 2


def _looking_for_nans() -> list[bool]:
    import jax
    from jax._src import api

    jax.config.update("jax_debug_nans", True)
    mine = api._post_hook_state.get_global()
    try:
        _loop("few steps")
        return [mine is not None and api._post_hook_state.get_global() is mine]
    finally:
        jax.config.update("jax_debug_nans", False)


def test_jax_may_look_for_nans(jax_pair: World) -> None:
    assert jax_pair.run(_looking_for_nans) == [[True]] * 2


def _imported_by_name() -> list[str]:
    """As if the script had written `from optax import apply_updates` before hvd.init()."""
    import sys

    import jax.numpy as jnp
    import optax

    from horovod.common import unreduced

    unreduced.watch.over()  # of other tests, which may not have taken enough steps for that
    script = sys.modules[__name__]
    script.apply_updates = optax.apply_updates  # type: ignore[attr-defined]

    def work() -> None:
        for _ in range(STEPS):
            script.apply_updates(jnp.ones(64), jnp.ones(64))

    try:
        return [*told(work), *(["not given back"] if hasattr(script.apply_updates, "_hvd_shows_steps") else [])]
    finally:
        del script.apply_updates  # type: ignore[attr-defined]


def test_a_function_that_was_imported_by_its_name(jax_pair: World) -> None:
    on_0, on_1 = jax_pair.run(_imported_by_name)
    assert len(on_0) == 1
    assert "optax.apply_updates has taken" in on_0[0]
    assert on_1 == []


def _with_flax() -> list[str]:
    nnx = pytest.importorskip("flax.nnx")
    import jax.numpy as jnp
    import optax

    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: jnp.sum(model(jnp.ones([2, 64]))))(model))

    return told(lambda: [step(model, optimizer) for _ in range(STEPS)])


def test_flax(jax_pair: World) -> None:
    on_0, on_1 = jax_pair.run(_with_flax)
    assert (len(on_0), on_1) == (1, [])


def _alone() -> list[bool]:
    return [bool(_loop("a function")), *_hooks_after("eagerly")]


def test_a_rank_that_is_alone_runs_optax_as_it_is() -> None:
    with World(1, "shm", preloaded="preloaded_jax") as world:
        assert world.run(_alone) == [[False, False, False]]
