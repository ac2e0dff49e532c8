"""Which Keras an object belongs to, and so how its optimizer becomes a distributed one.

Of packages that are not imported there are no objects.
"""

from __future__ import annotations

import sys
from typing import Any

from horovod._keras import copies
from horovod._keras.backends import backend_of
from horovod._keras.keras3 import distribute_keras3
from horovod._keras.plain_optimizers import watch_models
from horovod.common.gradients import Reduction, Taken, refuse
from horovod.common.optimizer_numbers import Made


def is_keras3_optimizer(optimizer: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and _is_keras3(keras) and isinstance(optimizer, keras.optimizers.Optimizer)


def is_tf_keras_optimizer(optimizer: Any) -> bool:
    tf_keras = sys.modules.get("tf_keras") or sys.modules.get("keras")
    if tf_keras is None or _is_keras3(tf_keras):
        return False
    return isinstance(optimizer, (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer))


def distributed_keras(
    optimizer: Any,
    reduction: Reduction,
    passes: int = 1,
    average: bool = False,
    name: str | None = None,
    made: Made | None = None,
) -> Any:
    """A distributed optimizer of whichever Keras; ValueError for what is none. made: of one that is a copy."""
    watch_models()
    if is_keras3_optimizer(optimizer):
        copies.install_keras3(distributed_keras)
        return distribute_keras3(optimizer, reduction, passes, average, backend_of(sys.modules["keras"]), name, made)
    if is_tf_keras_optimizer(optimizer):
        keras = sys.modules.get("tf_keras") or sys.modules["keras"]
        copies.install_tf_keras(keras, distributed_keras)
        backend = backend_of(keras)
        return backend.distribute_tf_keras(optimizer, reduction, passes, average, backend, name, made)
    known = (sys.modules.get(name) for name in ("keras", "tf_keras"))
    taken = Taken(
        "an optimizer of Keras",
        "keras.optimizers.SGD(learning_rate=0.01)",
        tuple(keras.optimizers.Optimizer for keras in known if keras is not None),
        "(learning_rate=...)",
    )
    raise refuse(optimizer, "hvd.DistributedOptimizer", taken, ValueError)


def register_local_var(optimizer: Any, variable: Any) -> None:
    """Of a distributed optimizer, or of one in a LossScaleOptimizer."""
    inner = optimizer if hasattr(optimizer, "register_local_var") else optimizer.inner_optimizer
    inner.register_local_var(variable)


def _is_keras3(keras: Any) -> bool:
    return not str(getattr(keras, "__version__", "")).startswith("2.")
