"""The training of a LightningModule on one rank, as the lightning TorchEstimator sends it to all of them.

Lightning has the epochs. It gets loaders that read the rank's batches, a strategy, and two callbacks: one before those
of the user, and one after them, which keeps the checkpoints.
"""

from __future__ import annotations

import inspect
import io
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from horovod.base.errors import TrainingCode
from horovod.common import basics as hvd
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.lightning import HorovodStrategy
from horovod.spark.common.batches import Batches
from horovod.spark.common.columns import Shape, of_row
from horovod.spark.common.params import refused
from horovod.spark.common.transformation import Batch
from horovod.spark.lightning.legacy import import_lightning, lightning_module
from horovod.spark.torch.ranks import ModuleTrainer, ModuleTraining, scale_rates, share_buffers
from horovod.spark.torch.tensors import as_array, as_list, as_tensor, floating_type
from horovod.torch.compression import Compression

RUN = "horovod"  # the entry of a checkpoint that says what of the run is done


@dataclass(kw_only=True)
class LightningTraining(ModuleTraining):
    """model: with None in place of an optimizer if it is a LightningModule. checkpoint: one of Lightning's files."""

    package: str
    shapes: dict[str, Shape]
    trainer: dict[str, Any]
    queue_sizes: tuple[int | None, int | None]
    debug_data_loader: bool


