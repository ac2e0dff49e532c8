"""BestModelCheckpoint: Keras's ModelCheckpoint whose path is set later, by who knows it."""

from __future__ import annotations

from typing import Any

from horovod.base.errors import TrainingCode, coded


class BestModel:
    """The mixin; Keras's ModelCheckpoint comes second."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        # Keras refuses a path without the ending for what is saved.
        path: Any = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(
            filepath=path,  # type: ignore[call-arg]
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def _save_model(self, *arguments: Any, **options: Any) -> None:
        if self.filepath is None:
            raise ValueError(
                coded(
                    TrainingCode.INVALID_ARGUMENT,
                    "BestModelCheckpoint does not know where to save to. Set its attribute `filepath` first.",
                )
            )
        super()._save_model(*arguments, **options)  # type: ignore[misc]
