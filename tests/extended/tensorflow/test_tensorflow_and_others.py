"""TensorFlow beside PyTorch in one process, two jobs at once, and input pipelines whose workers are forked."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from worlds import World

from horovod.base.errors import EngineCode, code_of


def _both() -> list[float]:
    import tensorflow as tf
    import torch

    import horovod.tensorflow as tf_hvd
    import horovod.torch as torch_hvd

    rank = tf_hvd.rank()

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf_hvd.allreduce(x, op=tf_hvd.Sum, name="both")

    found = []
    for number in range(3):
        handle = torch_hvd.allreduce_async(torch.full([5], float(rank)), op=torch_hvd.Sum, name=f"torch.{number}")
        found.append(float(step(tf.fill([5], number + 1.0))[0]))
        found.append(float(torch_hvd.synchronize(handle)[0]))
    return found


def test_tensorflow_and_pytorch_in_one_process(tf_pair: World) -> None:
    assert tf_pair.run(_both) == [[2.0, 1.0, 4.0, 1.0, 6.0, 1.0]] * 2


def _steps(factor: float) -> list[float]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum, name="step")

    return [float(step(tf.fill([3], factor * (hvd.rank() + number)))[0]) for number in range(50)]


def test_two_jobs_of_one_coordinator_at_the_same_time(tf_pair: World) -> None:
    """Their operations have the same names; the ranks of both are on this host."""
    other = {"HOROVOD_COORDINATOR": tf_pair.coordinator_address, "HOROVOD_JOB": "other"}
    with World(2, "shm", other, preloaded="preloaded_tensorflow") as second, ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(tf_pair.run, _steps, 1.0), pool.submit(second.run, _steps, 100.0)
        assert one.result() == [[1.0 + 2 * number for number in range(50)]] * 2
        assert two.result() == [[100.0 + 200 * number for number in range(50)]] * 2


def _square(number: int) -> int:
    return number * number


def _forked() -> float:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    total = 0.0
    hvd.allreduce(tf.ones([4]))  # all threads are there
    with multiprocessing.get_context("fork").Pool(2) as workers:

        def numbers() -> Any:
            yield from workers.imap(_square, range(rank, 8, 2))

        dataset = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([], tf.int32)).prefetch(2)
        for number in dataset:
            total += float(hvd.allreduce(tf.cast(number, tf.float32), op=hvd.Sum))
    return total


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_input_pipelines(tf_pair: World) -> None:
    assert tf_pair.run(_forked) == [float(sum(number * number for number in range(8)))] * 2


def _in_a_forked_child() -> tuple[int, list[str]]:
    """What each collective says there."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rows = tf.ones([4, 2])
    hvd.allreduce(rows)
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(rows),
        lambda: hvd.grouped_allreduce([rows, rows]),
        lambda: hvd.allgather(rows),
        lambda: hvd.broadcast(rows, root_rank=0),
        lambda: hvd.alltoall(rows, splits=[2, 2]),
        lambda: hvd.reducescatter(rows),
        hvd.join,
    ]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends the child if it hangs
        told = []
        for call in calls:
            try:
                told.append(repr(call()))
            except BaseException as error:
                told.append(f"{type(error).__name__}: {error}")
        os.write(write, json.dumps(told).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    hvd.allreduce(rows)  # the rank itself goes on
    return os.getpid(), json.loads(answer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_whose_child_it_is(tf_pair: World) -> None:
    for rank, (pid, told) in enumerate(tf_pair.run(_in_a_forked_child)):
        assert len(told) == 7
        for sentence in told:
            assert code_of(sentence) is EngineCode.FORKED_CHILD, sentence
            assert f"process {pid}, rank {rank}, " in sentence
        assert all(sentence.startswith("FailedPreconditionError") for sentence in told[:-1])
