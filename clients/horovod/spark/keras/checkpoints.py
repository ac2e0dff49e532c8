"""What is kept of a training with Keras after each epoch: the model as it would be without Horovod."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from horovod.spark.keras.files import to_bytes, with_run


class Rates:
    """The learning rate: in training that of one process times the number of ranks, in files that of one process."""

    def __init__(self, keras: Any, optimizer: Any, factor: int) -> None:
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # that of a LossScaleOptimizer
        self._factor = factor
        schedule = getattr(self._optimizer, "_learning_rate", None)
        self._schedule = schedule if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule) else None
        self._scaled = _scaled_schedule(keras, self._schedule, factor) if self._schedule is not None else None
        self._of_file: tuple[float, float] | None = None  # the rate that restore() has set, and what it was

    def scale(self) -> None:
        """For training."""
        if self._schedule is not None:
            self._optimizer._learning_rate = self._scaled
            return
        rate = float(self._optimizer.learning_rate)
        # The rate that was, and not a multiple that may be rounded to another one than the other ranks have.
        given, training = self._of_file or (rate, rate * self._factor)
        self._optimizer.learning_rate = training if rate == given else rate * self._factor

    def restore(self) -> None:
        """For a file."""
        if self._schedule is not None:
            self._optimizer._learning_rate = self._schedule
            return
        rate = float(self._optimizer.learning_rate)
        self._optimizer.learning_rate = rate / self._factor
        self._of_file = float(self._optimizer.learning_rate), rate


def _scaled_schedule(keras: Any, schedule: Any, factor: int) -> Any:
    class Scaled(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return schedule(step) * factor

        def get_config(self) -> dict[str, Any]:
            raise NotImplementedError("files have the schedule of one process")

    return Scaled()


class Keeper:
    """Writes the checkpoint of rank 0 after each epoch, and has the result."""

    def __init__(self, keras: Any, store: Any, run: dict[str, Any], rates: Rates, checkpoint_callback: Any) -> None:
        self._keras = keras
        self._store = store
        self._run = run
        self._rates = rates
        self._given = checkpoint_callback
        self._kept: bytes | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def callbacks(self, rank: int) -> list[Any]:
        """What fit() is to call, last of all; a given callback saves to a file of its own."""
        keeper = self
        base: Any = self._keras.callbacks.Callback

        class Unscaled(base):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                keeper._rates.restore()

        class Kept(base):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                if keeper._given is not None:
                    keeper._rates.scale()
                keeper.after(self.model, epoch, logs or {})

        if rank != 0:
            return []
        if self._given is None:
            return [Kept()]
        self._folder = tempfile.TemporaryDirectory()
        self._given.filepath = str(Path(self._folder.name, "checkpoint.keras"))
        return [Unscaled(), self._given, Kept()]

    def after(self, model: Any, epoch: int, logs: dict[str, Any]) -> None:
        """The epoch is over."""
        history = {name: list(values) for name, values in self._run["history"].items()}
        for name, value in logs.items():
            history.setdefault(name, []).append(float(value))
        self._run.update(epochs=epoch + 1, history=history)
        content = self._of_callback() if self._given is not None else self._content(model)
        if content is None:
            return
        self._kept = with_run(content, self._run)
        if self._store.saving_runs:
            with self._store.get_local_output_dir() as directory:
                Path(directory, self._store.checkpoint_filename).write_bytes(self._kept)
                self._store.sync(directory)

    def _of_callback(self) -> bytes | None:
        """What the given callback has saved now; None where this epoch was not to its liking."""
        path = Path(self._given.filepath)
        if not path.exists():
            return None
        content = path.read_bytes()
        path.unlink()
        return content

    def result(self, model: Any) -> bytes:
        """What a given callback has saved last, else the model as it is: when a training ends, callbacks may change it,
        as EarlyStopping(restore_best_weights=True) does.
        """
        if self._given is not None and self._kept is not None:
            return self._kept
        return with_run(self._content(model), self._run)

    def _content(self, model: Any) -> bytes:
        self._rates.restore()
        try:
            return to_bytes(model)
        finally:
            self._rates.scale()
