"""What tests of Keras 3 on every backend run on two ranks: a step by an optimizer, by whatever call, reduces once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_codes import ends_with

from horovod.base.errors import TrainingCode

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
def of_two(same_order: bool, made_otherwise: bool = False) -> list[float]:
    """What both subtract in a step, of gradients that are 1 and 100 on all ranks."""
    import keras

    import horovod.keras as hvd

    def make_first() -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))

    def make_second() -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))

    makers = [make_first, make_second]
    made = {maker: maker() for maker in (makers[::-1] if made_otherwise and hvd.rank() == 1 else makers)}
    variables = [keras.Variable([1.0], name="kernel") for _ in makers]
    pairs = [(made[maker], variable) for maker, variable in zip(makers, variables, strict=True)]
    for _ in range(3):
        both = list(zip(pairs, (1.0, 100.0), strict=True))
        for (optimizer, variable), scale in both if same_order or hvd.rank() == 0 else both[::-1]:
            variable.assign([1.0])
            optimizer.apply([keras.ops.convert_to_tensor([scale])], [variable])
    return [1.0 - float(variable.numpy()[0]) for variable in variables]


def error_of_two(same_order: bool, made_otherwise: bool) -> str:
    from horovod.common.ops import collectives

    collectives.join(-1)  # so that steps count anew
    with pytest.raises(Exception) as caught:  # noqa: PT011  (TensorFlow has its own)
        of_two(same_order, made_otherwise)
    return str(caught.value)
