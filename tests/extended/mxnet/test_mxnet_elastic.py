"""MXNetState, and that training goes on after an error; handles and rows of sparse gradients."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode, code_of


def _handles() -> None:
    import mxnet as mx

    import horovod.mxnet as hvd

    rank = hvd.rank()
    one, two = mx.nd.array([rank, 1]), mx.nd.ones(3)
    started = {
        "sum": hvd.allreduce_async(one, op=hvd.Sum, name="sum"),
        "in place": hvd.allreduce_async_(two, op=hvd.Sum, name="in place"),
        "group": hvd.grouped_allreduce_async([one, mx.nd.ones(1, dtype="int32")], op=hvd.Sum, name="group"),
        "rows": hvd.allgather_async(one, name="rows"),
        "all rows": hvd.grouped_allgather_async([one, one], name="all rows"),
        "root": hvd.broadcast_async(one, root_rank=1, name="root"),
        "to each": hvd.alltoall_async(one, splits=[1, 1], name="to each"),
        "part": hvd.reducescatter_async(one, op=hvd.Sum, name="part"),
        "parts": hvd.grouped_reducescatter_async([one], op=hvd.Sum, name="parts"),
    }
    names = sorted(started, reverse=rank == 1)  # in any order
    found = {name: hvd.synchronize(started[name]) for name in names}
    assert found["sum"].asnumpy().tolist() == [1, 2]
    assert found["in place"] is two
    assert two.asnumpy().tolist() == [2] * 3
    assert [array.asnumpy().tolist() for array in found["group"]] == [[1, 2], [2]]
    assert found["rows"].asnumpy().tolist() == [0, 1, 1, 1]
    assert [array.shape for array in found["all rows"]] == [(4,), (4,)]
    assert found["root"].asnumpy().tolist() == [1, 1]
    assert [array.asnumpy().tolist() for array in found["to each"]] == [[[0, 1], [1, 1]][rank], [1, 1]]
    assert found["part"].asnumpy().tolist() == [rank + 1]
    assert [array.asnumpy().tolist() for array in found["parts"]] == [[rank + 1]]
    weights = mx.nd.array([rank])
    hvd.synchronize(hvd.broadcast_async_(weights, root_rank=1))
    hvd.synchronize(hvd.grouped_allreduce_async_([weights, two], op=hvd.Sum))
    assert (weights.asscalar(), two.asnumpy().tolist()) == (2, [4] * 3)
    assert hvd.synchronize(started["sum"]) is None
    with pytest.raises(ValueError, match=ends_with(OperationCode.CLEARED_HANDLE)):
        hvd.poll(started["sum"])


def _sparse_gradients() -> None:
    """An embedding of which each rank sees other words, and in one step none."""
    import mxnet as mx

    import horovod.mxnet as hvd

    rank = hvd.rank()
    model = mx.gluon.nn.Embedding(10, 2, sparse_grad=True)
    model.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(model.collect_params(), "sgd", {"learning_rate": 1.0, "lazy_update": False})
    for words in ([[1, 3], [3, 3, 7]][rank], [[2], []][rank]):
        model.weight.grad()[:] = 0
        with mx.autograd.record():
            loss = model(mx.nd.array(words)).sum() if words else model(mx.nd.array([0])).sum() * 0
        loss.backward()
        trainer.step(1)
    expected = np.zeros((10, 2))
    expected[[1, 2, 3, 7]] = [[-0.5], [-0.5], [-1.5], [-0.5]]
    np.testing.assert_array_equal(model.weight.data().asnumpy(), expected)
    nothing = mx.nd.sparse.zeros("row_sparse", (4, 2))
    some = mx.nd.sparse.row_sparse_array((np.ones((1, 2), "float32"), [3]), shape=(4, 2))
    total = hvd.sparse_allreduce_async([nothing, some][rank], "words", hvd.Sum)()
    assert total.asnumpy().tolist() == [[0, 0]] * 3 + [[1, 1]]
    with pytest.raises(ValueError, match=ends_with(OperationCode.UNSUPPORTED_LAYOUT)):
        hvd.sparse_allreduce_async(mx.nd.ones(1), "dense", hvd.Sum)


def test_handles_and_sparse_gradients(mxnet_pair: World) -> None:
    mxnet_pair.run(_handles)
    mxnet_pair.run(_sparse_gradients)


def _model(value: float) -> Any:
    import mxnet as mx

    model = mx.gluon.nn.Dense(1, in_units=2, prefix="model_")
    model.initialize(mx.init.Constant(value))
    return model


def _weights_of(model: Any) -> list[float]:
    weights: list[float] = model.weight.data().asnumpy()[0].tolist()
    return weights


def _state() -> None:
    import mxnet as mx

    import horovod.mxnet as hvd

    rank = hvd.rank()
    mx.random.seed(3)
    model, late = _model(float(rank)), mx.gluon.nn.Dense(2, prefix="late_")
    late.initialize()
    array = mx.nd.array([rank])
    trainer = hvd.DistributedTrainer(model.collect_params(), "adam", {"learning_rate": 0.1 * (1 + rank)})
    params = {**model.collect_params(), **late.collect_params(), "array": array}
    if rank == 0:
        late(mx.nd.ones((1, 3)))  # the other rank has no shape for it yet
    state = hvd.elastic.MXNetState(params, trainer, batch=rank)
    state.sync()
    assert (_weights_of(model), array.asscalar(), state.batch, trainer.learning_rate) == ([0, 0], 0, 0, 0.1)
    late(mx.nd.ones((1, 3)))
    everyone = hvd.allgather_object(late.weight.data().asnumpy().tolist())
    assert everyone[0] == everyone[1] != []

    def step() -> None:
        with mx.autograd.record():
            loss = model(mx.nd.ones((1, 2))).sum()
        loss.backward()
        trainer.step(1)

    step()
    state.batch = 1
    state.commit()
    after_one = _weights_of(model)
    step()
    after_two = _weights_of(model)
    state.batch, array[:] = 2, 5
    state.restore()
    assert (_weights_of(model), state.batch, array.asscalar()) == (after_one, 1, 0)
    step()  # with the momentum and the counts of that time
    np.testing.assert_allclose(_weights_of(model), after_two, rtol=1e-6)
    assert after_one != after_two


def _goes_on() -> list[int]:
    """A step of which the ranks do not agree: back to the last commit, in the next world."""
    import mxnet as mx

    import horovod.mxnet as hvd

    model = _model(0.0)
    state = hvd.elastic.MXNetState(model.collect_params(), batch=0)
    failed = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < 3:
            model.weight.set_data(model.weight.data() + 1)
            if state.batch == 1 and not failed:
                failed.append(state.batch)
                hvd.allreduce(mx.nd.ones(1 + hvd.rank()))
            state.batch += 1
            state.commit()

    train(state)
    assert (failed, hvd.size(), _weights_of(model)) == ([1], 2, [3, 3])
    return [hvd.rank()]


def test_a_state_and_the_loop_around_training(mxnet_pair: World) -> None:
    mxnet_pair.run(_state)
    assert sorted(mxnet_pair.run(_goes_on)) == [[0], [1]]


def _train_with_batches_of_all(waits_by: str) -> tuple[list[float], list[str]]:
    """Rank 1 dies in the second backward pass, which MXNet runs later, on a thread of its own; a process that was not
    in the world before takes its place.

    waits_by: how the script gets to know of it. Returns weights, and what was raised.
    """
    import mxnet as mx

    import horovod.mxnet as hvd
    from horovod.mxnet.sync_batch_norm import _Normalize

    dies = waits_by != "nobody dies" and hvd.is_initialized() and hvd.rank() == 1
    hvd.init()
    mx.random.seed(3)
    model = mx.gluon.nn.Sequential(prefix="model_")
    with model.name_scope():
        model.add(mx.gluon.nn.Dense(3, in_units=2), hvd.SyncBatchNorm(in_channels=3), mx.gluon.nn.Dense(1, in_units=3))
    model.initialize(mx.init.Uniform(1.0))
    trainer = hvd.DistributedTrainer(model.collect_params(), "adam", {"learning_rate": 0.1})
    state = hvd.elastic.MXNetState(model.collect_params(), trainer, batch=0)
    raised = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < 3:
            if state.batch == 1 and dies:
                _Normalize.backward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            with mx.autograd.record():
                loss = (model(mx.nd.array([[hvd.rank(), state.batch], [1, 2]])) ** 2).sum()
            loss.backward()
            try:
                if waits_by == "gradient":
                    model[0].weight.grad().asnumpy()
                trainer.step(1)
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
                raise
            state.batch += 1
            state.commit()

    train(state)
    return model[0].weight.data().asnumpy().ravel().tolist(), raised


def test_a_rank_that_is_lost_in_a_backward_pass(mxnet_pair: World) -> None:
    (undisturbed, _), _ = mxnet_pair.run(_train_with_batches_of_all, "nobody dies")
    for waits_by in ("step", "gradient"):
        outcomes = mxnet_pair.outcomes(_train_with_batches_of_all, waits_by, before_replacing=[lambda: None])
        assert [outcome.text for outcome in outcomes] == [""] * 2
        (weights, (raised,)), (weights_of_other, none) = [outcome.value for outcome in outcomes]
        if waits_by == "step":
            assert raised.startswith("HorovodInternalError: Rank 1 (pid ")
            assert code_of(raised) == OperationCode.PEER_LOST
        else:
            assert raised.startswith("MXNetError: ")
        assert (weights, none) == (weights_of_other, [])
        np.testing.assert_allclose(weights, undisturbed, rtol=1e-5)
