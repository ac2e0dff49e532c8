"""The training of a LightningModule on one rank: what the lightning TorchEstimator sends to all of them."""

from __future__ import annotations

import contextlib
import inspect
import io
import pickle
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from horovod.base.errors import TrainingCode
from horovod.spark.common.batches import Batches, share_of_validation
from horovod.spark.common.devices import gpu_of_rank, same_devices
from horovod.spark.common.params import refused
from horovod.spark.common.shapes import Shape
from horovod.spark.common.training import CommonTraining, Prediction
from horovod.spark.common.transform import kind_of
from horovod.spark.lightning.loaders import AsyncLoader, Loader
from horovod.spark.lightning.module import lightning_module
from horovod.spark.lightning.packages import import_lightning
from horovod.spark.lightning.strategy import EstimatorStrategy
from horovod.spark.torch.losses import Losses
from horovod.spark.torch.tensors import as_array, as_list, floating_type

RUN = "horovod"  # the entry of a checkpoint that says what of the run is done
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


@dataclass(kw_only=True)
class Training(CommonTraining):
    """All that a rank needs to know; it is pickled. Names are those of the estimator's parameters.

    model: pickled with its optimizer, which is None for a LightningModule. run: how many epochs are done, the history
    so far, and the seed.
    """

    package: str
    model: bytes
    checkpoint: bytes | None
    run: dict[str, Any]
    losses: Sequence[Any] | None
    loss_constructors: Sequence[Any] | None
    shapes: dict[str, Shape]
    trainer: dict[str, Any]
    queue_sizes: tuple[int | None, int | None]
    debug_data_loader: bool


def train(training: Training) -> dict[str, Any]:
    """Runs on all ranks. On rank 0 returns the checkpoint of the last epoch, and how predictions look."""
    import horovod.torch as hvd

    hvd.init()
    pl = import_lightning(training.package)
    number = gpu_of_rank() if training.use_gpu and torch.cuda.is_available() else None
    device = torch.device("cpu") if number is None else torch.device("cuda", number)
    same_devices(device.type, hvd.allgather_object)
    module = _module(training, pl, device)
    content = training.checkpoint
    if training.run["epochs"] < training.epochs:
        content = _fit(training, pl, module, number, device)
    if hvd.rank() != 0:
        return {}
    predictions = _predictions(training, module)
    return {"checkpoint": content, "predictions": predictions, "columns": training.train.looks}


