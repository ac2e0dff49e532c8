"""What an epoch begins with, and its validation: the same in a run that is resumed, and weights alike on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod._keras.backends import backend_of
from horovod.common.process_sets import global_process_set


def epochs_callback(keras: Any, seed: int, rank: int) -> Any:
    """A callback for fit(), to be called before those of the user."""

    class Epochs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            """Random numbers depend on seed, epoch and rank alone. Keras saves no generators of layers with a model."""
            generators = [one for layer in self.model._flatten_layers() for one in _generators(layer)]
            words = np.random.SeedSequence((seed % 2**32, epoch, rank)).generate_state(1 + len(generators))
            keras.utils.set_random_seed(int(words[0]))
            for generator, word in zip(generators, words[1:], strict=True):
                generator.state.assign(np.array([word, 0], np.uint32))

        def on_test_begin(self, logs: Any = None) -> None:
            """As running means of a BatchNormalization are those of a rank's own batches, all validate with rank 0's,
            which are saved.
            """
            backend_of(keras).broadcast_variables(_statistics(self.model), 0, global_process_set)

    return Epochs()


def _generators(layer: Any) -> list[Any]:
    """Those of Keras 3; tf_keras has none with a state that could be set."""
    return list(getattr(layer, "_seed_generators", ()))


def _statistics(model: Any) -> list[Any]:
    """Running means and variances, as of BatchNormalization, without those of frozen layers, which never change."""
    frozen = {id(one) for layer in model._flatten_layers() if not layer.trainable for one in layer.weights}
    return [one for one in model.non_trainable_weights if id(one) not in frozen]
