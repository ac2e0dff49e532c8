"""The estimator of any framework: prepares data, checks, runs the training on all ranks, makes a model of it.

    fit(df)            the DataFrame goes to the store as Parquet files, which are trained on
    fit_on_parquet()   the files are in the store already
    transform(df)      the model's predictions as new columns (transform.py)

A run is a folder of the store with a name, run_id. Its checkpoint is written after each epoch; fitting with the run_id
of a run that has one goes on behind it, until `epochs` are done.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import cloudpickle
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Params
from pyspark.sql import DataFrame

from horovod.base.errors import DataCode, OperationCode, TrainingCode
from horovod.spark.common import util
from horovod.spark.common.backend import Backend, SparkBackend
from horovod.spark.common.batches import FiniteColumns, NVTabularDataModule, PetastormDataModule, Source, sparse_sizes
from horovod.spark.common.columns import Metadata, without_text
from horovod.spark.common.params import TRANSFORMATION, EstimatorParams, ModelParams, check_validation, refused
from horovod.spark.common.preparation import check_rows
from horovod.spark.common.serialization import Saved
from horovod.spark.common.store.filesystem import AbstractFilesystemStore
from horovod.spark.common.training import Prediction, Trainer, Training, train
from horovod.spark.common.transform import transformed
from horovod.spark.common.transformation import Transformation, nullable_of

# Parameters that ranks get as they are.
_PASSED_ON: Final = (
    "loss_weights",
    "label_shapes",
    "metrics",
    "callbacks",
    "epochs",
    "backward_passes_per_step",
    "gradient_compression",
    "use_gpu",
    "verbose",
)

# The parameters that may hold anything that programs put there.
_PICKLED: Final = (
    "callbacks",
    "checkpoint_callback",
    "gradient_compression",
    "logger",
    "loss",
    "loss_constructors",
    "metrics",
    "profiler",
    "train_minibatch_fn",
    "trainer_args",
    "transformation_fn",
)


class HorovodEstimator(EstimatorParams, Saved, Estimator[Any]):
    """Trains a model on the rows of a DataFrame. Subclasses know a framework."""

    _framework = "horovod"
    _trainer: type[Trainer]  # the framework's own, on each rank
    _history: type = list  # of the records of epochs
    _of_models: tuple[str, ...] = ()  # parameters that the model gets as they are
    _takes_all_columns = False  # the model gets all columns of a batch, not only those that the estimator knows by name

    def fit_on_parquet(self, params: dict[Any, Any] | None = None, dataset_idx: int | None = None) -> Any:
        """A model trained on the Parquet files that are in the store: those at get_train_data_path(dataset_idx).

        If there are files at get_val_data_path(dataset_idx), they are for validation. If `validation` is set, there
        must be some.

        params: values of parameters for this call, as in fit(). dataset_idx: the number of a data frame among several.
        """
        if params:
            return self.copy(params)._fit_on_parquet(dataset_idx)
        return self._fit_on_parquet(dataset_idx)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> Any:  # noqa: N802, N803
        """The fitMultiple of Spark ML: an iterator of (index, model), for fit(df, [...]) and tuning.

        Raises:
            ValueError: there is one run_id for several of them. Each would go on with the run of the one before it, and
                return that one's model.
        """
        given = [params.get(self.run_id, self.getOrDefault("run_id")) for params in paramMaps]
        if len(named := [run_id for run_id in given if run_id]) > len(set(named)):
            raise refused(
                f"{len(named)} models would be trained under the run_id {named[0]!r}, of which each but the first "
                "would go on with the run of another: leave run_id out, or give one with each of the parameter maps.",
                TrainingCode.CONTRADICTORY_ARGUMENTS,
            )
        return super().fitMultiple(dataset, paramMaps)

    def _fit(self, dataset: DataFrame) -> Any:
        self._check_params(None)
        self._check_validation(dataset.columns)
        backend = self._ready_backend(writes_data=True)
        with util.prepare_data(
            backend.num_processes(),
            self.getOrDefault("store"),
            dataset,
            label_columns=self.getOrDefault("label_cols"),
            feature_columns=self.getOrDefault("feature_cols"),
            validation=self.getOrDefault("validation"),
            sample_weight_col=self.getOrDefault("sample_weight_col"),
            compress_sparse=self.getOrDefault("compress_sparse_cols"),
            partitions_per_process=self.getOrDefault("partitions_per_process"),
            verbose=self.getOrDefault("verbose"),
            random_seed=self.getOrDefault("random_seed"),
            # The ranks look at the values that a transformation_fn makes.
            finite_columns=[] if self.getOrDefault("transformation_fn") else self._finite_columns(),
        ) as dataset_idx:
            return self._fit_on_prepared(backend, util.get_dataset_properties(dataset_idx), dataset_idx)

    def _finite_columns(self) -> list[str]:
        """The columns in which NaN and infinities are refused: all that the user has not declared as nullable."""
        nullable = nullable_of(self.getOrDefault("transformation_edit_fields"))
        columns = [*self.getOrDefault("feature_cols"), *self._columns_of_the_loss()]
        return [name for name in columns if name not in nullable]

    def _fit_on_parquet(self, dataset_idx: int | None) -> Any:
        self._check_params(None)
        check_validation(self.getOrDefault("validation"))
        backend = self._ready_backend(writes_data=False)
        properties = util.get_simple_meta_from_parquet(
            self.getOrDefault("store"),
            label_columns=self.getOrDefault("label_cols"),
            feature_columns=self.getOrDefault("feature_cols"),
            sample_weight_col=self.getOrDefault("sample_weight_col"),
            dataset_idx=dataset_idx,
        )
        validation, path = self.getOrDefault("validation"), self.getOrDefault("store").get_val_data_path(dataset_idx)
        if validation and not properties[1]:
            raise refused(
                f"there are no rows for validation at {path}: write them there, or leave validation={validation!r} "
                "out. fit_on_parquet() does not split the rows.",
                DataCode.TOO_FEW_ROWS,
            )
        return self._fit_on_prepared(backend, properties, dataset_idx)

    def _fit_on_prepared(
        self, backend: Backend, properties: tuple[int, int, Metadata, float], dataset_idx: int | None
    ) -> Any:
        train_rows, val_rows, metadata, avg_row_size = properties
        # Data that an earlier fit has written may be too few for the processes of this one.
        check_rows(train_rows, backend.num_processes())
        self._check_params(metadata)
        return self._fit_on_prepared_data(backend, train_rows, val_rows, metadata, avg_row_size, dataset_idx)

    def _fit_on_prepared_data(
        self,
        backend: Any,
        train_rows: int,
        val_rows: int,
        metadata: Metadata,
        avg_row_size: float,
        dataset_idx: int | None = None,
    ) -> Any:
        """Trains on data in the store and returns the model."""
        run_id = self._get_or_create_run_id()
        checkpoint, before = self._of_earlier_run(run_id) if self._has_checkpoint(run_id) else (None, {})
        run = {"epochs": 0, "history": self._history(), "seed": self._seed(), **before}
        self._warn_if_done(run_id, run["epochs"])
        sources = self._sources(train_rows, val_rows, metadata, run["seed"], dataset_idx)
        training = self._training(checkpoint, self._common(run_id, run, sources, dataset_idx))
        result = backend.run(train, args=(self._trainer, training), env=self._backend_env())[0]
        return self._create_model(result, run_id, metadata)

    def _of_earlier_run(self, run_id: str) -> tuple[Any, dict[str, Any]]:
        """The checkpoint of the run, and its entries "epochs", "history" and "seed". ValueError if it does not fit the
        model that this estimator is to train.
        """
        raise NotImplementedError

    def _read_checkpoint(self, run_id: str) -> bytes:
        """The file of the last checkpoint of a run."""
        store = self.getOrDefault("store")
        content: bytes = store.read(store.get_checkpoint_path(run_id))
        return content

    def _training(self, checkpoint: Any, common: dict[str, Any]) -> Training:
        """The orders for the ranks. common: the fields that all frameworks have, but for the model."""
        raise NotImplementedError

    def _backend_env(self) -> dict[str, str]:
        """Variables for the processes of the ranks."""
        return {}

    def _create_model(self, run_results: dict[str, Any], run_id: str, metadata: Metadata) -> Any:
        """The model that fit() returns: it changes features as the training did."""
        model, history, optimizer = self._trained(run_results["checkpoint"])
        metadata = self._with_results(metadata, run_results)
        made = self.get_model_class()(**self._get_model_kwargs(model, history, optimizer, run_id, metadata))
        for name in TRANSFORMATION:
            if made.hasParam(name):
                made._set(**{name: self.getOrDefault(name)})
        return made

    def _trained(self, content: bytes) -> tuple[Any, Any, Any]:
        """The model of a checkpoint, the history of its run, and the optimizer."""
        raise NotImplementedError

    def get_model_class(self) -> type:
        """The class of the models that fit() returns."""
        raise NotImplementedError

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
            "run_id": run_id,
            "_metadata": metadata,
            **{name: self.getOrDefault(name) for name in self._of_models},
        }

    def _ready_backend(self, writes_data: bool) -> Any:
        """The backend. Whether the store takes files, and Spark has room for the ranks, is found out before any work is
        done that would be lost.
        """
        store = self.getOrDefault("store")
        if isinstance(store, AbstractFilesystemStore):
            store.check_writable(writes_data)
        backend = self._get_or_create_backend()
        if isinstance(backend, SparkBackend):
            backend.check()
        return backend

    def _get_or_create_backend(self) -> Any:
        """The backend that was given, or one of Spark with num_proc ranks."""
        backend, num_proc = self.getOrDefault("backend"), self.getOrDefault("num_proc")
        if backend is not None and num_proc is not None:
            raise refused(
                "backend and num_proc are both given: a backend knows its number of processes. Leave one out.",
                TrainingCode.CONTRADICTORY_ARGUMENTS,
            )
        return backend if backend is not None else SparkBackend(num_proc, verbose=self.getOrDefault("verbose"))

    def _get_or_create_run_id(self) -> str:
        given: str | None = self.getOrDefault("run_id")
        if given and ".." in given.split("/"):
            raise refused(f"run_id must name a folder below that of all runs in the store, which {given!r} does not.")
        return given or f"{self._framework}_{int(time.time())}_{secrets.token_hex(2)}"

    def _has_checkpoint(self, run_id: str) -> bool:
        """Whether the store has a checkpoint of this run."""
        store = self.getOrDefault("store")
        return bool(store.saving_runs() and store.exists(store.get_checkpoint_path(run_id)))

    def _other_than_before(self, run_id: str, what: str, found: str) -> ValueError:
        """The error for a run whose checkpoint is of another model or optimizer than the estimator has now."""
        return refused(
            f"the checkpoint of the run {run_id!r} does not fit the {what}: {found.strip().rstrip('.')}. Pass "
            f"the same {what} to continue the run, or another run_id to start a new one.",
            TrainingCode.CONTRADICTORY_ARGUMENTS,
        )

    def _warn_if_done(self, run_id: str, epochs: int) -> None:
        """A run that has done all its epochs is returned as it is, and its user is told."""
        if epochs >= self.getOrDefault("epochs"):
            warnings.warn(
                f"the run {run_id!r} has done its {epochs} epochs already, so nothing is trained. Pass more "
                "epochs to continue, or another run_id to start a new run.",
                stacklevel=2,
            )

    def _common(
        self, run_id: str, run: dict[str, Any], sources: tuple[Source, Source | None], dataset_idx: int | None
    ) -> dict[str, Any]:
        """The fields of Training that estimators of all frameworks fill alike."""
        return {
            "run": run,
            "train": sources[0],
            "val": sources[1],
            "feature_columns": self.getOrDefault("feature_cols"),
            "label_columns": self.getOrDefault("label_cols"),
            "weight_column": self.getOrDefault("sample_weight_col"),
            "data_module": self.getOrDefault("data_module") or PetastormDataModule,
            "store": self.getOrDefault("store").to_remote(run_id, dataset_idx),
            **{name: self.getOrDefault(name) for name in _PASSED_ON},
        }

    def _with_results(self, metadata: Metadata, run_results: Mapping[str, Any]) -> Metadata:
        """The metadata for a model: with how its predictions of each label look, where the training has seen some, and
        how columns looked before a transformation_fn has changed them.
        """
        described = {name: dict(column) for name, column in metadata.items()}
        predictions: Sequence[Prediction] = run_results["predictions"]
        for label, prediction in zip(self.getOrDefault("label_cols"), predictions, strict=False):
            described[label]["prediction"] = tuple(prediction)
        for name, look in run_results["columns"].items():
            described[name]["batch"] = look
        return described

    def _sources(
        self, train_rows: int, val_rows: int, metadata: Metadata, seed: int, dataset_idx: int | None
    ) -> tuple[Source, Source | None]:
        """The data that the ranks read, to train and to validate."""
        get = self.getOrDefault
        store = get("store")
        columns = tuple(dict.fromkeys([*get("feature_cols"), *self._columns_of_the_loss()]))
        common: dict[str, Any] = {
            "columns": columns,
            "seed": seed,
            "cache": get("inmemory_cache_all"),
            "sparse": sparse_sizes(metadata, columns),
            "transformation": transformation_of(self),
            "finite": self._finite_for_ranks(metadata),
            "storage_options": store.get_storage_options(),
        }
        train = Source(
            path=store.get_train_data_path(dataset_idx),
            total=train_rows,
            batch_size=get("batch_size"),
            steps=get("train_steps_per_epoch"),
            shuffle=get("shuffle"),
            workers=get("train_reader_num_workers"),
            **common,
        )
        if not val_rows:
            return train, None
        val = Source(
            path=store.get_val_data_path(dataset_idx),
            total=val_rows,
            batch_size=get("val_batch_size") or get("batch_size"),
            steps=get("validation_steps_per_epoch"),
            shuffle=False,
            workers=get("val_reader_num_workers"),
            **common,
        )
        return train, val

    def _finite_for_ranks(self, metadata: Metadata) -> FiniteColumns | None:
        """Which columns of a batch may have neither NaN nor an infinity; None if Spark has looked at all of them."""
        is_known = all(metadata[name].get("is_finite") for name in self._finite_columns())
        if is_known and not self.getOrDefault("transformation_fn"):
            return None
        nullable = nullable_of(self.getOrDefault("transformation_edit_fields"))
        return FiniteColumns(None if self._takes_all_columns else tuple(self._finite_columns()), tuple(nullable))

    def _seed(self) -> int:
        given: int | None = self.getOrDefault("random_seed")
        return given if given is not None else secrets.randbits(31)

    def _check_params(self, metadata: Metadata | None) -> None:
        """ValueError for parameters that make no sense; metadata is None before the data are prepared."""
        super()._check_params(metadata)
        if metadata is None:
            self._check_picklable()
        if self.getOrDefault("data_module") is NVTabularDataModule:
            NVTabularDataModule()  # raises
        if self.getOrDefault("shuffle_buffer_size") is not None:
            warnings.warn(
                "shuffle_buffer_size has no effect; shuffle=False keeps rows in order.",
                DeprecationWarning,
                stacklevel=2,
            )
        if metadata is not None and transformation_of(self) is None:
            without_text(metadata, self._columns_of_numbers())
            self._check_shapes(metadata)
            weight = self.getOrDefault("sample_weight_col")
            if weight and metadata[weight]["shape"] != 1:
                raise refused(
                    f"sample_weight_col must have one number in each row; {weight!r} has lists or vectors.",
                    DataCode.DIFFERENT_SHAPES,
                )

    def _check_picklable(self) -> None:
        """ValueError if an object of the user's can't be sent to the ranks."""
        for name in _PICKLED:
            if self.hasParam(name):
                self._sent(name, self.getOrDefault(name))

    def _sent(self, name: str, value: Any) -> bytes:
        """The value of a parameter as it is sent to the ranks. ValueError if it can't be."""
        try:
            return cloudpickle.dumps(value)
        except Exception as error:
            raise refused(
                f"{name} can't be sent to the training processes, because pickle refuses it: {error}. Make "
                "objects that can't be pickled, such as locks, open files and connections, in the training "
                "processes.",
                OperationCode.UNPICKLABLE,
            ) from error

    def _columns_of_numbers(self) -> list[str]:
        """The columns that must be numbers when they come to the model."""
        return [*self.getOrDefault("feature_cols"), *self._columns_of_the_loss()]

    def _columns_of_the_loss(self) -> list[str]:
        weight = self.getOrDefault("sample_weight_col")
        return [*self.getOrDefault("label_cols"), *([weight] if weight else [])]

    def _check_shapes(self, metadata: Metadata) -> None:
        """ValueError unless the columns fit the model, as far as its shapes are known."""


