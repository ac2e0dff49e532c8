"""TorchEstimator and TorchModel; and ModuleEstimator, the base of Lightning's TorchEstimator as well."""

from __future__ import annotations

import inspect
import io
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from pyspark import keyword_only
from pyspark.ml.param import Param, Params

from horovod.base.errors import TrainingCode
from horovod.spark.common import util
from horovod.spark.common.columns import Metadata, check_shape_compatibility
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from horovod.spark.common.params import accessors, refused
from horovod.spark.torch.datamodule import PetastormDataModule
from horovod.spark.torch.remote import TorchTrainer, TorchTraining
from horovod.spark.torch.tensors import TorchPredictor, predict_row


@dataclass(frozen=True)
class _Pair:
    """Saved as one, so that the optimizer's parameters are those of the model."""

    model: Any
    optimizer: Any


@accessors
class ModuleEstimator(HorovodEstimator):
    """Trains a torch.nn.Module."""

    _of_models = ("input_shapes", "loss", "loss_constructors")

    input_shapes: Any = Param(Params._dummy(), "input_shapes", "shape of each input, -1 for the batch")
    loss_constructors: Any = Param(Params._dummy(), "loss_constructors", "functions that make the losses on each rank")
    train_minibatch_fn: Any = Param(
        Params._dummy(),
        "train_minibatch_fn",
        "a step: (model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights) -> (outputs, loss)",
    )
    data_module: Any = Param(Params._dummy(), "data_module", "class that reads the data")

    def get_model_class(self) -> type:
        return TorchModel

    def _check_params(self, metadata: Metadata | None) -> None:
        super()._check_params(metadata)
        loss, constructors = self.getOrDefault("loss"), self.getOrDefault("loss_constructors")
        if loss and constructors:
            raise refused(
                "loss and loss_constructors are both given. Leave one out.", TrainingCode.CONTRADICTORY_ARGUMENTS
            )
        self._losses()

    def _check_optimizer(self) -> None:
        """ValueError if the optimizer is of another model's parameters: it would train nothing."""
        own = {id(parameter) for parameter in self.getOrDefault("model").parameters()}
        groups = self.getOrDefault("optimizer").param_groups
        if not all(id(parameter) in own for group in groups for parameter in group["params"]):
            raise refused(
                "the optimizer has parameters that are not the model's. Make it from model.parameters(), and "
                "pass a new optimizer with each new model.",
                TrainingCode.CONTRADICTORY_ARGUMENTS,
            )

    def _check_shapes(self, metadata: Metadata) -> None:
        features, labels, inputs, label_shapes = (
            self.getOrDefault(name) for name in ("feature_cols", "label_cols", "input_shapes", "label_shapes")
        )
        check_shape_compatibility(metadata, features, labels, input_shapes=inputs, label_shapes=label_shapes)

    def _losses(self) -> dict[str, Any]:
        """The losses of all labels, or the functions that make them."""
        labels = len(self.getOrDefault("label_cols"))
        return {
            "losses": util.to_list(self.getOrDefault("loss") or None, labels),
            "loss_constructors": util.to_list(self.getOrDefault("loss_constructors") or None, labels),
        }

    def _to_save(self, values: dict[str, Any]) -> dict[str, Any]:
        values = dict(values)
        if "optimizer" in values:
            values["model"] = _Pair(values.get("model"), values.pop("optimizer"))
        return values

    def _from_saved(self, values: dict[str, Any]) -> dict[str, Any]:
        pair = values.get("model")
        return {**values, "model": pair.model, "optimizer": pair.optimizer} if isinstance(pair, _Pair) else values

    def _pickled(self) -> bytes:
        """Model and optimizer in one pickle, so that the optimizer's parameters are those of the model."""
        return self._sent("model", (self.getOrDefault("model"), self.getOrDefault("optimizer")))


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


class TorchEstimator(ModuleEstimator):
    """Trains a torch.nn.Module.

    The optimizer is made of the model's parameters, with the learning rate of one process. Losses are functions of
    (output, label), given as `loss` or made on each rank by `loss_constructors`; metrics too. Inputs and labels are
    tensors of shape (rows,) for numbers and (rows, length) for vectors, if input_shapes and label_shapes don't say
    otherwise; floating ones get the type of the model's parameters. If a label has as many numbers as the model's
    output, it gets its shape.
    """

    _framework = "pytorch"
    _trainer = TorchTrainer

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
        return _loaded(self._read_checkpoint(run_id))

    def _of_earlier_run(self, run_id: str) -> tuple[Any, dict[str, Any]]:
        checkpoint = self._load_checkpoint(run_id)
        model, optimizer = pickle.loads(self._pickled())  # noqa: S301 - a copy
        before, now = checkpoint["optimizer_class"], type(optimizer).__name__
        if before != now:
            raise self._other_than_before(run_id, "optimizer", f"that was {before}, and this is {now}")
        try:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise self._other_than_before(run_id, "model", str(error)) from error
        return checkpoint, {name: checkpoint[name] for name in ("epochs", "history", "seed")}

    def _training(self, checkpoint: Any, common: dict[str, Any]) -> TorchTraining:
        return TorchTraining(
            model=self._pickled(),
            checkpoint=checkpoint,
            input_shapes=self.getOrDefault("input_shapes"),
            train_minibatch=self.getOrDefault("train_minibatch_fn"),
            **self._losses(),
            **common,
        )

    def _trained(self, content: bytes) -> tuple[Any, Any, Any]:
        checkpoint = _loaded(content)
        model, optimizer = pickle.loads(self._pickled())  # noqa: S301 - a copy
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        return model.eval(), checkpoint["history"], optimizer


def _loaded(content: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return loaded
