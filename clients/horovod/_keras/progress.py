"""How far an elastic training is where `fit` begins to count again.

After an interruption `fit` is called once more: it counts the batches of the epoch from 0, though some of them are
done, and a script may let it count the epochs from 0 as well. UpdateBatchStateCallback and UpdateEpochStateCallback
know better, and write here what the other callbacks of the same `fit` read, in whatever order the script lists them:

    on_train_begin           every callback of ours forgets what an earlier fit of the model left
    on_epoch_begin           the Update callbacks write
    on_train_batch_begin     the others read
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Final


@dataclass
class Progress:
    """What `fit` does not count. All zero in a `fit` without the Update callbacks."""

    state: Any = None  # the elastic state, if there is one
    batches: int = 0  # batches of the running epoch that were trained before this fit
    epochs: int = 0  # epochs before this fit, without those that initial_epoch has told it of


_OF_MODELS: Final[weakref.WeakKeyDictionary[Any, Progress]] = weakref.WeakKeyDictionary()


def begins(model: Any) -> None:
    """A `fit` of the model begins."""
    _OF_MODELS.pop(model, None)


def written(model: Any, state: Any) -> Progress:
    """The progress of the running fit, for a callback that writes it. state: the elastic state that it is of."""
    progress = _OF_MODELS.setdefault(model, Progress())
    progress.state = state
    return progress


def progress_of(model: Any) -> Progress:
    """The progress of the running fit, to be read."""
    return _OF_MODELS.get(model) or Progress()
