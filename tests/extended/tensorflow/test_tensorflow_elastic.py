"""Training with TensorFlow and Keras goes on after a rank was killed, replaced, added or told to leave."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import World

BATCHES = 8
ROWS = 12  # of a batch; 1 to 3 ranks share them evenly
STEPS = 4  # of an epoch
KILLED_AT = 1
RATE = 0.02  # of one rank, where it follows the size
WAITS_AT = 2  # for the world to have its size again, where it grows


def _train(victim: int | None, fifo: str, mark: str) -> tuple[int, list[float], list[str]]:
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.common.exceptions import HorovodInternalError

    hvd.init()
    rank = hvd.rank()
    weight = tf.Variable([0.0, 0.0])
    state = hvd.elastic.TensorFlowState([weight], batch=0)
    causes: list[str] = []
    join_again = hvd.elastic.join_again

    def tell_and_join() -> None:
        Path(fifo).write_text("x")
        join_again()

    hvd.elastic.join_again = tell_and_join

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum)

    @hvd.elastic.run
    def train(state: Any) -> int:
        try:
            while state.batch < BATCHES:
                if state.batch == 4 and rank == victim and not Path(mark).exists():
                    Path(mark).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                weight.assign_add(step(tf.fill([2], state.batch + 1.0)))
                state.batch += 1
                if state.batch % 2 == 0:
                    state.commit()
        except tf.errors.UnknownError as error:
            causes.append(type(error).__name__)
            raise
        except HorovodInternalError as error:
            causes.append(type(error).__name__)
            raise
        return int(state.batch)

    return train(state), weight.numpy().tolist(), causes


def test_a_killed_rank_is_replaced_and_weights_are_as_if_nothing_had_been(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)

    def wait() -> None:
        assert select.select([descriptor], [], [], 60)[0], "no survivor joined again"
        os.read(descriptor, 1)

    try:
        with World(2, "shm", preloaded="preloaded_tensorflow") as world:
            outcomes = world.outcomes(_train, 1, str(path), str(tmp_path / "mark"), before_replacing=[wait])
    finally:
        os.close(descriptor)
    assert [outcome.text for outcome in outcomes] == ["", ""]
    total = 2.0 * sum(range(1, BATCHES + 1))
    assert [outcome.value[:2] for outcome in outcomes] == [(BATCHES, [total, total])] * 2
    assert outcomes[0].value[2] in (["UnknownError"], ["HorovodInternalError"])  # the latter in state.commit()


def _other_errors() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    state = hvd.elastic.TensorFlowState([tf.Variable(1.0)])

    @hvd.elastic.run
    def train(state: Any) -> None:
        raise tf.errors.UnknownError(None, None, "a disk is full")

    with pytest.raises(tf.errors.UnknownError, match="a disk is full"):
        train(state)


def test_other_unknown_errors_are_raised(tf_pair: World) -> None:
    tf_pair.run(_other_errors)


# -- worlds that shrink and grow ---------------------------------------------------------------------------------------
class _Incident:
    """In step KILLED_AT the victim dies, the first time it comes there, or gets SIGTERM. In WAITS_AT the others wait
    for its successor, or until it has left.

    Call it with the state before each step. lives: a file for the victim to remember that it has been there.
    """

    def __init__(self, victim: int, grows_to: int, lives: str, signum: int) -> None:
        self._grows_to = grows_to
        self._signum = signum
        self._first_size = 0
        self._dies = int(os.environ["HOROVOD_RANK"]) == victim and not Path(lives).exists()
        self._lives = lives

    def __call__(self, state: Any) -> None:
        from horovod.common.basics import size

        if state.batch == KILLED_AT and self._dies:
            Path(self._lives).touch()
            os.kill(os.getpid(), self._signum)
        self._first_size = self._first_size or size()
        waits_for_leaving = self._signum == signal.SIGTERM
        while state.batch == WAITS_AT and (
            size() == self._first_size if waits_for_leaving else size() < self._grows_to
        ):
            time.sleep(0.01)  # training takes its time meanwhile
            state.commit()


def _rows() -> tuple[Any, Any]:
    """The rows of each step and what they should give."""
    rows = np.random.default_rng(5).normal(size=[ROWS, 3]).astype(np.float32)
    return rows, rows @ np.array([[1.0], [-2.0], [0.5]], np.float32)


def _alone(steps: int) -> Any:
    """The weights after so many steps of one process."""
    rows, targets = _rows()
    weight, velocity = np.zeros([3, 1]), np.zeros([3, 1])
    for _ in range(steps):
        velocity = 0.9 * velocity - 0.1 * 2 / ROWS * rows.T @ (rows @ weight - targets)
        weight = weight + velocity
    return weight


def _share(rows: Any) -> Any:
    import horovod.tensorflow as hvd

    return np.split(rows, hvd.size())[hvd.rank()]


def _train_variables(victim: int, grows_to: int, lives: str, signum: int = signal.SIGKILL) -> tuple[list[int], Any]:
    """The size of each world, and the weights."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    incident = _Incident(victim, grows_to, lives, signum)
    hvd.init()
    weight, velocity = (tf.Variable(np.full([3, 1], float(hvd.rank()), np.float32)) for _ in range(2))
    state = hvd.elastic.TensorFlowState([weight, velocity], batch=0)
    if hvd.rank() == 0:
        weight.assign(tf.zeros([3, 1]))
    sizes = [hvd.size()]
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])

    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])])
    def step(rows: tf.Tensor, targets: tf.Tensor) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean((rows @ weight - targets) ** 2)
        velocity.assign(0.9 * velocity - 0.1 * tape.gradient(loss, [weight])[0])
        weight.assign_add(velocity)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < BATCHES:
            incident(state)
            step(*map(_share, _rows()))
            state.batch += 1
            state.commit()

    train(state)
    return sizes, weight.numpy()


