"""What tests of Keras 3 on every backend run on two ranks: a step by an optimizer, by whatever call, reduces once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from error_codes import ends_with

from horovod._keras.backends import backend_of
from horovod.base.errors import TrainingCode
from horovod.common.ops import collectives

SUM = -3.0


def every_step_reduces_once() -> None:
    """AssertionError where it does so never or twice."""
    import keras

    import horovod.keras as hvd

    rank = hvd.rank()
    scaled = keras.optimizers.LossScaleOptimizer
    gradient = keras.ops.convert_to_tensor([rank + 1.0])

    def made(wrap: Any = lambda one: one, around: Any = lambda one: one, **options: Any) -> tuple[Any, Any]:
        x = keras.Variable([0.0])
        optimizer = around(hvd.DistributedOptimizer(wrap(keras.optimizers.SGD(1.0, **options)), op=hvd.Sum))
        optimizer.build([x])
        return optimizer, x

    def value(x: Any) -> float:
        return float(np.array(keras.ops.convert_to_numpy(x))[0])

    for apply in (
        lambda one, x: one.apply([gradient], [x]),
        lambda one, x: one.apply([gradient]),
        lambda one, x: one.apply_gradients([(gradient, x)]),
    ):
        optimizer, x = made()
        apply(optimizer, x)
        assert value(x) == SUM
        # A training step of the script's own may use the optimizer in a LossScaleOptimizer, whichever is outside.
        for options in ({"wrap": lambda one: scaled(one, 1.0)}, {"around": lambda one: scaled(one, 1.0)}):
            optimizer, x = made(**options)
            apply(optimizer.inner_optimizer, x)
            assert value(x) == SUM
            if keras.backend.backend() != "jax":  # where Keras's LossScaleOptimizer works in compiled functions only
                apply(optimizer, x)
                assert value(x) == 2 * SUM
    optimizer, x = made(gradient_accumulation_steps=2)
    for expected in (0.0, SUM, SUM, 2 * SUM):
        optimizer.apply([gradient], [x])
        assert value(x) == expected
    for options in ({}, {"wrap": lambda one: scaled(one, 1.0)}):
        optimizer, x = made(**options)
        with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_REDUCED, "update_step")):
            getattr(optimizer, "inner_optimizer", optimizer).update_step(gradient, x, 1.0)
        assert value(x) == 0.0
    if keras.backend.backend() == "jax":
        for optimizer, x in (
            made(),
            made(wrap=lambda one: scaled(one, 1.0)),
            made(around=lambda one: scaled(one, 1.0)),
        ):
            (found,), _ = optimizer.stateless_apply([one.value for one in optimizer.variables], [gradient], [x.value])
            assert float(found[0]) == SUM


# -- two optimizers whose variables have equal names -------------------------------------------------------------------
def of_two(case: str = "") -> list[float]:
    """What both subtract in a step, of gradients that are 1 and 100 on all ranks.

    case: what rank 1 does "in another order", of "making", "first steps" and "later steps", or what rank 0 does alone:
    it makes one that it only "holds", or one that it "drops".
    """
    import keras

    import horovod.keras as hvd

    collectives.join(-1)  # so that steps count anew

    def make_first() -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))

    def make_second() -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))

    def make_alone() -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))

    held = [make_alone()] if hvd.rank() == 0 and ("holds" in case or "drops" in case) else []
    if "drops" in case:
        held.clear()
    makers = [make_first, make_second]
    made = {maker: maker() for maker in (makers[::-1] if "making" in case and hvd.rank() == 1 else makers)}
    variables = [keras.Variable([1.0], name="kernel") for _ in makers]
    pairs = [(made[maker], variable) for maker, variable in zip(makers, variables, strict=True)]
    for step in range(3):
        both = list(zip(pairs, (1.0, 100.0), strict=True))
        turned = hvd.rank() == 1 and ("first steps" if step == 0 else "later steps") in case
        for (optimizer, variable), scale in both[::-1] if turned else both:
            variable.assign([1.0])
            optimizer.apply([keras.ops.convert_to_tensor([scale])], [variable])
    del held
    return [1.0 - float(variable.numpy()[0]) for variable in variables]


def error_of(steps: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (TensorFlow has its own)
        steps(*arguments)
    return str(caught.value)


def broadcast_two() -> None:
    """Ranks broadcast two in different orders: what is raised is for the caller."""
    import keras

    import horovod.keras as hvd

    variables = [keras.Variable([float(hvd.rank())], name="kernel") for _ in range(2)]

    def send(place: int) -> None:
        backend_of(keras).broadcast_variables([variables[place]], 0, hvd.global_process_set)

    def first() -> None:
        send(0)

    def second() -> None:
        send(1)

    for one in (first, second) if hvd.rank() == 0 else (second, first):
        one()


def of_two_models(folder: str, case: str = "") -> list[float]:
    """The same of two models by train_on_batch, one after another. case: as for `of_two`, or "loads": rank 0 has one
    from a file in place of the one that it has made, and "looks": it has loaded one besides; "one": there is no second;
    "reloads": rank 0 has the last one from a file after its first steps, and holds the other.
    """
    import keras

    import horovod.keras as hvd

    collectives.join(-1)  # so that steps count anew

    def make() -> Any:
        one = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        one.compile(keras.optimizers.SGD(1.0), loss=lambda _, output: keras.ops.sum(output))
        return one

    def make_first() -> Any:
        one = make()
        one.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), loss=one.loss)
        return one

    def make_second() -> Any:
        one = make()
        one.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), loss=one.loss)
        return one

    looked_at = []
    if hvd.rank() == 0 and ("looks" in case or "loads" in case):  # "reloads" too
        path = f"{folder}/one.keras"
        plain = make()
        plain.compile(keras.optimizers.SGD(1.0), loss="mae")
        plain.train_on_batch(np.zeros([1, 1]), np.zeros([1, 1]))
        plain.save(path)
        looked_at += [hvd.load_model(path)] if "looks" in case else []
    models = [make_first()] if "one" in case else [make_first(), make_second()]

    def load(place: int) -> None:
        loss = models[place].loss
        looked_at.extend([models[place]] if "reloads" in case else [])
        models[place] = hvd.load_model(path)
        models[place].compile(models[place].optimizer, loss=loss)

    if "loads" in case and "reloads" not in case and hvd.rank() == 0:
        load(0)
    for step in range(20 if "later steps" in case else 3):
        if "reloads" in case and step > 0 and hvd.rank() == 0:
            load(-1)
        both = list(zip(models, (1.0, 100.0), strict=False))
        turned = hvd.rank() == 1 and ("first steps" if step < 19 else "later steps") in case
        for model, scale in both[::-1] if turned else both:
            model.set_weights([np.ones([1, 1], np.float32)])
            model.train_on_batch(np.full([1, 1], scale, np.float32), np.zeros([1, 1], np.float32))
    return [1.0 - float(model.get_weights()[0][0, 0]) for model in models]
