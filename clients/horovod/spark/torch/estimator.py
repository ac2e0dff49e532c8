"""TorchEstimator and TorchModel."""

from __future__ import annotations

import io
import warnings
from typing import Any

import cloudpickle
import torch
from pyspark import keyword_only
from pyspark.ml.param import Param, Params

from horovod.base.errors import TrainingCode
from horovod.spark.common import shapes, util
from horovod.spark.common.accessors import accessors
from horovod.spark.common.columns import Metadata
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from horovod.spark.common.params import refused
from horovod.spark.torch.datamodule import PetastormDataModule
from horovod.spark.torch.prediction import TorchPredictor, predict_row
from horovod.spark.torch.remote import Training, train


@accessors
class TorchEstimator(HorovodEstimator):
    """Trains a torch.nn.Module.

    The optimizer is made of the model's parameters, with the learning rate of one process. Losses are functions of
    (output, label), given as `loss` or made on each rank by `loss_constructors`; metrics too. Inputs and labels are
    tensors of shape (rows,) for numbers and (rows, length) for vectors, if input_shapes and label_shapes don't say
    otherwise; floating ones get the type of the model's parameters. Where a label has as many numbers as the model's
    output, it gets its shape.
    """

    input_shapes: Any = Param(Params._dummy(), "input_shapes", "shape of each input, -1 for the batch")
    loss_constructors: Any = Param(Params._dummy(), "loss_constructors", "functions that make the losses on each rank")
    train_minibatch_fn: Any = Param(
        Params._dummy(),
        "train_minibatch_fn",
        "a step: (model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights) -> (outputs, loss)",
    )
    data_module: Any = Param(Params._dummy(), "data_module", "class that reads the data")

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

    def get_model_class(self) -> type:
        """What fit() returns an object of."""
        return TorchModel

    def _get_model_kwargs(
        self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Metadata
    ) -> dict[str, Any]:
        """The arguments of that class."""
        return {
            "history": history,
            "model": model,
            "optimizer": optimizer,
            "feature_columns": self.getOrDefault("feature_cols"),
            "label_columns": self.getOrDefault("label_cols"),
            "input_shapes": self.getOrDefault("input_shapes"),
            "run_id": run_id,
            "_metadata": metadata,
            "loss": self.getOrDefault("loss"),
            "loss_constructors": self.getOrDefault("loss_constructors"),
        }

    def _check_params(self, metadata: Metadata | None) -> None:
        super()._check_params(metadata)
        model, loss, constructors = (self.getOrDefault(name) for name in ("model", "loss", "loss_constructors"))
        if not isinstance(model, torch.nn.Module):
            raise refused(f"model must be a torch.nn.Module, not {type(model).__name__}.")
        if loss and constructors:
            raise refused(
                "loss and loss_constructors are both given. Leave one out.", TrainingCode.CONTRADICTORY_ARGUMENTS
            )
        if not loss and not constructors:
            raise refused("Loss parameter is required: pass loss= or loss_constructors=.")
        if not isinstance(self.getOrDefault("optimizer"), torch.optim.Optimizer):
            raise refused("Optimizer parameter is required: pass optimizer=, a torch.optim.Optimizer of the model.")
        for functions in (loss, constructors):
            if functions:
                util.to_list(functions, len(self.getOrDefault("label_cols")))

    def _check_shapes(self, metadata: Metadata) -> None:
        features, labels, inputs, label_shapes = (
            self.getOrDefault(name) for name in ("feature_cols", "label_cols", "input_shapes", "label_shapes")
        )
        shapes.check_shape_compatibility(metadata, features, labels, input_shapes=inputs, label_shapes=label_shapes)

    def _load_checkpoint(self, run_id: str) -> dict[str, Any]:
        """The last checkpoint of a run: model, optimizer, epochs that are done, history, seed."""
        store = self.getOrDefault("store")
        content = io.BytesIO(store.read(store.get_checkpoint_path(run_id)))
        loaded: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
        return loaded

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
        if checkpoint is not None and checkpoint["epochs"] >= get("epochs"):
            warnings.warn(
                f"the run {run_id!r} has done its {checkpoint['epochs']} epochs already, so nothing is trained: ask for"
                " more epochs to go on, or for another run_id to begin anew.",
                stacklevel=2,
            )
        seed = checkpoint["seed"] if checkpoint is not None else self._seed()
        train_source, val_source = self._sources(train_rows, val_rows, metadata, seed, dataset_idx)
        labels = get("label_cols")
        training = Training(
            # One pickle, so that the optimizer's parameters are those of the model.
            model_and_optimizer=cloudpickle.dumps((get("model"), get("optimizer"))),
            checkpoint=checkpoint,
            train=train_source,
            val=val_source,
            feature_columns=get("feature_cols"),
            label_columns=labels,
            weight_column=get("sample_weight_col"),
            input_shapes=get("input_shapes"),
            label_shapes=get("label_shapes"),
            losses=util.to_list(get("loss"), len(labels)) if get("loss") else None,
            loss_constructors=util.to_list(get("loss_constructors"), len(labels)),
            loss_weights=get("loss_weights"),
            metrics=get("metrics"),
            callbacks=get("callbacks"),
            epochs=get("epochs"),
            seed=seed,
            backward_passes_per_step=get("backward_passes_per_step"),
            gradient_compression=get("gradient_compression"),
            train_minibatch=get("train_minibatch_fn"),
            data_module=get("data_module"),
            use_gpu=get("use_gpu"),
            verbose=get("verbose"),
            store=get("store").to_remote(run_id, dataset_idx),
        )
        result = backend.run(train, args=(training,), env={})[0]
        return self._create_model(result, run_id, metadata)

    def _create_model(self, run_results: dict[str, Any], run_id: str, metadata: Metadata) -> Any:
        model, optimizer = cloudpickle.loads(
            cloudpickle.dumps((self.getOrDefault("model"), self.getOrDefault("optimizer")))
        )
        content = torch.load(io.BytesIO(run_results["checkpoint"]), map_location="cpu", weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        metadata = {name: dict(column) for name, column in metadata.items()}
        for label, kind in zip(self.getOrDefault("label_cols"), run_results["predictions"], strict=False):
            metadata[label]["prediction"] = tuple(kind)
        arguments = self._get_model_kwargs(model.eval(), content["history"], optimizer, run_id, metadata)
        return self.get_model_class()(**arguments)


@accessors
class TorchModel(HorovodModel):
    """A trained torch.nn.Module. It predicts in evaluation mode."""

    optimizer: Any = Param(Params._dummy(), "optimizer", "the optimizer, its state that of the end of the training")
    input_shapes: Any = Param(Params._dummy(), "input_shapes", "shape of each input, -1 for the batch")
    loss: Any = Param(Params._dummy(), "loss", "the loss that it was trained with")
    loss_constructors: Any = Param(Params._dummy(), "loss_constructors", "functions that made the losses")

    @keyword_only
    def __init__(
        self,
        *,
        history: Any = None,
        model: Any = None,
        feature_columns: list[str] | None = None,
        label_columns: list[str] | None = None,
        input_shapes: Any = None,
        optimizer: Any = None,
        run_id: str | None = None,
        _metadata: Any = None,
        loss: Any = None,
        loss_constructors: Any = None,
    ) -> None:
        super().__init__()
        self._setDefault(optimizer=None, input_shapes=None, loss=None, loss_constructors=None)
        self._set(**self._input_kwargs)

    def get_prediction_fn(self) -> Any:
        """(model, row) -> list of tensors, one for each label. Subclasses that replace it are asked row by row."""
        return predict_row(self.getOrDefault("feature_columns"), self.getOrDefault("input_shapes"))

    def _predictor(self) -> TorchPredictor:
        return TorchPredictor(cloudpickle.dumps(self.getOrDefault("model").cpu()), self.getOrDefault("input_shapes"))

    def _row_model(self) -> Any:
        return self.getOrDefault("model").cpu().eval()
