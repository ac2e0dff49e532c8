"""Callbacks for `fit`: hvd.callbacks.BroadcastGlobalVariablesCallback(0) and so on.

They are for the Keras that tf.keras is: Keras 3, or tf_keras with TF_USE_LEGACY_KERAS=1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horovod._keras import callbacks as shared
from horovod._keras.callbacks import *  # noqa: F403
from horovod._keras.callbacks import BestModel, classes_for

keras: Any = tf.keras
globals().update(classes_for(keras, __name__, shared))

if not TYPE_CHECKING:
    __all__ = [*shared.__all__, "BestModelCheckpoint"]  # noqa: PLE0604


class BestModelCheckpoint(BestModel, keras.callbacks.ModelCheckpoint):
    """Saves the best model so far to `filepath`, an attribute to be set before training.

    >>> best = hvd.callbacks.BestModelCheckpoint(monitor="val_loss")
    >>> best.filepath = "best.keras"
    >>> model.fit(images, labels, validation_data=held_out, callbacks=[best])
    """
