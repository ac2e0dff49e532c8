"""TorchEstimator and TorchModel."""

from __future__ import annotations

import inspect
import io
import pickle
from typing import Any

import torch
from pyspark import keyword_only

from horovod.base.errors import TrainingCode
from horovod.spark.common.columns import Metadata
from horovod.spark.common.params import refused
from horovod.spark.torch.datamodule import PetastormDataModule
from horovod.spark.torch.modules import ModuleEstimator
from horovod.spark.torch.modules import TorchModel as TorchModel
from horovod.spark.torch.remote import Training, train


class TorchEstimator(ModuleEstimator):
    """Trains a torch.nn.Module.

    The optimizer is made of the model's parameters, with the learning rate of one process. Losses are functions of
    (output, label), given as `loss` or made on each rank by `loss_constructors`; metrics too. Inputs and labels are
    tensors of shape (rows,) for numbers and (rows, length) for vectors, if input_shapes and label_shapes don't say
    otherwise; floating ones get the type of the model's parameters. Where a label has as many numbers as the model's
    output, it gets its shape.
    """

    _framework = "pytorch"

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
        use_gpu: bool = True,
        mp_start_method: str | None = None,
        backward_passes_per_step: int = 1,
        data_module: Any = None,
        tensorflow_dataset_prefetch_buffer_size: int = 0,
    ) -> None:
        super().__init__()
        self._setDefault(
            input_shapes=None, loss_constructors=None, train_minibatch_fn=None, data_module=PetastormDataModule
        )
        self._set(**self._input_kwargs)  # None leaves a default as it is

    def _check_params(self, metadata: Metadata | None) -> None:
        super()._check_params(metadata)
        model = self.getOrDefault("model")
        if not isinstance(model, torch.nn.Module):
            raise refused(f"model must be a torch.nn.Module, not {type(model).__name__}.")
        if not self.getOrDefault("loss") and not self.getOrDefault("loss_constructors"):
            raise refused("Loss parameter is required: pass loss= or loss_constructors=.")
        if not isinstance(self.getOrDefault("optimizer"), torch.optim.Optimizer):
            raise refused("Optimizer parameter is required: pass optimizer=, a torch.optim.Optimizer of the model.")
        self._check_optimizer()
        self._check_closure()
        self._pickled()

    def _check_closure(self) -> None:
        """ValueError for an optimizer, such as LBFGS, that a step of this estimator can't call."""
        optimizer = self.getOrDefault("optimizer")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        is_needed = closure is not None and closure.default is closure.empty
        if is_needed and not self.getOrDefault("train_minibatch_fn"):
            raise refused(
                f"{type(optimizer).__name__} computes the loss several times in a step, by a closure: pass "
                "train_minibatch_fn=, which gives it one, or use another optimizer.",
                TrainingCode.CONTRADICTORY_ARGUMENTS,
            )

    def _load_checkpoint(self, run_id: str) -> dict[str, Any]:
        """The last checkpoint of a run: model, optimizer, epochs that are done, history, seed."""
        store = self.getOrDefault("store")
        content = io.BytesIO(store.read(store.get_checkpoint_path(run_id)))
        loaded: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
        return loaded

    def _check_checkpoint(self, run_id: str, checkpoint: dict[str, Any]) -> None:
        """ValueError unless the checkpoint is of this model and of this kind of optimizer."""
        model, optimizer = pickle.loads(self._pickled())  # noqa: S301 - a copy
        before, now = checkpoint["optimizer_class"], type(optimizer).__name__
        if before != now:
            raise self._other_than_before(run_id, "optimizer", f"that was {before}, and this is {now}")
        try:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise self._other_than_before(run_id, "model", str(error)) from error

    def _fit_on_prepared_data(
        self,
        backend: Any,
        train_rows: int,
        val_rows: int,
        metadata: Metadata,
        avg_row_size: float,
        dataset_idx: int | None = None,
    ) -> Any:
        get = self.getOrDefault
        run_id = self._get_or_create_run_id()
        checkpoint = self._load_checkpoint(run_id) if self._has_checkpoint(run_id) else None
        if checkpoint is not None:
            self._check_checkpoint(run_id, checkpoint)
            self._warn_if_done(run_id, checkpoint["epochs"])
        seed = checkpoint["seed"] if checkpoint is not None else self._seed()
        training = Training(
            model_and_optimizer=self._pickled(),
            checkpoint=checkpoint,
            input_shapes=get("input_shapes"),
            seed=seed,
            backward_passes_per_step=get("backward_passes_per_step"),
            train_minibatch=get("train_minibatch_fn"),
            **self._losses(),
            **self._common(run_id, seed, train_rows, val_rows, metadata, dataset_idx),
        )
        result = backend.run(train, args=(training,), env={})[0]
        return self._create_model(result, run_id, metadata)

    def _create_model(self, run_results: dict[str, Any], run_id: str, metadata: Metadata) -> Any:
        model, optimizer = pickle.loads(self._pickled())  # noqa: S301 - a copy
        content = torch.load(io.BytesIO(run_results["checkpoint"]), map_location="cpu", weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        metadata = self._with_results(metadata, run_results)
        arguments = self._get_model_kwargs(model.eval(), content["history"], optimizer, run_id, metadata)
        return self._made(self.get_model_class()(**arguments))
