"""What both TorchEstimators do alike: that of horovod.spark.torch and that of horovod.spark.lightning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cloudpickle
from pyspark import keyword_only
from pyspark.ml.param import Param, Params

from horovod.base.errors import TrainingCode
from horovod.spark.common import shapes, util
from horovod.spark.common.columns import Metadata
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from horovod.spark.common.params import accessors, refused
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
                "the optimizer has parameters that are not the model's: make it of model.parameters(), and set it anew "
                "with each model.",
                TrainingCode.CONTRADICTORY_ARGUMENTS,
            )

    def _check_shapes(self, metadata: Metadata) -> None:
        features, labels, inputs, label_shapes = (
            self.getOrDefault(name) for name in ("feature_cols", "label_cols", "input_shapes", "label_shapes")
        )
        shapes.check_shape_compatibility(metadata, features, labels, input_shapes=inputs, label_shapes=label_shapes)

    def _losses(self) -> dict[str, Any]:
        """Those of all labels, or what makes them."""
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
