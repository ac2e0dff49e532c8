"""Keras's jit_compile="auto" on a machine with a GPU: not for models whose gradients we reduce.

With a GPU "auto" means XLA, which compiles the step for the GPU, where our operations are not (docs/adr/0049). Keras
decides in compile() by `model_supports_jit`, which no optimizer is asked by; hence it is replaced, once. On machines
without a GPU, and for optimizers that are not distributed, its answer stays what it was.
"""

from __future__ import annotations

from typing import Any

from horovod._keras.optimizer import is_distributed

_MARK = "_hvd_asks_the_optimizer"


def install() -> None:
    """Replaces model_supports_jit in the Keras that is imported, if it runs on TensorFlow."""
    import keras
    from keras.src.trainers import trainer

    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    original = getattr(trainer, "model_supports_jit", None)
    if original is None or hasattr(original, _MARK):
        return  # a Keras without it may choose XLA, which says which operation it can't compile

    def model_supports_jit(model: Any) -> bool:
        if is_distributed(getattr(model, "optimizer", None)) and tf.config.list_physical_devices("GPU"):
            return False
        return bool(original(model))

    setattr(model_supports_jit, _MARK, True)
    trainer.model_supports_jit = model_supports_jit
