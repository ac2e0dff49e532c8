"""What scripts and the tests of earlier releases use of TensorFlow's and Keras's Horovod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode


def _names() -> None:
    import numpy as np
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow import util
    from horovod.tensorflow.data import compute_service

    assert hvd._executing_eagerly() is util._executing_eagerly() is util._has_eager() is True
    assert hvd.gpu_available("tensorflow") is bool(tf.config.list_physical_devices("GPU"))
    assert hvd.handle_average_backwards_compatibility(hvd.Sum, None) == hvd.Sum
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks()[0] == [0, 1]
    assert tf.data.Dataset.send_to_data_service is compute_service.send_to_data_service
    assert float(hvd._allreduce(tf.constant(1.0), op=hvd.Sum)) == 2.0

    @util._make_subgraph
    def in_a_graph() -> Any:
        assert not util._executing_eagerly()
        return tf.constant(1)

    assert int(in_a_graph()) == 1
    one, two = tf.Variable(1.0), tf.Variable(2.0)
    refs = util.vars_to_refs([one, [two]])
    assert hash(refs) == hash(util.vars_to_refs([one, [two]]))
    back = util.refs_to_vars(refs)
    assert back[0] is one
    assert back[1][0] is two

    reduce = hvd._make_allreduce_grads_fn("scope", op=hvd.Sum)
    gradients = [tf.constant([1.0 + hvd.rank()]), None]
    for variables in ([one, two], None):
        assert reduce(gradients, variables)[0].numpy().tolist() == [3.0]
        assert reduce(gradients, variables)[1] is None
    with tf.Graph().as_default():
        plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        assert isinstance(plain, hvd._LegacyOptimizer)
        assert isinstance(hvd.DistributedOptimizer(plain), hvd._DistributedOptimizer)
    unknown = hvd.ProcessSet([0])
    for kind in (ValueError, tf.errors.InvalidArgumentError):
        with pytest.raises(kind, match=ends_with(OperationCode.NO_SUCH_SET, "Allreduce")):
            hvd.allreduce(np.ones(1), process_set=unknown)


def test_names(tf_pair: World) -> None:
    tf_pair.run(_names)


def _collectives(kind: str) -> None:
    import numpy as np

    import horovod.keras as hvd

    rank = hvd.rank()
    for value in (np.array([1.0 + rank, 2.0], np.float32), 1.0 + rank):
        results = [hvd.allreduce(value), hvd.broadcast(value, 0)]
        if np.ndim(value):
            results += [hvd.allgather(value), hvd.reducescatter(value, op=hvd.Sum)]
        for result in results:
            assert type(result).__module__.startswith(kind)
            assert isinstance(result.numpy(), (np.ndarray, np.float32, np.float64))
    assert float(hvd.allreduce(1.0 + rank)) == 1.5


@pytest.mark.parametrize(("pair", "kind"), [("tf_pair", "tensorflow"), ("torch_pair", "torch")])
def test_collectives_of_keras_return_tensors(pair: str, kind: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(pair).run(_collectives, kind)


def _optimizer(legacy: bool) -> None:
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9))
    assert "horovod" in optimizer.__module__
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.build((None, 2))
    optimizer.build(model.trainable_variables)
    assert len(optimizer.variables()) == len(optimizer.variables) > 0
    assert all(one is two for one, two in zip(optimizer.variables(), optimizer.variables, strict=True))
    if not legacy:
        return
    for plain in (tf.keras.optimizers.SGD(0.1), tf.keras.optimizers.legacy.SGD(0.1)):
        kind = hvd.DistributedOptimizer(plain)
        assert kind.gradient_aggregation is None
        variable = tf.Variable([1.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * (1.0 + hvd.rank()))
        pairs = kind._compute_gradients(loss, [variable], tape=tape)
        kind.apply_gradients(pairs)
        assert variable.numpy().tolist() == pytest.approx([1.0 - 0.1 * 1.5])
    several = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    assert several.gradient_aggregation is not None


@pytest.mark.parametrize("pair", ["tf_pair", "legacy_pair"])
def test_optimizers(pair: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(pair).run(_optimizer, pair == "legacy_pair")


def _callbacks() -> None:
    import keras
    import numpy as np

    import horovod.keras as hvd

    class Steered(hvd.callbacks.LearningRateScheduleCallback):
        def _adjust_learning_rate(self, epoch: float) -> None:
            assert self.backend is keras.backend
            self.model.optimizer.learning_rate = 0.25 + epoch

    class Tenfold(hvd.callbacks.LearningRateScheduleCallback):
        pass

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), loss="mse")
    data = np.ones((2, 1)), np.ones((2, 1))
    model.fit(*data, epochs=2, verbose=0, callbacks=[Steered(1.0, 0.5)])
    assert float(model.optimizer.learning_rate) == 1.25
    history = model.fit(*data, epochs=5, verbose=0, callbacks=[Tenfold(1.0, 0.1, start_epoch=2)])
    assert history.history["lr"] == pytest.approx([1.25, 1.25, 1.0, 0.1, 0.01])  # as the docstring says


def test_callbacks(tf_pair: World) -> None:
    tf_pair.run(_callbacks)


def _worker(path: str) -> bool:
    import threading

    import horovod.tensorflow as hvd
    from horovod.tensorflow.data import compute_service, compute_worker

    def end() -> None:
        config = compute_service.TfDataServiceConfig.read(path, wait_for_file_creation=True)
        client = config.compute_client()
        client.wait_for_dispatcher_worker_registration(0)
        client.shutdown()

    ending = threading.Thread(target=end, daemon=True)
    if hvd.rank() == 0:
        ending.start()
    compute_worker.main(dispatchers=1, dispatcher_side="compute", configfile=path, timeout=60)
    return bool(hvd.is_initialized())


def test_main_of_a_compute_worker_leaves_the_world_to_its_caller(tf_pair: World, tmp_path: Path) -> None:
    assert tf_pair.run(_worker, str(tmp_path / "config.json")) == [True, True]
