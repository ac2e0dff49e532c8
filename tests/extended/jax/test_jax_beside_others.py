"""JAX's own world of processes, PyTorch and Equinox beside Horovod in the same processes; another job beside all."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from worlds import World

from benchmarks.ports import free_ports


def _with_jax_distributed(address: str) -> None:
    """Horovod's calls and JAX's own, over all processes, in turns. JAX's must be told before anything is computed."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import horovod.jax as hvd

    hvd.init()
    rank = hvd.rank()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, hvd.size(), rank)
    assert (jax.device_count(), jax.local_device_count()) == (2, 1)
    mesh, ours = Mesh(jax.devices(), ("ranks",)), PartitionSpec("ranks")
    theirs = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "ranks"), mesh=mesh, in_specs=ours, out_specs=ours))
    joined = jax.make_array_from_process_local_data(NamedSharding(mesh, ours), np.full(3, 1.0 + rank))
    compiled = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum) * 2)
    mine = jnp.full(3, 1.0 + rank)
    for _ in range(3):
        assert compiled(mine).tolist() == [6] * 3
        assert theirs(joined).addressable_data(0).tolist() == [3] * 3
        assert hvd.allgather(mine[:1]).tolist() == [1, 2]
    hvd.barrier()


def _with_torch() -> None:
    """Calls without a name meet by their order, whatever framework they come from."""
    import jax
    import jax.numpy as jnp
    import torch

    import horovod.jax as hvd
    import horovod.torch

    compiled = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    for turn in range(3):
        handle = horovod.torch.allreduce_async(torch.full([4], float(turn)), op=hvd.Sum)
        assert compiled(jnp.full(5, turn)).tolist() == [2 * turn] * 5
        assert horovod.torch.synchronize(handle).tolist() == [2 * turn] * 4
        assert hvd.allreduce(jnp.ones(2), op=hvd.Sum).tolist() == [2, 2]


def _with_equinox() -> None:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd

    rank = hvd.rank()
    model = hvd.broadcast_parameters(
        eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(rank))
    )  # it has functions among its leaves
    optimizer = hvd.DistributedOptimizer(optax.adam(0.1))
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, rows):
        gradients = eqx.filter_grad(lambda one: (jax.vmap(one)(rows) ** 2).mean())(model)
        updates, state = optimizer.update(gradients, state, model)
        return eqx.apply_updates(model, updates), state

    model, state = step(model, state, jnp.ones((4, 3)) * (1 + rank))
    np.testing.assert_array_equal(*hvd.allgather_object(np.asarray(model.layers[0].weight)))


def test_the_world_of_jax_distributed_and_torch_go_on_beside_ours() -> None:
    (port,) = free_ports(1)
    with World(2, "shm", preloaded="preloaded_jax") as world:
        world.run(_with_jax_distributed, f"127.0.0.1:{port}")
        world.run(_with_torch)
        with World(2, "shm", preloaded="preloaded_jax") as other_job, ThreadPoolExecutor() as together:
            jobs = [together.submit(one.run, _train, number) for number, one in enumerate((world, other_job), 1)]
            assert [job.result() for job in jobs] == [[[3 * number] * 2] * 2 for number in (1, 2)]
        world.run(_end)


def _train(number: int) -> list[float]:
    """Weights after steps whose calls have the same names in both jobs."""
    import jax
    import jax.numpy as jnp
    import optax

    import horovod.jax as hvd

    optimizer = hvd.DistributedOptimizer(optax.sgd(0.01), op=hvd.Sum)
    weights = jnp.zeros(2)
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: jax.Array, state: Any) -> Any:
        updates, state = optimizer.update(jnp.full(2, -float(number * (1 + hvd.rank()))), state)
        return hvd.allreduce(weights + updates, name="weights"), state

    for _ in range(100):
        weights, state = step(weights, state)
    return [round(one, 3) for one in weights.tolist()]


def test_an_equinox_model(jax_pair: World) -> None:
    if importlib.util.find_spec("equinox") is None:
        pytest.skip("equinox is not installed")
    jax_pair.run(_with_equinox)


def _end() -> None:
    import jax

    jax.distributed.shutdown()
