"""A rank that trains with JAX as benchmarks/jax_training.py asks: with horovod, with JAX's own collectives in
jax.shard_map, or plainly, by itself. A step ends when its results are there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client
from typing import Any

import jax
import numpy
import optax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.jax_models import Twin, loss_of, make_batch
from benchmarks.models import TrainingCase
from benchmarks.trainer import Trainer, Training
from benchmarks.worker import serve

_AXIS = "ranks"
_SAME, _OWN = PartitionSpec(), PartitionSpec(_AXIS)  # the same on all ranks; each rank has rows of its own


class _Trained:
    """What a step changes."""

    def __init__(self, params: list[jax.Array], optimizer: Any) -> None:
        self.params = params
        self.state = optimizer.init(params)


class JaxTrainer(Trainer):
    """The harness's requests, in `Trainer`, with models and steps of JAX."""

    def __init__(self, rank: int, size: int, barrier: Callable[[], None]) -> None:
        super().__init__(rank, size, barrier)

    def _batch(self, case: TrainingCase, number: int, samples: int) -> tuple[Any, Any]:
        return make_batch(case, number, samples)

    def _training(self, case: TrainingCase, rate: float, how: str, dtype: torch.dtype | None = None) -> Training:
        twin = Twin(case)
        optimizer = optax.sgd(rate, momentum=0.9)
        params = twin.params
        placed: Callable[[Any], Any] = jax.numpy.asarray
        if how == "horovod":
            import horovod.jax as hvd

            optimizer = hvd.DistributedOptimizer(optimizer)
        elif how == "pmean":
            mesh = Mesh(jax.devices(), (_AXIS,))
            params = jax.device_put(params, NamedSharding(mesh, _SAME))
            placed = partial(jax.make_array_from_process_local_data, NamedSharding(mesh, _OWN))

        def step(params: Any, state: Any, inputs: Any, labels: Any) -> Any:
            gradients = jax.grad(lambda one: loss_of(twin(one, inputs), labels))(params)
            if how == "pmean":
                gradients = jax.lax.pmean(gradients, _AXIS)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        if how == "pmean":
            step = jax.shard_map(
                step, mesh=mesh, in_specs=(_SAME, _SAME, _OWN, _OWN), out_specs=(_SAME, _SAME), check_vma=False
            )
        compiled = jax.jit(step, donate_argnums=(0, 1))
        trained = _Trained(params, optimizer)

        def call(inputs: Any, labels: Any) -> None:
            found = compiled(trained.params, trained.state, placed(inputs), placed(labels))
            trained.params, trained.state = jax.block_until_ready(found)

        return Training(trained, call)

    def _parameters(self, model: Any) -> torch.Tensor:
        mine = [numpy.asarray(one.addressable_data(0)).ravel() for one in model.params]
        return torch.from_numpy(numpy.concatenate(mine))

    def _of_all_ranks(self, digest: str, how: str) -> list[Any]:
        if how == "plain":
            return [digest]
        import horovod.jax as hvd

        return list(hvd.allgather_object(digest, name="digest"))


def main() -> None:
    torch.set_num_threads(1)
    connection = Client(os.environ["BENCHMARK_SOCKET"], "AF_UNIX")
    rank, size = int(os.environ["BENCHMARK_RANK"]), int(os.environ["BENCHMARK_SIZE"])
    barrier: Callable[[], None] = lambda: None  # noqa: E731
    version = f"JAX {jax.__version__}"
    together = bool(os.environ["BENCHMARK_LIBRARIES"])
    if together:
        import horovod
        import horovod.jax as hvd

        jax.config.update("jax_cpu_collectives_implementation", os.environ["BENCHMARK_PEER"])
        jax.distributed.initialize(os.environ["BENCHMARK_CLUSTER"], size, rank)
        hvd.init()
        barrier = hvd.barrier
        version += f" over {os.environ['BENCHMARK_PEER']}, horovod {horovod.__version__}"
    connection.send_bytes(json.dumps({"rank": rank, "pid": os.getpid(), "version": version}).encode())
    serve(connection, JaxTrainer(rank, size, barrier))
    connection.close()
    if together:
        hvd.shutdown()
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
