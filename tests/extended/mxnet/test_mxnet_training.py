"""Training on two ranks is training on one with both batches: gluon's trainer, modules, broadcasts of parameters."""

from __future__ import annotations

import pickle
import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from unreduced_warnings import told
from worlds import World

from horovod.base.errors import OperationCode, TrainingCode
from horovod.common.ops import collectives

ROOT = Path(__file__).parents[3]
STEPS = 4


def _data(step: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The batch of both ranks."""
    source = np.random.default_rng(step)
    return source.normal(size=(8, 5)).astype("float32"), source.integers(0, 3, 8).astype("float32")


def _model(seed: int, prefix: str = "model_") -> Any:
    """With a layer whose shape the first batch tells, and one that is not trained."""
    import mxnet as mx

    mx.random.seed(seed)
    model = mx.gluon.nn.HybridSequential(prefix=prefix)
    with model.name_scope():
        model.add(mx.gluon.nn.Dense(4, activation="tanh"), mx.gluon.nn.Dense(3, in_units=4))
    model.initialize(mx.init.Uniform(0.5))
    model[1].bias.grad_req = "null"
    return model


def _train(model: Any, trainer: Any, rank: int, size: int) -> list[Any]:
    import mxnet as mx

    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(STEPS):
        data, labels = (mx.nd.array(part[rank::size]) for part in _data(step))
        with mx.autograd.record():
            loss = loss_of(model(data), labels)
        loss.backward()
        trainer.step(len(data))
    return [param.data().asnumpy() for _, param in sorted(model.collect_params().items())]


def _alike(found: list[Any], expected: list[Any], tolerance: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def _gluon(options: dict[str, Any], tolerance: float) -> None:
    import mxnet as mx

    import horovod.mxnet as hvd

    if options.pop("fp16", False):
        options["compression"] = hvd.Compression.fp16
    momentum = {"learning_rate": 0.5, "momentum": 0.9}
    alone = _model(seed=0)
    alone(mx.nd.array(_data(0)[0]))
    start = [param.data().asnumpy() for _, param in sorted(alone.collect_params().items())]
    expected = _train(alone, mx.gluon.Trainer(alone.collect_params(), "sgd", momentum), 0, 1)
    assert abs(expected[1] - start[1]).max() > 0.1

    mine = _model(seed=hvd.rank())
    hvd.broadcast_parameters(mine.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(mine.collect_params(), "sgd", momentum, **options)
    _alike(_train(mine, trainer, hvd.rank(), hvd.size()), expected, tolerance)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-5),
        ({"num_groups": 2, "gradient_predivide_factor": 2.0, "prefix": "grouped."}, 1e-5),
        ({"fp16": True}, 1e-2),
    ],
)
def test_gluon_trains_as_one_process(mxnet_pair: World, options: dict[str, Any], tolerance: float) -> None:
    mxnet_pair.run(_gluon, options, tolerance)


def _clipped() -> None:
    """The two halves of a step, with an optimizer that updates several parameters in a call."""
    import mxnet as mx

    import horovod.mxnet as hvd

    model = _model(seed=1)
    model(mx.nd.ones((1, 5)))
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1))
    with pytest.warns(UserWarning, match="DistributedOptimizer"):
        trainer = hvd.DistributedTrainer(model.collect_params(), optimizer)
    with mx.autograd.record():
        loss = model(mx.nd.ones((1, 5))).sum() * (1 + hvd.rank())
    loss.backward()
    alone = [param.grad().asnumpy() / (1 + hvd.rank()) for param in model[0].collect_params().values()]
    trainer.allreduce_grads()
    _alike([param.grad().asnumpy() for param in model[0].collect_params().values()], [1.5 * one for one in alone])
    trainer.update(1)
    everyone = hvd.allgather_object([param.data().asnumpy() for param in model.collect_params().values()])
    _alike(*everyone, tolerance=0)


def _module() -> None:
    """The older interface, by an optimizer."""
    import mxnet as mx

    import horovod.mxnet as hvd

    weights = mx.nd.array([[float(hvd.rank())] * 5])
    hvd.broadcast_parameters({"w": weights}, root_rank=1)
    assert weights.asnumpy().tolist() == [[1.0] * 5]
    for groups in (0, 2):
        output = mx.sym.LinearRegressionOutput(
            mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1, name="fc"), mx.sym.var("label")
        )
        module = mx.mod.Module(output, label_names=["label"])
        module.bind([("data", (4, 5))], [("label", (4, 1))])
        module.init_params(arg_params={"fc_weight": weights, "fc_bias": mx.nd.zeros(1)})
        inner = mx.optimizer.SGD(learning_rate=0.1, rescale_grad=1 / 4)
        optimizer = hvd.DistributedOptimizer(inner, num_groups=groups)
        module.init_optimizer(kvstore=None, optimizer=optimizer)
        assert inner.idx2name == optimizer.idx2name != {}
        expected_weights, expected_bias = np.ones((1, 5)), np.zeros(1)
        for step in range(STEPS):
            data, labels = _data(step)
            mine = slice(hvd.rank(), None, 2)
            batch = mx.io.DataBatch([mx.nd.array(data[mine])], [mx.nd.array(labels[mine, None])])
            module.forward_backward(batch)
            module.update()
            error = data @ expected_weights.T + expected_bias - labels[:, None]
            expected_weights = expected_weights - 0.1 * (error * data).mean(0)
            expected_bias = expected_bias - 0.1 * error.mean(0)
        found, _ = module.get_params()
        _alike([found["fc_weight"].asnumpy(), found["fc_bias"].asnumpy()], [expected_weights, expected_bias])
    optimizer.rescale_grad = 0.5
    optimizer.set_learning_rate(3.0)
    assert (inner.rescale_grad, inner.lr, optimizer.learning_rate) == (0.5, 3.0, 3.0)
    copied = pickle.loads(pickle.dumps(optimizer))
    assert (type(copied), copied.lr) == (hvd.DistributedOptimizer, 3.0)


def _a_set_of_one() -> None:
    """A rank that is no member trains with its own gradients, and waits for nobody."""
    import mxnet as mx

    import horovod.mxnet as hvd

    alone = hvd.add_process_set([0])
    try:
        param = mx.gluon.Parameter("weight", shape=(2,))
        param.initialize(mx.init.Zero())
        trainer = hvd.DistributedTrainer([param], "sgd", {"learning_rate": 1.0}, process_set=alone)
        with mx.autograd.record():
            loss = (param.data() * (1 + hvd.rank())).sum()
        loss.backward()
        trainer.step(1)
        assert param.data().asnumpy().tolist() == [-1.0 - hvd.rank()] * 2
        if alone.included():
            hvd.broadcast_parameters({"weight": param}, root_rank=0, process_set=alone)
        else:
            with pytest.raises(ValueError, match=ends_with(OperationCode.NOT_IN_SET)):
                hvd.broadcast_parameters({"weight": param}, root_rank=0, process_set=alone)
    finally:
        hvd.remove_process_set(alone)


def _wrong_use() -> None:
    import mxnet as mx

    import horovod.mxnet as hvd

    param = mx.gluon.Parameter("weight", shape=(2,))
    param.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = hvd.DistributedTrainer([param], "sgd")
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT)):
        trainer.allreduce_grads()
    for wrong, fact in (
        (mx.optimizer.SGD, "SGD(learning_rate"),
        (None, "None"),
        (mx.gluon.nn.Dense(1), "model"),
        (3, "int"),
    ):
        named = ends_with(TrainingCode.INVALID_ARGUMENT, fact)
        with pytest.raises(TypeError, match=named):
            hvd.DistributedOptimizer(wrong)
        with pytest.raises(TypeError, match=named):
            hvd.DistributedTrainer([param], wrong)
    with pytest.raises(TypeError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "'sgd'")):
        hvd.DistributedOptimizer("sgd")
    different = mx.gluon.Parameter("weight", shape=(2 + hvd.rank(),))
    different.initialize()
    with pytest.raises(hvd.HorovodInternalError, match=ends_with(OperationCode.MISMATCHED)):
        hvd.broadcast_parameters({"weight": different})


def _updated_alone() -> None:
    import mxnet as mx

    import horovod.mxnet as hvd

    param = mx.gluon.Parameter("weight", shape=(1,), init="zeros")
    param.initialize()
    trainer = hvd.DistributedTrainer([param], "sgd", {"learning_rate": 1.0})
    for expected in (-1.5, -3.0):
        with mx.autograd.record():
            loss = param.data() * (hvd.rank() + 1.0)
        loss.backward()
        with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_REDUCED)):
            trainer.update(1)
        trainer.allreduce_grads()
        trainer.update(1)
        assert param.data().asnumpy().tolist() == [expected]


def test_other_ways_to_train(mxnet_pair: World) -> None:
    mxnet_pair.run(_updated_alone)
    mxnet_pair.run(_clipped)
    mxnet_pair.run(_module)
    mxnet_pair.run(_a_set_of_one)
    mxnet_pair.run(_wrong_use)


def test_the_example(mxnet_python: Path) -> None:
    launcher = [mxnet_python, "-m", "horovod.launch", "-np", "2"]
    command = [*launcher, mxnet_python, ROOT / "examples" / "mxnet_digits.py", "--epochs", "5"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last = done.stdout.splitlines()
    accuracy = float(last.removeprefix("[0]<stdout>:accuracy ").removesuffix(" with 2 processes"))
    assert accuracy > 0.85


def test_the_page(mxnet_python: Path, tmp_path: Path) -> None:
    """The Python of docs/mxnet.md runs as it is printed."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/mxnet.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    (tmp_path / "page.py").write_text("\n".join(blocks))
    command = [mxnet_python, "-m", "horovod.launch", "-np", "2", mxnet_python, tmp_path / "page.py"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


# -- ranks that train different weights --------------------------------------------------------------------------------
def _told(train: Any) -> list[str]:
    collectives.join(-1)  # so that steps count anew
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    code = TrainingCode.DIFFERENT_WEIGHTS.value
    return [f"{one.filename}: {one.message}" for one in caught if code in str(one.message)]


def _different_weights(module: bool) -> list[list[str]]:
    import mxnet as mx

    import horovod.mxnet as hvd

    rank, size = hvd.rank(), hvd.size()

    def told(seed: int, broadcast: bool, rate: float = 0.1) -> list[str]:
        options = {"learning_rate": rate, "momentum": 0.9}
        if module:
            optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", **options))
            weights = [mx.nd.array([1.0 + seed]), mx.nd.array([2.0 + seed])]
            if broadcast:
                hvd.broadcast_parameters(dict(enumerate(weights)))
            states = [optimizer.create_state(place, one) for place, one in enumerate(weights)]

            def train() -> None:
                for _ in range(STEPS):
                    for place, one in enumerate(weights):  # as a module does
                        optimizer.update(place, one, mx.nd.ones(1), states[place])

            return _told(train)
        model = _model(seed)
        trainer = hvd.DistributedTrainer(model.collect_params(), "sgd", options)
        if broadcast:
            hvd.broadcast_parameters(model.collect_params())
        return _told(lambda: _train(model, trainer, rank, size))

    return [told(rank, False), told(rank, True), told(0, True, rate=0.1 + rank), told(0, False)]


@pytest.mark.parametrize("module", [False, True])
def test_ranks_that_train_different_weights_are_told_so(mxnet_pair: World, module: bool) -> None:
    (forgotten, broadcast, rates, alike), on_1 = mxnet_pair.run(_different_weights, module)
    assert (len(forgotten), len(rates)) == (1, 1)
    assert forgotten[0].startswith(__file__), "the warning must point to the script"
    for part in ("step 2", "parameter ", "rank 1", "hvd.broadcast_parameters("):
        assert part in forgotten[0]
    assert "'learning_rate' of the optimizer (0.1 on rank 0, 1.1 on rank 1)" in rates[0]
    assert (broadcast, alike) == ([], [])
    assert on_1 == [[], [], [], []]


# -- two trainers, or optimizers, whose gradients have equal names -----------------------------------------------------
def _of_two(module: bool, case: str = "") -> list[float]:
    """Averages of both, whose gradients are 1 and 100 on all ranks.

    case: what rank 1 does in another order, of "making", "first steps" and "later steps"; or rank 0 "holds" one that it
    alone has made.
    """
    import mxnet as mx

    import horovod.mxnet as hvd

    collectives.join(-1)  # so that steps count anew
    weights = [mx.gluon.Parameter(name, shape=(1,)) for name in ("first", "second")]
    for weight in weights:
        weight.initialize(mx.init.One())

    def make(place: int) -> Any:
        if module:
            return hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0))
        return hvd.DistributedTrainer([weights[place]], "sgd", {"learning_rate": 1.0})

    def make_first() -> Any:
        return make(0)

    def make_second() -> Any:
        return make(1)

    held = [make(0)] if "holds" in case and hvd.rank() == 0 else []
    makers = [make_first, make_second]
    made = {maker: maker() for maker in (makers[::-1] if "making" in case and hvd.rank() == 1 else makers)}
    first, second = made[make_first], made[make_second]
    for step in range(3):
        order = [(0, first, 1.0), (1, second, 100.0)]
        turned = hvd.rank() == 1 and ("first steps" if step == 0 else "later steps") in case
        for place, one, scale in order[::-1] if turned else order:
            weights[place].set_data(mx.nd.ones(1))
            if module:
                one.update(0, weights[place].data(), mx.nd.array([scale]), None)
                continue
            with mx.autograd.record():
                loss = weights[place].data() * scale
            loss.backward()
            one.step(1)
    del held
    return [1 - float(weight.data().asnumpy()[0]) for weight in weights]