def _train_model(victim: int, grows_to: int, lives: str, signum: int = signal.SIGKILL) -> tuple[list[int], Any]:
    """As scripts for earlier versions: a loop around a Keras model, with a learning rate that follows the size."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    incident = _Incident(victim, grows_to, lives, signum)
    hvd.init()
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.full([3, 1], float(hvd.rank()))])
    optimizer = tf.keras.optimizers.SGD(0.1 * hvd.size(), momentum=0.9)
    optimizer.build(model.trainable_variables)
    sizes = [hvd.size()]
    size = tf.Variable(float(hvd.size()))

    def on_state_reset() -> None:
        sizes.append(hvd.size())
        size.assign(float(hvd.size()))
        optimizer.learning_rate.assign(0.1 * hvd.size())

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    state.register_reset_callbacks([on_state_reset])

    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])])
    def train_one_batch(rows: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            # A loss for which the learning rate that follows the size gives the steps of one process.
            loss = tf.reduce_mean((model(rows) - targets) ** 2) / size
        tape = hvd.DistributedGradientTape(tape)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < BATCHES:
            incident(state)
            train_one_batch(*map(_share, _rows()))
            state.batch += 1
            if state.batch % 2 == 0:
                state.commit()

    train(state)
    return sizes, model.get_weights()[0]


def _train_in_fit(victim: int, grows_to: int, lives: str, signum: int = signal.SIGKILL) -> tuple[list[int], Any]:
    """The same with Keras."""
    import keras

    import horovod.keras as hvd

    incident = _Incident(victim, grows_to, lives, signum)
    hvd.init()
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.full([3, 1], float(hvd.rank()))])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    sizes = [hvd.size()]
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)  # in each world, as newcomers come to it
    before_step = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs=None: incident(state))

    @hvd.elastic.run
    def train(state: Any) -> None:
        rows, targets = (np.tile(_share(what), [STEPS, 1]) for what in _rows())
        model.fit(
            rows,
            targets,
            batch_size=ROWS // hvd.size(),
            shuffle=False,
            epochs=BATCHES // STEPS - state.epoch,
            verbose=0,
            callbacks=[
                before_step,
                broadcast,
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state),
            ],
        )

    train(state)
    return sizes, model.get_weights()[0]


def _train_with_warmup(victim: int, grows_to: int, lives: str) -> tuple[Any, Any]:
    """(size, epoch, batch, learning rate) of each batch, and the weights."""
    import keras

    import horovod.keras as hvd

    incident = _Incident(victim, grows_to, lives, signal.SIGKILL)
    hvd.init()
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, use_bias=False)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    warmup = hvd.callbacks.LearningRateWarmupCallback(RATE * hvd.size(), warmup_epochs=2)

    def follow_the_size() -> None:
        warmup.initial_lr = RATE * hvd.size()

    state.register_reset_callbacks([follow_the_size])
    seen: list[tuple[int, int, int, float]] = []

    def look(batch: int, logs: Any = None) -> None:
        incident(state)
        seen.append((hvd.size(), state.epoch, state.batch, float(np.array(model.optimizer.learning_rate))))

    @hvd.elastic.run
    def train(state: Any) -> None:
        rows, targets = (np.tile(_share(what), [STEPS, 1]) for what in _rows())
        callbacks = [
            warmup,
            keras.callbacks.LambdaCallback(on_train_batch_begin=look),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ]
        batch_size = ROWS // hvd.size()
        model.fit(rows, targets, batch_size=batch_size, epochs=3 - state.epoch, verbose=0, callbacks=callbacks)

    train(state)
    return seen, model.get_weights()[0]


@pytest.mark.parametrize(("grows_to", "sizes"), [(0, [3, 2]), (3, [3, 2, 3])], ids=["survivors", "replaced"])
def test_warm_up_goes_on_where_an_epoch_was_interrupted(grows_to: int, sizes: list[int], tmp_path: Path) -> None:
    replaced = [lambda: None] if grows_to else []
    with _changing(3, "shm") as world:
        outcomes = world.outcomes(_train_with_warmup, 1, grows_to, str(tmp_path / "lives"), before_replacing=replaced)
    survivors = [outcomes[0].value, outcomes[2].value]
    for seen, weights in survivors:
        assert list(dict.fromkeys(size for size, *_ in seen)) == list(dict.fromkeys(sizes))
        # Batches that were not committed when the rank was lost are trained once more.
        places = [(epoch, batch) for epoch in range(3) for batch in range(STEPS)]
        assert list(dict.fromkeys((epoch, batch) for _, epoch, batch, _ in seen)) == places
        for size, epoch, batch, rate in seen:
            part = min(epoch + (batch + 1) / STEPS, 2) / 2
            assert rate == pytest.approx(RATE * (1 + (size - 1) * part), rel=1e-5), (size, epoch, batch)
        np.testing.assert_array_equal(weights, survivors[0][1])


_TRAINED = pytest.mark.parametrize(
    "train", [_train_variables, _train_model, _train_in_fit], ids=["variables", "model", "fit"]
)


def _changing(size: int, transport: str) -> World:
    environment = {"HOROVOD_MIN_SIZE": "1", "HOROVOD_MAX_SIZE": str(size), "HOROVOD_ELASTIC_SETTLE_SECONDS": "1"}
    return World(size, transport, environment, preloaded="preloaded_tensorflow")


@_TRAINED
@pytest.mark.parametrize(("size", "victim", "transport"), [(3, 0, "shm"), (2, 1, "tcp")])
def test_the_survivors_go_on(train: Callable[..., Any], size: int, victim: int, transport: str, tmp_path: Path) -> None:
    with _changing(size, transport) as world:
        outcomes = world.outcomes(train, victim, 0, str(tmp_path / "lives"))
    assert [outcome.text for outcome in outcomes] == [""] * size
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        sizes, weight = outcome.value
        assert sizes == [size, size - 1]
        np.testing.assert_allclose(weight, _alone(BATCHES), rtol=1e-4)


def _leave_in_order(train: Callable[..., Any], victim: int, lives: str) -> Any:
    """What `train` returns, where no step has failed."""
    from horovod.common import elastic

    def restore(state: Any) -> None:
        raise AssertionError("A step has failed.")

    elastic.ObjectState.restore = restore  # type: ignore[method-assign]
    return train(victim, 0, lives, signal.SIGTERM)


@pytest.mark.parametrize(
    ("train", "size", "victim", "transport"),
    [(_train_variables, 2, 1, "tcp"), (_train_model, 2, 1, "tcp"), (_train_in_fit, 3, 0, "shm")],
    ids=["variables", "model", "fit"],
)
def test_one_that_gets_sigterm_leaves_at_the_next_commit(
    train: Callable[..., Any], size: int, victim: int, transport: str, tmp_path: Path
) -> None:
    with _changing(size, transport) as world:
        outcomes = world.outcomes(_leave_in_order, train, victim, str(tmp_path / "lives"))
    assert [outcome.text for outcome in outcomes] == [""] * size
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exit_code == 128 + signal.SIGTERM
            continue
        sizes, weight = outcome.value
        assert sizes == [size, size - 1]
        np.testing.assert_allclose(weight, _alone(BATCHES), rtol=1e-4)


@_TRAINED
@pytest.mark.parametrize(("size", "victim", "transport"), [(3, 0, "shm"), (2, 1, "tcp")])
def test_a_process_in_the_place_of_a_lost_one_is_taken_in(
    train: Callable[..., Any], size: int, victim: int, transport: str, tmp_path: Path
) -> None:
    with _changing(size, transport) as world:
        outcomes = world.outcomes(train, victim, size, str(tmp_path / "lives"), before_replacing=[lambda: None])
    assert [outcome.text for outcome in outcomes] == [""] * size
    for rank, outcome in enumerate(outcomes):
        sizes, weight = outcome.value
        assert sizes == ([size] if rank == victim else [size, size - 1, size])
        np.testing.assert_allclose(weight, _alone(BATCHES), rtol=1e-4)


def _die_while_the_state_is_sent() -> int:
    import keras

    import horovod.keras as hvd

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("adam", loss="mse")
    state = hvd.elastic.KerasState(model, batch=0)
    if hvd.rank() == 1:
        state._broadcast_variables = lambda root_rank: os.kill(os.getpid(), signal.SIGKILL)
    return int(hvd.elastic.run(lambda state: hvd.size())(state))


def test_one_is_lost_while_the_state_is_sent() -> None:
    with _changing(2, "shm") as world:
        outcomes = world.outcomes(_die_while_the_state_is_sent, deadline_seconds=90)
    assert [outcome.text for outcome in outcomes] == ["", ""]
    assert (outcomes[0].value, outcomes[1].exit_code) == (1, -signal.SIGKILL)
