"""Ctrl-C, and other signals, while a script waits for other ranks."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from worlds import World


@contextmanager
def _signal_while_waiting(signum: int, has_begun: Callable[[], bool] | None = None) -> Iterator[None]:
    """A signal comes to this thread once what it does in the block has made it sleep.

    has_begun: whether it has begun to wait; if not given, that an operation was submitted.
    """
    from horovod.worker.runtime.context import current

    engine, this = current().engine, threading.get_ident()
    state = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
    before = engine.counters()["submitted"]
    begun = has_begun or (lambda: bool(engine.counters()["submitted"] > before))

    def send() -> None:
        # Nothing announces that a call has begun and that its thread sleeps until the peer comes.
        while not begun() or state.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        signal.pthread_kill(this, signum)

    sender = threading.Thread(target=send)
    sender.start()
    yield
    sender.join()


def _with_a_peer_that_comes_after(first: Callable[[], object], second: Callable[[], object]) -> None:
    """Rank 0 runs `first` before rank 1 begins with `second`."""
    import horovod.tensorflow as hvd

    if hvd.rank() == 0:
        first()
        hvd.broadcast_object("go", 0)
    else:
        hvd.broadcast_object(None, 0)
        second()


def _eager() -> list[float]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    x = tf.Variable(tf.ones([1 << 16]))

    def reduce() -> object:
        return hvd.allreduce(x * 2.0, name="interrupted")

    def wait() -> None:
        with _signal_while_waiting(signal.SIGINT), pytest.raises(KeyboardInterrupt):
            reduce()

    _with_a_peer_that_comes_after(wait, reduce)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(hvd.allreduce(x, name="forward"))

    def wait_in_the_backward_pass() -> None:
        with _signal_while_waiting(signal.SIGINT), pytest.raises(KeyboardInterrupt):
            tape.gradient(loss, x)

    _with_a_peer_that_comes_after(wait_in_the_backward_pass, lambda: tape.gradient(loss, x))
    return [float(one) for one in hvd.allgather(tf.ones(1), name="after")]


def test_ctrl_c_ends_the_wait_of_an_eager_operation(tf_pair: World) -> None:
    assert tf_pair.run(_eager) == [[1.0, 1.0], [1.0, 1.0]]


def _handlers() -> list[float]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    ended = SystemExit(143)

    def end(*_: object) -> None:
        raise ended

    def reduce() -> object:
        return hvd.allreduce(tf.ones([4]), name="ended")

    def wait() -> None:
        former = signal.signal(signal.SIGTERM, end)
        with _signal_while_waiting(signal.SIGTERM), pytest.raises(SystemExit) as found:
            reduce()
        signal.signal(signal.SIGTERM, former)
        assert found.value is ended

    _with_a_peer_that_comes_after(wait, reduce)

    seen = threading.Event()
    results: list[float] = []
    if hvd.rank() == 0:
        former = signal.signal(signal.SIGUSR2, lambda *_: seen.set())
        told = threading.Thread(target=lambda: seen.wait(30) and hvd.broadcast_object("go", 0, name="seen"))
        told.start()
        with _signal_while_waiting(signal.SIGUSR2):
            results = hvd.allreduce(tf.constant([3.0]), name="waits.on").numpy().tolist()
        told.join()
        signal.signal(signal.SIGUSR2, former)
    else:
        hvd.broadcast_object(None, 0, name="seen")
        results = hvd.allreduce(tf.constant([5.0]), name="waits.on").numpy().tolist()
    return results


def test_handlers_run_while_an_operation_waits_and_only_what_they_raise_ends_it(tf_pair: World) -> None:
    assert tf_pair.run(_handlers) == [[4.0], [4.0]]


def _answers() -> int:
    """A signal that comes while the library asks Python: the operation has its answer, the script the exception."""
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow import library

    answers = library._ANSWERS
    signals = iter([signal.SIGINT])

    def interrupted(process_set_id: int, call: int) -> int:
        for signum in signals:
            signal.raise_signal(signum)
        return answers[0](process_set_id, call)

    @tf.function
    def size() -> tf.Tensor:
        return hvd.size_op()

    found: list[int] = []
    library._ANSWERS = (interrupted, *answers[1:])
    try:
        with pytest.raises(KeyboardInterrupt):
            found.append(int(hvd.size_op()))
        signals = iter([signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            found.extend(int(size()) for _ in range(1000))
    finally:
        library._ANSWERS = answers
    assert not {one for one in found if one != 2}
    return int(size())


def test_ctrl_c_that_comes_while_the_library_asks_python_is_not_lost(tf_pair: World) -> None:
    assert tf_pair.run(_answers) == [2, 2]


def _joins(interrupted: Path) -> int:
    import horovod.tensorflow as hvd

    if hvd.rank() == 0:
        this = threading.get_ident()
        in_join = lambda: sys._current_frames()[this].f_code.co_name == "join"  # noqa: E731
        with _signal_while_waiting(signal.SIGINT, in_join), pytest.raises(KeyboardInterrupt):
            hvd.join()
        interrupted.touch()
    else:
        while not interrupted.exists():  # a rank that has joined can tell it in no other way
            time.sleep(0.01)
    return int(hvd.join())


def test_ctrl_c_ends_the_wait_of_a_join(tf_pair: World, tmp_path: Path) -> None:
    first, second = tf_pair.run(_joins, tmp_path / "interrupted")
    assert first == second
    assert all(found == [2.0] for found in tf_pair.run(_sum))


def _sum() -> list[float]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    found: list[float] = hvd.allreduce(tf.ones([1]), op=hvd.Sum).numpy().tolist()
    return found


def _keras_on_torch() -> list[float]:
    import horovod.keras as hvd

    def reduce() -> object:
        return hvd.allreduce([1.0], name="interrupted")

    def wait() -> None:
        with _signal_while_waiting(signal.SIGINT), pytest.raises(KeyboardInterrupt):
            reduce()

    if hvd.rank() == 0:
        wait()
        hvd.broadcast([1.0], 0, name="go")
    else:
        hvd.broadcast([1.0], 0, name="go")
        reduce()
    return [float(one) for one in hvd.allgather([1.0], name="after")]


def test_ctrl_c_ends_the_wait_of_keras_on_pytorch(torch_pair: World) -> None:
    assert torch_pair.run(_keras_on_torch) == [[1.0, 1.0], [1.0, 1.0]]
