"""KerasEstimator and KerasModel."""

from __future__ import annotations

import itertools
from typing import Any

from pyspark import keyword_only
from pyspark.ml.param import Param, Params

from horovod.spark.common.columns import Metadata, check_shape_compatibility
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from horovod.spark.common.params import accessors, refused
from horovod.spark.common.serialization import decode, encode
from horovod.spark.keras.datamodule import PetastormDataModule
from horovod.spark.keras.remote import KerasTrainer, KerasTraining
from horovod.spark.keras.tensors import KerasPredictor, predict_row, tensors_of, type_of
from horovod.spark.keras.util import (
    SavedModel,
    SavedOptimizer,
    check_readable,
    from_bytes,
    import_keras,
    keras_of,
    run_of,
)

# Hadoop's library makes a Java machine in each process that reads from HDFS.
_BACKEND_ENV = {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"}


class _Saved(Params):
    """Models and optimizers are saved in Keras's own formats."""

    def _encoded(self, name: str, value: Any) -> Any:
        custom_objects = self.getOrDefault("custom_objects")
        if name == "model":
            return encode(SavedModel.of(value, custom_objects))
        if name == "optimizer" and not isinstance(value, str):
            return encode(SavedOptimizer.of(keras_of(self.getOrDefault("model")), value, custom_objects))
        return encode(value)

    def _decoded(self, name: str, value: Any) -> Any:
        decoded = decode(value)
        return decoded.load() if isinstance(decoded, (SavedModel, SavedOptimizer)) else decoded


@accessors
class KerasEstimator(_Saved, HorovodEstimator):
    """Trains a model of Keras 3 or tf_keras.

    The model needs no compile(): optimizer, loss, loss_weights and metrics are parameters here, and mean what they mean
    there. The learning rate is that of one process. Inputs and labels get the shapes that the model's inputs and
    outputs have; label_shapes gives the shape of a label if it differs, as for the number of a class.
    """

    custom_objects: Any = Param(Params._dummy(), "custom_objects", "classes and functions of the model by name")
    checkpoint_callback: Any = Param(
        Params._dummy(), "checkpoint_callback", "Keras's ModelCheckpoint, or hvd.callbacks.BestModelCheckpoint"
    )
    data_module: Any = Param(Params._dummy(), "data_module", "class that reads the data")
    backend_env: Any = Param(Params._dummy(), "backend_env", "environment variables of the processes")

    _framework = "keras"
    _trainer = KerasTrainer
    _history = dict
    _of_models = ("custom_objects",)

    @keyword_only
    def __init__(
        self,
        *,
        num_proc: int | None = None,
        data_module: Any = None,
        model: Any = None,
        backend: Any = None,
        store: Any = None,
        custom_objects: dict[str, Any] | None = None,
        optimizer: Any = None,
        loss: Any = None,
        loss_weights: Any = None,
        sample_weight_col: str | None = None,
        gradient_compression: Any = None,
        compress_sparse_cols: bool = False,
        metrics: Any = None,
        feature_cols: list[str] | None = None,
        label_cols: list[str] | None = None,
        continuous_cols: list[str] | None = None,
        categorical_cols: list[str] | None = None,
        validation: Any = None,
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
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        transformation_fn: Any = None,
        transformation_edit_fields: Any = None,
        transformation_removed_fields: Any = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        reader_pool_type: str | None = None,
        label_shapes: Any = None,
        checkpoint_callback: Any = None,
        inmemory_cache_all: bool = False,
        backend_env: dict[str, str] | None = None,
        use_gpu: bool = True,
        mp_start_method: str | None = None,
        backward_passes_per_step: int = 1,
        tensorflow_dataset_prefetch_buffer_size: int = 0,
    ) -> None:
        super().__init__()
        self._setDefault(
            custom_objects={},
            checkpoint_callback=None,
            data_module=PetastormDataModule,
            backend_env=dict(_BACKEND_ENV),
        )
        self._set(**self._input_kwargs)

    def get_model_class(self) -> type:
        return KerasModel

    def _check_params(self, metadata: Metadata | None) -> None:
        super()._check_params(metadata)
        keras_of(self.getOrDefault("model"))
        if not self.getOrDefault("loss"):
            raise refused("Loss parameter is required: pass loss=, as for compile().")
        if not self.getOrDefault("optimizer"):
            raise refused("Optimizer parameter is required: pass optimizer=, as for compile().")
        if metadata is None:
            keras = import_keras(keras_of(self.getOrDefault("model")))
            for name in ("loss", "metrics"):
                check_readable(keras, name, self.getOrDefault(name), self.getOrDefault("custom_objects"))

    def _columns_of_numbers(self) -> list[str]:
        features = self.getOrDefault("feature_cols")
        inputs = tensors_of(self.getOrDefault("model"), "input", features)
        if len(inputs) == len(features):  # a model that begins with TextVectorization takes text
            features = [name for name, one in zip(features, inputs, strict=True) if type_of(one) != "string"]
        return [*features, *self._columns_of_the_loss()]

    def _check_shapes(self, metadata: Metadata) -> None:
        features, labels, label_shapes = (
            self.getOrDefault(name) for name in ("feature_cols", "label_cols", "label_shapes")
        )
        model = self.getOrDefault("model")
        inputs, outputs = _shapes(tensors_of(model, "input", features)), _shapes(tensors_of(model, "output", labels))
        check_shape_compatibility(metadata, features, labels, inputs, outputs, label_shapes)

    def _load_model_from_checkpoint(self, run_id: str) -> Any:
        """The model of the last checkpoint of a run, with its optimizer and that one's state."""
        keras = import_keras(keras_of(self.getOrDefault("model")))
        return from_bytes(keras, self._read_checkpoint(run_id), self.getOrDefault("custom_objects"), compiled=True)

    def _of_earlier_run(self, run_id: str) -> tuple[Any, dict[str, Any]]:
        saved, given = self._load_model_from_checkpoint(run_id), self.getOrDefault("model")
        shapes_of = [[tuple(weight.shape) for weight in model.weights] for model in (saved, given)]
        if given.built and shapes_of[0] != shapes_of[1]:
            unlike = [pair for pair in itertools.zip_longest(*shapes_of) if pair[0] != pair[1]]
            found = f"a weight of the shape {unlike[0][0]} was there, and {unlike[0][1]} is now"
            raise self._other_than_before(run_id, "model", found)
        optimizer = import_keras(keras_of(given)).optimizers.get(self.getOrDefault("optimizer"))
        # compile() may have put a LossScaleOptimizer around it.
        before, now = (type(getattr(one, "inner_optimizer", one)).__name__ for one in (saved.optimizer, optimizer))
        if before != now:
            raise self._other_than_before(run_id, "optimizer", f"that was {before}, and this is {now}")
        return saved, run_of(self._read_checkpoint(run_id))

    def _backend_env(self) -> dict[str, str]:
        env: dict[str, str] = self.getOrDefault("backend_env")
        return env

    def _training(self, checkpoint: Any, common: dict[str, Any]) -> KerasTraining:
        get, package, resumed = self.getOrDefault, keras_of(self.getOrDefault("model")), checkpoint is not None
        keras = import_keras(package)
        return KerasTraining(
            package=package,
            keras_backend=keras.backend.backend() if package == "keras" else "tensorflow",
            model=SavedModel.of(checkpoint if resumed else get("model"), get("custom_objects")),
            resumed=resumed,
            optimizer=SavedOptimizer.of(package, get("optimizer"), get("custom_objects")),
            loss=get("loss"),
            checkpoint_callback=get("checkpoint_callback"),
            prefetched=get("tensorflow_dataset_prefetch_buffer_size"),
            **common,
        )

    def _trained(self, content: bytes) -> tuple[Any, Any, Any]:
        keras = import_keras(keras_of(self.getOrDefault("model")))
        model = from_bytes(keras, content, self.getOrDefault("custom_objects"), compiled=True)
        return model, run_of(content)["history"], model.optimizer


@accessors
class KerasModel(_Saved, HorovodModel):
    """A trained model of Keras."""

    optimizer: Any = Param(Params._dummy(), "optimizer", "the optimizer, its state that of the end of the training")
    custom_objects: Any = Param(Params._dummy(), "custom_objects", "classes and functions of the model by name")

    @keyword_only
    def __init__(
        self,
        *,
        history: Any = None,
        model: Any = None,
        feature_columns: list[str] | None = None,
        label_columns: list[str] | None = None,
        optimizer: Any = None,
        custom_objects: dict[str, Any] | None = None,
        run_id: str | None = None,
        _metadata: Any = None,
    ) -> None:
        super().__init__()
        self._setDefault(optimizer=None, custom_objects={})
        self._set(**self._input_kwargs)

    def get_prediction_fn(self) -> Any:
        """(model, row) -> list of arrays, one for each label. Subclasses that replace it are asked row by row."""
        return predict_row(self.getOrDefault("feature_columns"), self.getOrDefault("label_columns"))

    def _predictor(self) -> KerasPredictor:
        model = self.getOrDefault("model")
        columns = self.getOrDefault("feature_columns"), self.getOrDefault("label_columns")
        return KerasPredictor(SavedModel.of(model, self.getOrDefault("custom_objects")), *columns)


def _shapes(tensors: Any) -> list[tuple[int | None, ...]] | None:
    """None where a model learns its shapes from data, or has one that only data know."""
    if not tensors:
        return None
    found = [tuple(tensor.shape) for tensor in tensors]
    return None if any(None in shape[1:] for shape in found) else found