def transformation_of(params: Params) -> Transformation | None:
    """The change that an estimator, or its model, makes to batches; None for none."""
    changes = [params.getOrDefault(name) for name in TRANSFORMATION]
    return Transformation(*changes) if any(changes) else None


class HorovodModel(ModelParams, Saved, Model):
    """A trained model as a transformer of Spark ML. Subclasses know a framework."""

    def _transform(self, dataset: DataFrame) -> DataFrame:
        return transformed(dataset, self)

    def get_prediction_fn(self) -> Any:
        """A function (model, row) -> list of arrays, one for each label, for subclasses that predict row by row."""
        raise NotImplementedError

    def _predictor(self) -> Any:
        """The function that predicts batches in the executors: from a list of arrays, one for each feature column, it
        makes a list of arrays, one for each label. It can be pickled.
        """
        raise NotImplementedError

    def _transformation(self) -> Transformation | None:
        """The change of features before `_predictor` gets them."""
        return transformation_of(self)

    def _predicts_rows(self) -> bool:
        """Whether a subclass of somebody else brings its own get_prediction_fn, which gets rows as they are."""
        return not type(self).get_prediction_fn.__module__.startswith("horovod.spark.")

    def _row_model(self) -> Any:
        """The model as get_prediction_fn's function gets it in the executors."""
        return self.getOrDefault("model")