def _error_of_two(module: bool, case: str) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (of a class that only ranks know)
        _of_two(module, case)
    return str(caught.value)


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize("case", ["", "making", "holds"])
def test_two_optimizers_of_equal_names(mxnet_pair: World, module: bool, case: str) -> None:
    assert mxnet_pair.run(_of_two, module, case) == [[1.0, 100.0]] * 2


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize("case", ["first steps", "first steps, making", "first steps, later steps"])
def test_first_steps_of_two_optimizers_in_another_order(mxnet_pair: World, module: bool, case: str) -> None:
    for error in mxnet_pair.run(_error_of_two, module, case):
        assert re.search(ends_with(TrainingCode.DIFFERENT_ORDER, "rank 0", "rank 1"), error), error


@pytest.mark.parametrize("module", [False, True])
def test_later_steps_of_two_optimizers_in_another_order(deadlocked_mxnet_pair: World, module: bool) -> None:
    for error in deadlocked_mxnet_pair.run(_error_of_two, module, "later steps"):
        assert re.search(ends_with(OperationCode.DEADLOCK, "gradient.0#", "same order"), error), error


def _broadcast_two() -> str:
    import mxnet as mx

    import horovod.mxnet as hvd

    def first() -> None:
        hvd.broadcast_parameters({"w": mx.nd.ones(1)})

    def second() -> None:
        hvd.broadcast_parameters({"w": mx.nd.zeros(1)})

    def both() -> None:
        for one in (first, second) if hvd.rank() == 0 else (second, first):
            one()

    with pytest.raises(ValueError) as caught:  # noqa: PT011  (its text is looked at)
        both()
    return str(caught.value)


