"""Collectives on the tensors of Keras's backend, TensorFlow, PyTorch or JAX, of which only the one in use is imported.

A backend is a module of `adapters` with the functions and the class that `Backend` lists. The rooms of the frameworks
lie between this one and `adapters`, so that they can use what is here: modules here ask for an adapter by its name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from horovod.common.gradients import Reduction
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet
from horovod.common.unreduced import Steps

_MODULES: Final = {
    "tensorflow": "horovod._keras.adapters.tensorflow",
    "torch": "horovod._keras.adapters.torch",
    "jax": "horovod._keras.adapters.jax",
}


class Aggregation(Protocol):
    """Sums of the gradients of several backward passes, as horovod.tensorflow.aggregation has them."""

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        use: Callable[[list[Any]], object],
        skip: Callable[[], object],
    ) -> None: ...


class Backend(Protocol):
    """What all of this needs of a framework."""

    Aggregation: Callable[[int, bool, bool], Aggregation]

    # Whether reduced_but_local compares the ranks' optimizers.
    compares_steps: bool

    # optimizer: the one that will apply the gradients. Ranks compare the state that it holds
    # (common/counted_weights.py). made: its names on the wire (common/optimizer_numbers.py).
    def reduced_but_local(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        local: set[int],
        reduction: Reduction,
        optimizer: Any = None,
        made: Made | None = None,
    ) -> list[Any]: ...

    def agreed(
        self, gradients: Sequence[Any], variables: Sequence[Any], local: set[int], reduction: Reduction
    ) -> list[Any]: ...

    def broadcast_variables(self, variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> object: ...

    # Takes tensors, NumPy arrays and numbers; the results are tensors of the framework.
    def allreduce(
        self, value: Any, name: str | None, op: int, prescale: float, postscale: float, compression: Any
    ) -> Any: ...

    def barrier(self, process_set: ProcessSet) -> None: ...

    # After a plain optimizer has applied gradients in a loop of the script's own, or while that is traced: counts steps
    # (common/unreduced.py).
    def applied(self, optimizer: Any, steps: Steps, gradients: Sequence[Any]) -> None: ...

    # For layers, except TensorFlow's, which has its own: the gradient is the sum of the ranks' gradients.
    def differentiable_sum(self, value: Any, name: str) -> Any: ...

    def allgather(self, value: Any, name: str | None) -> Any: ...

    def broadcast(self, value: Any, root_rank: int, name: str | None) -> Any: ...

    def reducescatter(self, value: Any, name: str | None, op: int) -> Any: ...

    Compression: Any
    no_compression: Any

    # Of TensorFlow alone: distribute_tf_keras, for optimizers of Keras 2, and sync_batch_norm, its layer.


def backend_of(keras: Any) -> Any:
    """The backend of a Keras module: `keras`, or tf_keras, which has TensorFlow only. Raises ImportError."""
    name = keras.backend.backend() if hasattr(keras.backend, "backend") else "tensorflow"
    module = _MODULES.get(name)
    if module is None:
        raise ImportError(
            f"horovod.keras does not support Keras's backend {name!r} yet. Set KERAS_BACKEND to one of: "
            f"{', '.join(_MODULES)}."
        )
    return importlib.import_module(module)


def backend_for(value: Any) -> Any:
    """The backend that knows a value: that of its framework, for numbers and arrays Keras's. Raises ImportError."""
    framework = type(value).__module__.partition(".")[0].replace("jaxlib", "jax")
    if framework in _MODULES:
        return importlib.import_module(_MODULES[framework])
    keras = sys.modules.get("keras")  # if keras is not imported, there is only tf_keras
    return importlib.import_module(_MODULES["tensorflow"]) if keras is None else backend_of(keras)
