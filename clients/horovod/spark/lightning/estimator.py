"""The lightning TorchEstimator and its TorchModel."""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import torch
from pyspark import keyword_only
from pyspark.ml.param import Param, Params

from horovod.base.errors import TrainingCode
from horovod.spark.common.columns import Metadata
from horovod.spark.common.params import accessors, refused
from horovod.spark.lightning.legacy import MIN_PL_VERSION as MIN_PL_VERSION
from horovod.spark.lightning.legacy import import_lightning, package_of
from horovod.spark.lightning.remote import RUN, LightningTrainer, LightningTraining
from horovod.spark.torch.estimator import ModuleEstimator
from horovod.spark.torch.estimator import TorchModel as TorchModel

_OPTIONAL = (
    "input_shapes",
    "loss_constructors",
    "train_minibatch_fn",
    "num_gpus",
    "logger",
    "data_module",
    "loader_num_epochs",
    "profiler",
    "trainer_args",
    "train_async_data_loader_queue_size",
    "val_async_data_loader_queue_size",
)


@accessors
class TorchEstimator(ModuleEstimator):
    """Trains a LightningModule, of `lightning` or of `pytorch_lightning`, or a torch.nn.Module with optimizer and loss.

    A batch is a dict of tensors by column. They have the shapes of input_shapes and label_shapes, else (rows,) for
    numbers and (rows, length) for vectors; floating ones have the type of the model's parameters. Learning rates are
    those of one process. Predictions are what forward() returns for the feature columns.
    """

    _trainer = LightningTrainer

    num_gpus: Any = Param(Params._dummy(), "num_gpus", "kept for scripts that set it: each rank has one GPU")
    logger: Any = Param(Params._dummy(), "logger", "logger of the Trainer")
    log_every_n_steps: Any = Param(Params._dummy(), "log_every_n_steps", "steps between two entries of the logger")
    loader_num_epochs: Any = Param(Params._dummy(), "loader_num_epochs", "kept for scripts: data never run out")
    terminate_on_nan: Any = Param(Params._dummy(), "terminate_on_nan", "whether NaN in gradients is an error")
    profiler: Any = Param(Params._dummy(), "profiler", "profiler of the Trainer")
    trainer_args: Any = Param(Params._dummy(), "trainer_args", "other arguments of the Trainer; they come first")
    debug_data_loader: Any = Param(Params._dummy(), "debug_data_loader", "whether loaders say who waited for whom")
    train_async_data_loader_queue_size: Any = Param(
        Params._dummy(), "train_async_data_loader_queue_size", "batches that a thread makes ahead; default: none"
    )
    val_async_data_loader_queue_size: Any = Param(
        Params._dummy(), "val_async_data_loader_queue_size", "the same for validation"
    )

    _framework = "pytorch_lightning"
    _takes_all_columns = True

    @keyword_only
    def __init__(
        self,
        *,
        num_proc: int | None = None,
        model: Any = None,
        backend: Any = None,
        store: Any = None,
        optimizer: Any = None,
        loss: Any = None,
        loss_constructors: Any = None,
        metrics: Any = None,
        loss_weights: Any = None,
        sample_weight_col: str | None = None,
        gradient_compression: Any = None,
        compress_sparse_cols: bool = False,
        feature_cols: list[str] | None = None,
        continuous_cols: list[str] | None = None,
        categorical_cols: list[str] | None = None,
        input_shapes: Any = None,
        validation: Any = None,
        label_cols: list[str] | None = None,
        callbacks: Any = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int = 1,
        random_seed: int | None = None,
        shuffle_buffer_size: int | None = None,
        shuffle: bool = True,
        partitions_per_process: int | None = None,
        run_id: str | None = None,
        train_minibatch_fn: Any = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        transformation_fn: Any = None,
        transformation_edit_fields: Any = None,
        transformation_removed_fields: Any = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        reader_pool_type: str | None = None,
        label_shapes: Any = None,
        inmemory_cache_all: bool = False,
        num_gpus: int | None = None,
        logger: Any = None,
        log_every_n_steps: int = 50,
        data_module: Any = None,
        loader_num_epochs: int | None = None,
        terminate_on_nan: bool = False,
        profiler: Any = None,
        trainer_args: dict[str, Any] | None = None,
        debug_data_loader: bool = False,
        train_async_data_loader_queue_size: int | None = None,
        val_async_data_loader_queue_size: int | None = None,
        use_gpu: bool = True,
        mp_start_method: str | None = None,
        backward_passes_per_step: int = 1,
        tensorflow_dataset_prefetch_buffer_size: int = 0,
    ) -> None:
        super().__init__()
        self._setDefault(**dict.fromkeys(_OPTIONAL))
        self._setDefault(log_every_n_steps=50, terminate_on_nan=False, debug_data_loader=False)
        self._set(**self._input_kwargs)

    def _check_params(self, metadata: Metadata | None) -> None:
        super()._check_params(metadata)
        model, optimizer, loss = (self.getOrDefault(name) for name in ("model", "optimizer", "loss"))
        constructors, weights = self.getOrDefault("loss_constructors"), self.getOrDefault("loss_weights")
        if not isinstance(model, torch.nn.Module):
            raise refused(f"model must be a LightningModule or a torch.nn.Module, not {type(model).__name__}.")
        import_lightning(package_of(model))
        both = TrainingCode.CONTRADICTORY_ARGUMENTS
        if package_of(model) is not None:
            given = {"optimizer": optimizer, "loss": loss, "loss_constructors": constructors, "loss_weights": weights}
            if names := [name for name, value in given.items() if value]:
                raise refused(f"a LightningModule has its own {', '.join(names)}: leave them out.", both)
        elif not isinstance(optimizer, torch.optim.Optimizer) or not (loss or constructors):
            raise refused("a torch.nn.Module needs optimizer= and loss=; a LightningModule has both.")
        else:
            self._check_optimizer()
        if self.getOrDefault("train_minibatch_fn"):
            raise refused("train_minibatch_fn is not for Lightning: write the module's training_step.", both)

    def _columns_of_numbers(self) -> list[str]:
        # A LightningModule gets text as lists, and may make numbers of them itself.
        return [] if package_of(self.getOrDefault("model")) is not None else super()._columns_of_numbers()

    def _of_earlier_run(self, run_id: str) -> tuple[Any, dict[str, Any]]:
        """The file, and its entry that says what is done.

        It is written anew, so that ranks may load whatever there is in it. ValueError if there are objects in it which
        run code when they are loaded. No key outlives a run, so whoever may write to the store may have written it.
        """
        content = self._read_checkpoint(run_id)
        try:
            loaded: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            raise refused(
                f"the run {run_id!r} can't continue from its checkpoint in the store, which holds more than "
                f"tensors, numbers and texts ({found[1] if found else 'objects'}): loading it could run code "
                "of the user who wrote it. If only users of this job can write to the store, allow the "
                "classes of your callbacks' states with torch.serialization.add_safe_globals([...]) before "
                "fit(). Otherwise pass another run_id to start a new run.",
                TrainingCode.UNTRUSTED_CHECKPOINT,
            ) from error
        copy = io.BytesIO()
        torch.save(loaded, copy)
        return copy.getvalue(), loaded.get(RUN, {})

    def _training(self, checkpoint: Any, common: dict[str, Any]) -> LightningTraining:
        get = self.getOrDefault
        shaped = dict(zip(get("feature_cols"), get("input_shapes") or (), strict=False))
        shaped |= dict(zip(get("label_cols"), get("label_shapes") or (), strict=False))
        return LightningTraining(
            package=package_of(get("model")) or import_lightning().__name__,
            model=self._pickled(),
            checkpoint=checkpoint,
            shapes=shaped,
            trainer=self._trainer_arguments(),
            queue_sizes=(get("train_async_data_loader_queue_size"), get("val_async_data_loader_queue_size")),
            debug_data_loader=get("debug_data_loader"),
            **self._losses(),
            **common,
        )

    def _trainer_arguments(self) -> dict[str, Any]:
        get = self.getOrDefault
        return {
            "logger": get("logger") or False,
            "log_every_n_steps": get("log_every_n_steps"),
            "detect_anomaly": get("terminate_on_nan"),
            "profiler": get("profiler"),
            "accumulate_grad_batches": get("backward_passes_per_step"),
            **(get("trainer_args") or {}),
        }

    def _trained(self, content: bytes) -> tuple[Any, Any, Any]:
        # Lightning's checkpoints have objects of the user's callbacks in them. The ranks of this run have written it.
        checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        model, optimizer = pickle.loads(self._pickled())  # noqa: S301 - a copy
        state = checkpoint["state_dict"]
        if optimizer is not None:  # the module was wrapped in one that has it as `model`
            state = {name.removeprefix("model."): value for name, value in state.items()}
            optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        model.load_state_dict(state)
        return model.eval(), checkpoint[RUN]["history"], optimizer
