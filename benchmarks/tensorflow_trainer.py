"""A rank that trains with TensorFlow as benchmarks/tensorflow_training.py asks: with horovod, with TensorFlow's own
MultiWorkerMirroredStrategy, or plainly, by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client
from typing import Any

import numpy
import tensorflow as tf
import torch

from benchmarks.models import TrainingCase
from benchmarks.tensorflow_models import Twin, loss_of, make_batch
from benchmarks.trainer import Trainer, Training
from benchmarks.worker import serve


class TensorFlowTrainer(Trainer):
    """The harness's requests, in `Trainer`, with models and steps of TensorFlow."""

    def __init__(self, rank: int, size: int, barrier: Callable[[], None], strategy: Any = None) -> None:
        super().__init__(rank, size, barrier)
        self._strategy = strategy

    def _batch(self, case: TrainingCase, number: int, samples: int) -> tuple[Any, Any]:
        return make_batch(case, number, samples)

    def _training(self, case: TrainingCase, rate: float, how: str, dtype: torch.dtype | None = None) -> Training:
        import keras

        with self._strategy.scope() if how == "strategy" else contextlib.nullcontext():
            model = Twin(case)
            optimizer = keras.optimizers.SGD(rate, momentum=0.9)
            optimizer.build(model.variables)
        share = 1.0 / self._size if how == "strategy" else 1.0  # its optimizer sums, where horovod averages

        def step(inputs: Any, labels: Any) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(model(inputs), labels) * share
            if how == "horovod":
                import horovod.tensorflow as hvd

                tape = hvd.DistributedGradientTape(tape, sparse_as_dense=True)
            gradients = tape.gradient(loss, model.variables)
            # An embedding's has rows alone; made dense for all, as PyTorch's is.
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            optimizer.apply_gradients(zip(dense, model.variables, strict=True))

        def together(inputs: Any, labels: Any) -> None:
            self._strategy.run(step, args=(inputs, labels))

        return Training(model, tf.function(together if how == "strategy" else step, autograph=False))

    def _parameters(self, model: Any) -> torch.Tensor:
        return torch.from_numpy(numpy.concatenate([variable.numpy().ravel() for variable in model.variables]))

    def _of_all_ranks(self, digest: str, how: str) -> list[Any]:
        if how == "plain":
            return [digest]
        import horovod.tensorflow as hvd

        return list(hvd.allgather_object(digest, name="digest"))


def _strategy(rank: int) -> Any:
    """To be made before TensorFlow does anything else; waits for the other ranks."""
    workers = os.environ["BENCHMARK_CLUSTER"].split(",")
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    return tf.distribute.MultiWorkerMirroredStrategy()


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    torch.set_num_threads(1)
    connection = Client(os.environ["BENCHMARK_SOCKET"], "AF_UNIX")
    rank, size = int(os.environ["BENCHMARK_RANK"]), int(os.environ["BENCHMARK_SIZE"])
    strategy, barrier = None, lambda: None
    version = f"TensorFlow {tf.__version__}"
    if os.environ["BENCHMARK_LIBRARIES"]:
        import horovod
        import horovod.tensorflow as hvd
        from horovod.common.ops import collectives
        from horovod.common.process_sets import global_process_set

        strategy = _strategy(rank)
        hvd.init()
        barrier = partial(collectives.barrier, global_process_set)
        version += f", horovod {horovod.__version__}"
    connection.send_bytes(json.dumps({"rank": rank, "pid": os.getpid(), "version": version}).encode())
    serve(connection, TensorFlowTrainer(rank, size, barrier, strategy))
    connection.close()
    if strategy is not None:
        hvd.shutdown()


if __name__ == "__main__":
    main()