class LightningTrainer(ModuleTrainer):
    """A LightningModule on one rank, of `lightning` or of `pytorch_lightning`."""

    training: LightningTraining

    def load(self) -> None:
        training = self.training
        self.pl = import_lightning(training.package)
        self.module, optimizer = self.unpickled()
        if optimizer is not None:
            columns = training.feature_columns, training.label_columns, training.weight_column
            self.module = lightning_module(self.pl, self.module, optimizer, self.losses(), *columns)

    def fit(self, train: Batches, val: Batches | None) -> None:
        training, pl = self.training, self.pl
        package = training.package.partition(".")[0]
        strategy = EstimatorStrategy(self.device, training.gradient_compression, package=package)
        given = training.trainer.get("callbacks") or []
        callbacks = [*training.callbacks, *(given if isinstance(given, (list, tuple)) else [given])]
        for callback in callbacks:
            if isinstance(callback, pl.callbacks.ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = self.folder
        first, last = _callbacks(self, train)
        with tempfile.TemporaryDirectory() as scratch:
            arguments: dict[str, Any] = {
                "accelerator": "cpu" if self.device.type == "cpu" else "gpu",
                "devices": 1 if self.device.index is None else [self.device.index],
                "strategy": strategy,
                "max_epochs": training.epochs,
                "use_distributed_sampler": False,
                "num_sanity_val_steps": 0,
                "enable_model_summary": False,
                "enable_progress_bar": training.verbose > 0 and hvd.rank() == 0,
                "default_root_dir": scratch,
                **training.trainer,
                "enable_checkpointing": True,  # `last` does it, and so Lightning adds no callback of its own
                "callbacks": [first, *callbacks, last],
            }
            trainer = pl.Trainer(**arguments)
            loaders = [
                _Loader(source, queue_size, trainer, self)
                for source, queue_size in zip((train, val), training.queue_sizes, strict=True)
                if source is not None
            ]
            resumed = _resumed(trainer, training.checkpoint, scratch)
            try:
                trainer.fit(self.module, *loaders, **resumed)
            except Exception as error:
                if resumed and not first.has_begun:
                    raise _not_resumed(error) from error
                raise

    def checkpoint(self) -> bytes:
        content: bytes = self.kept or self.training.checkpoint
        return content

    def predicted(self, batch: Batch) -> Sequence[np.ndarray]:
        """Empty where predictions are not made of the columns of a batch as they are."""
        module = self.module.cpu().eval()
        tensors = self.tensors(batch, floating_type(module))
        features = [tensors.get(name) for name in self.training.feature_columns]
        if not all(isinstance(one, torch.Tensor) for one in features):
            return []  # text, or a column that transformation_fn has removed
        try:
            with torch.no_grad():
                return [as_array(output) for output in as_list(module(*features))]
        except Exception:
            # transform() looks again, and raises if nobody else says how to predict. No training is lost for that.
            traceback.print_exc()
            return []

    def tensors(self, batch: Batch, dtype: torch.dtype) -> dict[str, Any]:
        """A batch as a LightningModule gets it: by column. Floating numbers get `dtype`, whole ones of labels int64."""
        return {name: self._tensor(name, array, dtype) for name, array in batch.items()}

    def _tensor(self, name: str, array: np.ndarray, dtype: torch.dtype) -> Any:
        if array.dtype == object:
            return list(array)  # text
        tensor = as_tensor(array)
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        elif name in self.training.label_columns and tensor.dtype != torch.bool:
            tensor = tensor.long()
        shape = self.training.shapes.get(name)
        return tensor if shape is None else tensor.reshape(len(tensor), *of_row(shape))


class _Loader(AsyncDataLoaderMixin, BaseDataLoader):
    """The loader over which Lightning iterates: one iteration is its current epoch."""

    def __init__(self, batches: Batches, queue_size: int | None, trainer: Any, rank: LightningTrainer) -> None:
        super().__init__(queue_size or 0, rank.training.debug_data_loader)
        self._batches, self._trainer, self._rank = batches, trainer, rank
        self._dtype = floating_type(rank.module)

    def __len__(self) -> int:
        return self._batches.steps

    def _iterate(self) -> Iterator[dict[str, Any]]:
        for batch, _, _ in self._batches.of_epoch(self._trainer.current_epoch):
            yield self._rank.tensors(batch, self._dtype)


class EstimatorStrategy(HorovodStrategy):
    """The HorovodStrategy of horovod.lightning, on the device that the rank has been given.

    `scale` is the factor for the loss of the next batch (Batches.scale).

    package: "lightning" or "pytorch_lightning".
    """

    scale = 1.0

    def __init__(self, device: torch.device, compression: Any, package: str) -> None:
        super().__init__(compression=compression or Compression.none, package=package)
        self._device = device

    def set_world_ranks(self) -> None:
        """Spark says which GPU is whose, and not the number of the rank on its host."""
        rank_zero_only.rank = hvd.rank()

    @property
    def root_device(self) -> torch.device:
        return self._device

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.scale != 1.0:
            closure_loss = closure_loss * self.scale
        return super().backward(closure_loss, *args, **kwargs)


def _resumed(trainer: Any, checkpoint: bytes | None, folder: str) -> dict[str, Any]:
    if checkpoint is None:
        return {}
    path = Path(folder, "resumed.ckpt")
    path.write_bytes(checkpoint)
    takes = inspect.signature(trainer.fit).parameters
    return {"ckpt_path": str(path), **({"weights_only": False} if "weights_only" in takes else {})}


def _not_resumed(error: Exception) -> ValueError:
    """The error where the checkpoint of a run does not load. Those of Lightning and PyTorch name what does not fit, and
    not that it comes from that checkpoint.
    """
    reason = " ".join(str(error).split()).rstrip(".")
    return refused(
        f"the run can't continue from its checkpoint: {type(error).__name__}: {reason}. Pass the same model "
        "and optimizers to continue the run, or another run_id to start a new one.",
        TrainingCode.CONTRADICTORY_ARGUMENTS,
    )


def _callbacks(rank: LightningTrainer, batches: Batches) -> tuple[Any, Any]:
    """Two callbacks for the Trainer. The first is called before the user's callbacks, the second after them."""
    pl: Any = rank.pl
    size = hvd.size()

    class Steps(pl.callbacks.Callback):
        """Learning rates, seeds, scales of batches."""

        has_begun = False  # all that a checkpoint has was loaded

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.has_begun = True
            # Here the state of a checkpoint has been loaded, whose rates are those of one process.
            if rank.run["history"]:
                _step_plateaus(trainer.lr_scheduler_configs, rank.run["history"][-1])
            for optimizer in trainer.optimizers:
                scale_rates(optimizer.param_groups, times=size)
            for config in trainer.lr_scheduler_configs:
                _scale_scheduler(vars(config.scheduler), times=size)

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            seed = rank.run["seed"] + 1000 * trainer.current_epoch + hvd.rank()
            torch.manual_seed(seed % 2**63)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            trainer.strategy.scale = batches.scale(batch_idx)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            share_buffers(module)

    class Kept(pl.callbacks.Checkpoint):
        """Keeps a checkpoint after each epoch. Lightning calls subclasses of Checkpoint after all other callbacks, so
        the checkpoint has the state that those have changed in this epoch.
        """

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            """Validation is over, too."""
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            epoch = trainer.current_epoch
            rank.done(epoch, [*rank.run["history"], {"epoch": epoch, **metrics}])
            with tempfile.TemporaryDirectory() as scratch:
                path = Path(scratch, "epoch.ckpt")
                trainer.save_checkpoint(str(path), weights_only=False)  # all ranks; one writes
                if hvd.rank() == 0:
                    rank.keep(self._as_of_one_process(path))

        def _as_of_one_process(self, path: Path) -> bytes:
            checkpoint = torch.load(path, map_location="cpu", weights_only=False)
            for state in checkpoint["optimizer_states"]:
                scale_rates(state["param_groups"], over=size)
            for state in checkpoint["lr_schedulers"]:
                _scale_scheduler(state, over=size)
            checkpoint[RUN] = rank.run
            content = io.BytesIO()
            torch.save(checkpoint, content)
            return content.getvalue()

    return Steps(), Kept()


def _step_plateaus(configs: Sequence[Any], last: dict[str, Any]) -> None:
    """Lightning steps ReduceLROnPlateau once the checkpoint of an epoch is written; here by the epoch's record."""
    for config in configs:
        is_due = config.reduce_on_plateau and config.interval == "epoch" and not (last["epoch"] + 1) % config.frequency
        if is_due and config.monitor in last:
            config.scheduler.step(last[config.monitor])


def _scale_scheduler(state: dict[str, Any], times: float = 1, over: float = 1) -> None:
    """The rates of a scheduler and of those that it is made of, as SequentialLR is: its attributes, or its state."""
    for name in ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "default_min_lr", "eta_min"):
        if name in state:
            rates = state[name]
            state[name] = [rate * times / over for rate in rates] if isinstance(rates, list) else rates * times / over
    for part in state.get("_schedulers", ()):
        _scale_scheduler(part if isinstance(part, dict) else vars(part), times, over)
