"""Callbacks for `fit`: hvd.callbacks.BroadcastGlobalVariablesCallback(0) and so on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

from horovod._keras import callbacks as shared
from horovod._keras.callbacks import *  # noqa: F403
from horovod._keras.callbacks import BestModel, classes_for

globals().update(classes_for(keras, __name__, shared))

if not TYPE_CHECKING:
    __all__ = [*shared.__all__, "BestModelCheckpoint"]  # noqa: PLE0604


class BestModelCheckpoint(BestModel, keras.callbacks.ModelCheckpoint):
    """Saves the best model so far to `filepath`, an attribute to be set before training.

    >>> best = hvd.callbacks.BestModelCheckpoint(monitor="val_loss")
    >>> best.filepath = "best.keras"
    >>> model.fit(images, labels, validation_data=held_out, callbacks=[best])
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        super().__init__(monitor, verbose, save_weights_only, mode, save_freq)
