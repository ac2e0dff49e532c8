"""The training of an estimator on its ranks: the orders for all of them, and the work that no framework changes.

Training   made by the driver (estimator.py), and pickled; a framework adds fields
train      runs on all ranks: devices of one kind, the rank's batches, the epochs that are left, the result
Trainer    the work of a framework: TorchTrainer, LightningTrainer, KerasTrainer (their remote.py)
"""

from __future__ import annotations

import contextlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from horovod.base.errors import TrainingCode, coded
from horovod.spark.common.batches import Batches, Source, share_of_validation
from horovod.spark.common.columns import Shape
from horovod.spark.common.store.base import RemoteStore
from horovod.spark.common.transform import kind_of
from horovod.spark.common.transformation import Batch

# Numbers in a row of a prediction, and whether they may have a fraction.
Prediction = tuple[int, bool]


@dataclass(kw_only=True)
class Training:
    """Names are those of the estimator's parameters.

    model: as the framework sends it. run: "epochs" that are done, their "history", and the "seed"; it is a part of each
    checkpoint.
    """

    model: Any
    run: dict[str, Any]
    train: Source
    val: Source | None
    feature_columns: Sequence[str]
    label_columns: Sequence[str]
    weight_column: str | None
    label_shapes: Sequence[Shape] | None
    loss_weights: Any
    metrics: Sequence[Any]
    callbacks: Sequence[Any]
    epochs: int
    backward_passes_per_step: int
    gradient_compression: Any
    data_module: type
    use_gpu: bool
    verbose: int
    store: RemoteStore


class Trainer(ABC):
    """A framework's model on one rank. `train` calls the abstract methods in this order, hvd.init() before them."""

    def __init__(self, training: Any) -> None:
        """A framework that is to be imported in a certain way is imported here."""
        self.training = training
        self.run: dict[str, Any] = dict(training.run)
        self.folder = ""  # during fit(); on rank 0, `keep` brings the files that are written here to the store
        self.kept: bytes | None = None  # the last checkpoint of this fit()

    @abstractmethod
    def choose_device(self) -> str:
        """Has the rank use its device, and returns of which kind that is, such as "cuda"."""

    @abstractmethod
    def load(self) -> None:
        """Makes the model and its optimizer: as they begin, or as the checkpoint has them."""

    @abstractmethod
    def fit(self, train: Batches, val: Batches | None) -> None:
        """Trains the epochs that are left. After each, rank 0 says what is `done`, and keeps a checkpoint of it."""

    @abstractmethod
    def predicted(self, batch: Batch) -> Sequence[np.ndarray]:
        """The model's predictions for a batch, by labels; [] if they can't be known. On rank 0."""

    @abstractmethod
    def checkpoint(self) -> bytes:
        """The bytes of which the estimator makes its model. On rank 0."""

    def predictions(self, train: Batches) -> list[Prediction]:
        """How predictions look, by those of the first batch."""
        for batch, _, _ in train.of_epoch(0):
            return [kind_of(one) for one in self.predicted(batch)]
        return []

    def done(self, epoch: int, history: Any) -> None:
        """This epoch is over; history: of all that are."""
        self.run.update(epochs=epoch + 1, history=history)

    def keep(self, content: bytes) -> None:
        """The checkpoint of the epoch that is over."""
        self.kept = content
        store = self.training.store
        if store.saving_runs:
            Path(self.folder, store.checkpoint_filename).write_bytes(content)
            store.sync(self.folder)


def train(kind: type[Trainer], training: Training) -> dict[str, Any]:
    """Runs on all ranks. On rank 0 returns the checkpoint of the last epoch, and how predictions and columns look."""
    from horovod.common import basics  # here, since a driver needs no engine
    from horovod.common.ops.objects import allgather_object

    trainer = kind(training)
    basics.init()
    same_devices(trainer.choose_device(), lambda kind: allgather_object(kind, "spark.devices"))
    trainer.load()
    module, rank, size = training.data_module(), basics.rank(), basics.size()
    batches: Batches = module.batches(training.train, rank, size)
    val: Batches | None = None
    if training.val is not None:
        val = module.batches(training.val, *share_of_validation(training.val, rank, size))
    if training.run["epochs"] < training.epochs:
        with _output_folder(training.store, rank == 0) as trainer.folder:
            trainer.fit(batches, val)
    if rank != 0:
        return {}
    predictions = trainer.predictions(batches)
    return {"checkpoint": trainer.checkpoint(), "predictions": predictions, "columns": training.train.looks}


@contextlib.contextmanager
def _output_folder(store: RemoteStore, is_first: bool) -> Iterator[str]:
    """The folder for the files of a rank. Those of other ranks than the first, as of callbacks, are removed."""
    own = store.get_local_output_dir if is_first and store.saving_runs else tempfile.TemporaryDirectory
    with own() as folder:
        yield folder


def gpu_of_rank() -> int:
    """The GPU that Spark has given to the task, or else the one with the number of the rank on its host."""
    from horovod.common import basics
    from horovod.spark.task import get_available_devices

    given = get_available_devices()
    return int(given[0]) if given else basics.local_rank()


def same_devices(kind: str, allgather: Callable[[str], list[Any]]) -> None:
    """RuntimeError, on all ranks, unless all train on devices of one kind."""
    kinds = allgather(kind)
    if len(set(kinds)) > 1:
        found = ", ".join(f"rank {rank} has {one}" for rank, one in enumerate(kinds))
        sentence = f"ranks would train on unlike devices: {found}. Give all tasks a GPU, or pass use_gpu=False."
        raise RuntimeError(coded(TrainingCode.CONTRADICTORY_ARGUMENTS, sentence))
