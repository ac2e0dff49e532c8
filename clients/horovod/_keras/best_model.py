"""BestModelCheckpoint: Keras's ModelCheckpoint whose path is set later, by who knows it.

In elastic training each world is another `fit`, for which scripts make their callbacks anew. A new callback would take
the first model that it sees for the best one, and write it over a better one. So the best value is kept for the elastic
state.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from horovod._keras.progress import progress_of
from horovod.base.errors import TrainingCode, coded

# Elastic state -> (metric, path) -> the best value so far.
_BEST: Final[weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Any]]] = weakref.WeakKeyDictionary()


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
        state = progress_of(self.model).state  # type: ignore[attr-defined]
        best = {} if state is None else _BEST.setdefault(state, {})
        place = (self.monitor, str(self.filepath))  # type: ignore[attr-defined]
        if place in best:
            self.best = best[place]
        super()._save_model(*arguments, **options)  # type: ignore[misc]
        best[place] = self.best