def test_ranks_broadcast_two_models_in_another_order(mxnet_pair: World) -> None:
    for error in mxnet_pair.run(_broadcast_two):
        assert re.search(ends_with(TrainingCode.DIFFERENT_ORDER, "test_mxnet_training.py", "rank 1"), error), error


def _copied_optimizers() -> list[int]:
    import mxnet as mx

    import horovod.mxnet as hvd

    first = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    kept = pickle.loads(pickle.dumps(first)) if hvd.rank() == 0 else None  # takes no step
    second = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    first = hvd.broadcast_object(first)
    first.update(0, mx.nd.ones(1), mx.nd.ones(1), None)
    copied = pickle.loads(pickle.dumps(second))
    for one in (second, *([copied] if kept is None else [kept])):
        one.update(0, mx.nd.ones(1), mx.nd.ones(1), None)
    numbers = [int(one._made.called("").partition("#")[2] or 1) for one in (first, second)]
    return [number - numbers[0] for number in numbers]


def test_copies_of_an_optimizer(mxnet_pair: World) -> None:
    assert mxnet_pair.run(_copied_optimizers) == [[0, 1]] * 2


def _never_distributed(case: str) -> list[str]:
    import mxnet as mx

    import horovod.mxnet as hvd
    from horovod.common import unreduced

    collectives.join(-1)  # so that steps count anew, whatever was trained here before
    unreduced.watch = unreduced.Watch()  # that of the process, in which other tests may have made distributed trainers
    unreduced.world_begins()
    rows = "rows" in case
    model = mx.gluon.nn.Embedding(100_000, 4, sparse_grad=True) if rows else mx.gluon.nn.Dense(64, in_units=64)
    data = mx.nd.array([1, 2]) if rows else mx.nd.ones((2, 64))
    model.initialize()
    if not rows:
        hvd.broadcast_parameters(model.collect_params(), root_rank=0)
    kind = hvd.DistributedTrainer if case == "distributed" else mx.gluon.Trainer
    trainer = kind(model.collect_params(), "sgd", {"learning_rate": 0.01})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(unreduced.STEPS + 5):
            with mx.autograd.record():
                loss = model(data).sum()
            loss.backward()
            if case == "by hand":
                for name, one in sorted(model.collect_params().items()):
                    hvd.allreduce_(one.grad(), name=name)
            if case == "rows by hand":
                of_rows = model.weight.grad()
                hvd.sparse_allreduce_async(of_rows, "rows", hvd.Average)().copyto(of_rows)
            trainer.step(2)
    assert not hasattr(mx.gluon.Trainer._update, "_hvd_shows_steps") or not unreduced.watch.is_over
    code = f"[{TrainingCode.NOT_DISTRIBUTED.value}]"
    return [f"{one.filename}: {one.message}" for one in caught if code in str(one.message)]