def _fit(training: Training, pl: Any, module: Any, number: int | None, device: torch.device) -> bytes | None:
    """The checkpoint of the last epoch, on rank 0. number: of the GPU."""
    import horovod.torch as hvd

    strategy = EstimatorStrategy(device, training.gradient_compression, package=training.package.partition(".")[0])
    batches = training.data_module().batches(training.train, hvd.rank(), hvd.size())
    given = training.trainer.get("callbacks") or []
    callbacks = [*training.callbacks, *(given if isinstance(given, (list, tuple)) else [given])]
    with _folder(training, hvd.rank() == 0) as folder, tempfile.TemporaryDirectory() as scratch:
        for callback in callbacks:
            if isinstance(callback, pl.callbacks.ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = folder
        steps_class, keeper_class = _callback_classes(pl)
        keeper = keeper_class(training, folder)
        arguments: dict[str, Any] = {
            "accelerator": "cpu" if number is None else "gpu",
            "devices": 1 if number is None else [number],
            "strategy": strategy,
            "max_epochs": training.epochs,
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
            "enable_progress_bar": training.verbose > 0 and hvd.rank() == 0,
            "default_root_dir": scratch,
            **training.trainer,
            "enable_checkpointing": True,  # the keeper does it, and so Lightning adds no callback of its own
            "callbacks": [steps := steps_class(training, batches), *callbacks, keeper],
        }
        trainer = pl.Trainer(**arguments)
        loaders, resumed = _loaders(training, trainer, module, batches), _resumed(trainer, training, scratch)
        try:
            trainer.fit(module, *loaders, **resumed)
        except Exception as error:
            if resumed and not steps.has_begun:
                raise _not_resumed(error) from error
            raise
    content: bytes | None = keeper.content
    return content


def _module(training: Training, pl: Any, device: torch.device) -> Any:
    model, optimizer = pickle.loads(training.model)  # noqa: S301 - what the driver has sent
    if optimizer is None:
        return model
    functions = training.losses or [make() for make in training.loss_constructors or ()]
    losses = Losses(functions, training.loss_weights, device)
    columns = training.feature_columns, training.label_columns, training.weight_column
    return lightning_module(pl, model, optimizer, losses, *columns)


def _loaders(training: Training, trainer: Any, module: Any, batches: Batches) -> list[Any]:
    import horovod.torch as hvd

    dtype = floating_type(module)
    found: list[Any] = []
    sources = [batches]
    if training.val is not None:
        share = share_of_validation(training.val, hvd.rank(), hvd.size())
        sources.append(training.data_module().batches(training.val, *share))
    for source, queue_size in zip(sources, training.queue_sizes, strict=False):
        arguments = (source, lambda: trainer.current_epoch, dtype, training.shapes, training.label_columns)
        if queue_size:
            found.append(AsyncLoader(queue_size, training.debug_data_loader, *arguments))
        else:
            found.append(Loader(*arguments))
    return found


def _resumed(trainer: Any, training: Training, folder: str) -> dict[str, Any]:
    if training.checkpoint is None:
        return {}
    path = Path(folder, "resumed.ckpt")
    path.write_bytes(training.checkpoint)
    takes = inspect.signature(trainer.fit).parameters
    return {"ckpt_path": str(path), **({"weights_only": False} if "weights_only" in takes else {})}


def _not_resumed(error: Exception) -> ValueError:
    """The error where the checkpoint of a run does not load. Those of Lightning and PyTorch name what does not fit, and
    not that it comes from that checkpoint.
    """
    reason = " ".join(str(error).split()).rstrip(".")
    return refused(
        f"the run can't go on with its checkpoint: {type(error).__name__}: {reason}. Give the same model and "
        "optimizers to go on with it, or another run_id to begin anew.",
        TrainingCode.CONTRADICTORY_ARGUMENTS,
    )


@contextlib.contextmanager
def _folder(training: Training, is_first: bool) -> Iterator[str]:
    """Where callbacks write to: on rank 0 it is brought to the store."""
    if is_first and training.store.saving_runs:
        with training.store.get_local_output_dir() as folder:
            yield folder
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield folder


def _predictions(training: Training, module: Any) -> list[Prediction]:
    """How predictions look, by those of the first batch; empty where they are not made of its columns as they are."""
    batches = training.data_module().batches(training.train, 0, 1)
    loader = Loader(batches, lambda: 0, floating_type(module), training.shapes, training.label_columns)
    module = module.cpu().eval()
    batch = next(iter(loader))
    if not all(isinstance(batch.get(name), torch.Tensor) for name in training.feature_columns):
        return []  # text, or a column that transformation_fn has removed
    try:
        with torch.no_grad():
            return [
                kind_of(as_array(output))
                for output in as_list(module(*(batch[name] for name in training.feature_columns)))
            ]
    except Exception:
        # transform() looks again, and raises if nobody else says how to predict. No training is lost for that.
        traceback.print_exc()
        return []


def _callback_classes(pl: Any) -> tuple[type, type]:
    """Two classes of callbacks for the Trainer. The first is called before the user's callbacks, the second after
    them.
    """
    import horovod.torch as hvd

    class Steps(pl.callbacks.Callback):
        """Learning rates, seeds, scales of batches."""

        def __init__(self, training: Training, batches: Batches) -> None:
            self._run = training.run
            self._batches = batches
            self.has_begun = False  # all that a checkpoint has was loaded

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.has_begun = True
            # Here the state of a checkpoint has been loaded, whose rates are those of one process.
            if self._run["history"]:
                _step_plateaus(trainer.lr_scheduler_configs, self._run["history"][-1])
            for optimizer in trainer.optimizers:
                _scale(optimizer.param_groups, hvd.size())
            for config in trainer.lr_scheduler_configs:
                _scale_scheduler(vars(config.scheduler), hvd.size())

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            seed = self._run["seed"] + 1000 * trainer.current_epoch + hvd.rank()
            torch.manual_seed(seed % 2**63)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            trainer.strategy.scale = self._batches.scale(batch_idx)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            # As running means are those of a rank's own batches, all validate with those that are saved.
            hvd.broadcast_parameters(dict(module.named_buffers()), root_rank=0)

    class Keeper(pl.callbacks.Checkpoint):
        """Writes a checkpoint after each epoch. Lightning calls subclasses of Checkpoint after all other callbacks, so
        the checkpoint has the state that those have changed in this epoch.
        """

        def __init__(self, training: Training, folder: str) -> None:
            self._store = training.store
            self._folder = folder
            self._run = dict(training.run)
            self.content: bytes | None = None

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            """Validation is over, too."""
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            history = [*self._run["history"], {"epoch": trainer.current_epoch, **metrics}]
            self._run.update(epochs=trainer.current_epoch + 1, history=history)
            with tempfile.TemporaryDirectory() as scratch:
                path = Path(scratch, "epoch.ckpt")
                trainer.save_checkpoint(str(path), weights_only=False)  # all ranks; one writes
                if hvd.rank() == 0:
                    self.content = self._as_of_one_process(path)
            if hvd.rank() == 0 and self._store.saving_runs and self.content is not None:
                Path(self._folder, self._store.checkpoint_filename).write_bytes(self.content)
                self._store.sync(self._folder)

        def _as_of_one_process(self, path: Path) -> bytes:
            checkpoint = torch.load(path, map_location="cpu", weights_only=False)
            for state in checkpoint["optimizer_states"]:
                _scale(state["param_groups"], 1 / hvd.size())
            for state in checkpoint["lr_schedulers"]:
                _scale_scheduler(state, 1 / hvd.size())
            checkpoint[RUN] = self._run
            content = io.BytesIO()
            torch.save(checkpoint, content)
            return content.getvalue()

    return Steps, Keeper


def _step_plateaus(configs: Sequence[Any], last: dict[str, Any]) -> None:
    """Lightning steps ReduceLROnPlateau once the checkpoint of an epoch is written; here by the epoch's record."""
    for config in configs:
        is_due = config.reduce_on_plateau and config.interval == "epoch" and not (last["epoch"] + 1) % config.frequency
        if is_due and config.monitor in last:
            config.scheduler.step(last[config.monitor])


def _scale(groups: Sequence[dict[str, Any]], factor: float) -> None:
    for group in groups:
        for name in _RATES:
            if name in group:
                group[name] = group[name] * factor


def _scale_scheduler(state: dict[str, Any], factor: float) -> None:
    """The rates of a scheduler and of those that it is made of, as SequentialLR is: its attributes, or its state."""
    for name in ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "default_min_lr", "eta_min"):
        if name in state:
            rates = state[name]
            state[name] = [rate * factor for rate in rates] if isinstance(rates, list) else rates * factor
    for part in state.get("_schedulers", ()):
        _scale_scheduler(part if isinstance(part, dict) else vars(part), factor)
