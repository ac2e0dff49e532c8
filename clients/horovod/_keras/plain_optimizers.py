"""Models that are trained by an optimizer that is not distributed, of any Keras.

A script may compile a model with a distributed optimizer and then put another into `model.optimizer`: that is known
when `fit` begins. Or it may have made none: then steps are counted (common/unreduced.py). All ways in which Keras
trains a model ask `make_train_function` for their step. It is replaced, once, by hvd.init() and
hvd.DistributedOptimizer. Loops of a script's own apply gradients by a method of the optimizer, which hvd.init()
replaces.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from horovod._keras.backends import backend_of
from horovod._keras.optimizer import distribution_in, is_distributed
from horovod.base.errors import TrainingCode, coded
from horovod.common import unreduced
from horovod.common.script import level_of_the_script
from horovod.common.unreduced import Steps, Trained, least_bytes, steps_of
from horovod.worker.runtime.context import current, is_member

_MARK = "_hvd_looks_at_the_optimizer"


def watch_models() -> None:
    """Those of each Keras that is imported."""
    for name in ("keras", "tf_keras"):
        if (model := getattr(sys.modules.get(name), "Model", None)) is not None:
            _watch(model)


def _watch(model_class: Any) -> None:
    original = model_class.make_train_function
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def make_train_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        _look_at_optimizer(self)
        return _counted(self, original(self, *args, **kwargs))

    setattr(make_train_function, _MARK, True)
    model_class.make_train_function = make_train_function


unreduced.when_in_a_world(watch_models, "keras", "tf_keras")


def _look_at_optimizer(model: Any) -> None:
    """Warns of a plain optimizer in place of the distributed one; a setting makes it a ValueError."""
    used = getattr(model, "optimizer", None)
    compiled = getattr(getattr(model, "_compile_config", None), "config", {}).get("optimizer")
    distribution = distribution_in(compiled)
    if distribution is None or used is None or is_distributed(used):
        return
    if type(model).train_step.__module__.partition(".")[0] not in ("keras", "tf_keras"):
        return  # the script's own, in which a tape may reduce
    reduction, context = distribution.reduction, current()
    setting = context.settings.different_weights
    if setting == "ignore" or not reduction.communicates():
        return
    kind = type(used).__name__
    sentence = coded(
        TrainingCode.NOT_DISTRIBUTED,
        f"The model was compiled with a distributed {type(compiled).__name__}, but model.optimizer is a plain {kind} "
        "now, so each rank trains its own model. Call model.compile() with hvd.DistributedOptimizer(...) of the "
        "new optimizer. If this is meant, set HOROVOD_DIFFERENT_WEIGHTS=ignore.",
    )
    if setting == "error":
        raise ValueError(sentence)
    if context.world.rank == (reduction.process_set.ranks or [0])[0]:
        warnings.warn(sentence, stacklevel=level_of_the_script())


# -- no distributed optimizer anywhere ---------------------------------------------------------------------------------
_steps: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()  # by model
_in_train_function: Final = ContextVar("_in_train_function", default=False)  # True in a model's counted steps
_least_bytes: Final[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()  # by optimizer of a model


def _counted(model: Any, made: Any) -> Any:
    """The train function to return: `made`, or one that counts the steps of the model while these are of interest."""
    run = getattr(model, "train_function", None)
    if run is None or isinstance(run, _Counted) or unreduced.watch.is_over or not is_member():
        return made
    reference = weakref.ref(model)
    steps = _steps.setdefault(model, Steps(lambda: _trained(reference())))
    model.train_function = counted = _Counted(reference, run, steps)
    return counted if made is run else made


class _Counted:
    """A `train_function` of a model."""

    def __init__(self, model: Callable[[], Any], run: Any, steps: Steps) -> None:
        self._model, self._run, self._steps = model, run, steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _in_train_function.set(True)
        try:
            found = self._run(*args, **kwargs)
        finally:
            _in_train_function.reset(token)
        model = self._model()
        self._steps.add(_batches_of_a_call(model))
        if unreduced.watch.is_over and model is not None and model.train_function is self:
            model.train_function = self._run
        return found

    def __getattr__(self, name: str) -> Any:
        if name == "_run":  # while it is copied
            raise AttributeError(name)
        return getattr(self._run, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._run, memo)


def _batches_of_a_call(model: Any) -> int:
    given: Any = getattr(model, "steps_per_execution", None) or getattr(model, "_steps_per_execution", None)
    return int(given.numpy() if hasattr(given, "numpy") else given or 1)


def _trained(model: Any) -> Trained | None:
    if model is None or model.optimizer is None or _is_reduced_by_keras(model):
        return None
    # Of an optimizer in another one, as for scaled losses, whose `apply` it calls.
    applies = getattr(model.optimizer, "inner_optimizer", None) or model.optimizer
    known = _least_bytes.get(applies)
    return Trained(
        type(model.optimizer).__name__,
        sum(math.prod(one.shape) for one in model.trainable_variables) if known is None else known,  # a byte each
        "Write model.compile(hvd.DistributedOptimizer(optimizer), ...).",
    )


def _is_reduced_by_keras(model: Any) -> bool:
    """By tf.distribute, or, on PyTorch and JAX, by what keras.distribution and torch.distributed do."""
    strategy = getattr(model, "distribute_strategy", None)
    return (strategy is not None and strategy.num_replicas_in_sync > 1) or _is_reduced_by_the_backend()


def _is_reduced_by_the_backend() -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    distribution = getattr(sys.modules.get("keras"), "distribution", None)
    return distribution is not None and getattr(distribution, "distribution", lambda: None)() is not None


# -- loops of the script's own -----------------------------------------------------------------------------------------
def _watch_optimizers() -> None:
    """Those of each Keras that is imported, on a backend that shows steps."""
    for name in ("keras", "tf_keras"):
        optimizers = getattr(sys.modules.get(name), "optimizers", None)
        if optimizers is None:
            continue
        try:
            applied = backend_of(sys.modules[name]).applied
        except ImportError:
            continue
        if hasattr(optimizers.Optimizer, "apply"):
            unreduced.replace(optimizers.Optimizer, "apply", functools.partial(_apply, applied))
            continue
        for kind in (optimizers.Optimizer, optimizers.legacy.Optimizer):
            unreduced.replace(kind, "apply_gradients", functools.partial(_apply_gradients, applied))


unreduced.when_in_a_world(_watch_optimizers, "keras", "tf_keras")


def _apply(applied: Any, original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Of Keras 3."""
    grads = list(grads)
    variables = None if trainable_variables is None else list(trainable_variables)
    result = original(optimizer, grads, variables)
    _applied(applied, optimizer, grads, optimizer._trainable_variables if variables is None else variables)
    return result


def _apply_gradients(
    applied: Any, original: Any, optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any
) -> Any:
    """Of Keras 2."""
    pairs = list(grads_and_vars)
    result = original(optimizer, pairs, *args, **kwargs)
    _applied(applied, optimizer, [pair[0] for pair in pairs], [pair[1] for pair in pairs])
    return result


def _applied(applied: Any, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    if not _in_train_function.get():
        applied(optimizer, _steps_of(optimizer, gradients, variables), gradients)
    elif optimizer not in _least_bytes:  # a trace, or the first step: which gradients are sparse is known here alone
        _least_bytes[optimizer] = least_bytes(gradients, [variable.shape for variable in variables])


def _steps_of(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> Steps:
    def trained() -> Trained | None:
        if _is_reduced_by_the_backend():
            return None
        return Trained(
            type(optimizer).__name__,
            least_bytes(gradients, [variable.shape for variable in variables]),
            "Write optimizer = hvd.DistributedOptimizer(optimizer), or, with TensorFlow, "
            "tape = hvd.DistributedGradientTape(tape) before tape.gradient(...).",
        )

    return steps_of(optimizer, trained)