@pytest.mark.parametrize("case", ["plain", "rows of nothing"])
def test_a_trainer_that_was_never_distributed_is_told_once_on_rank_0(mxnet_pair: World, case: str) -> None:
    on_0, on_1 = mxnet_pair.run(_never_distributed, case)
    assert len(on_0) == 1
    assert on_0[0].startswith(__file__), "the warning must point to the script"
    assert "hvd.DistributedTrainer(" in on_0[0]
    assert on_1 == []


def test_trainers_that_reduce_are_told_nothing(mxnet_pair: World) -> None:
    for case in ("distributed", "by hand", "rows by hand"):
        assert mxnet_pair.run(_never_distributed, case) == [[], []], case


def _module_never_distributed(case: str) -> list[str]:
    import mxnet as mx

    import horovod.mxnet as hvd

    collectives.join(-1)  # so that steps count anew, whatever was trained here before
    optimizer = mx.optimizer.create("sgd", learning_rate=0.01)

    def after_batch(parameters: Any) -> None:
        if case == "weights by hand" and parameters.nbatch == 50:
            for name, one in sorted(parameters.locals["self"].get_params()[0].items()):
                hvd.allreduce(one, name=name)

    def work() -> None:
        used = hvd.DistributedOptimizer(optimizer) if case == "distributed" else optimizer
        data = mx.io.NDArrayIter(mx.nd.ones((2 * 105, 64)), mx.nd.ones(2 * 105), batch_size=2, label_name="label")
        output = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="full")
        module = mx.mod.Module(mx.sym.SoftmaxOutput(output, mx.sym.Variable("label")), label_names=["label"])
        if case == "evaluated":
            module.bind(data.provide_data, data.provide_label, for_training=False)
            module.init_params()
            module.score(data, "acc")
        else:
            module.fit(data, optimizer=used, kvstore=None, num_epoch=1, batch_end_callback=after_batch)

    return told(work)


def test_a_module_that_was_never_distributed_is_told_once_on_rank_0(mxnet_pair: World) -> None:
    on_0, on_1 = mxnet_pair.run(_module_never_distributed, "plain")
    assert len(on_0) == 1
    assert on_0[0].startswith(__file__), "the warning must point to the script"
    assert "optimizer=hvd.DistributedOptimizer(optimizer) with kvstore=None" in on_0[0]
    assert on_1 == []


@pytest.mark.parametrize("case", ["distributed", "weights by hand", "evaluated"])
def test_right_modules_are_told_nothing(mxnet_pair: World, case: str) -> None:
    assert mxnet_pair.run(_module_never_distributed, case) == [[], []]
