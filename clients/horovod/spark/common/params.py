"""The parameters that all estimators share, and those of all models.

Each is a Param of Spark ML with a setter and a getter, which `accessors` makes. `_check_params` checks the values when
an estimator is fitted, before anything is written or started.
"""

from __future__ import annotations

import copy
from numbers import Integral
from typing import Any, Final, TypeVar

from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import HasOutputCols

from horovod.base.errors import ErrorCode, TrainingCode, coded

Class = TypeVar("Class", bound=type)

# Programs use these names; the names that the rule makes are there as well.
_OTHER_NAMES = {
    "shuffle_buffer_size": "ShufflingBufferSize",
    "train_reader_num_workers": "TrainReaderNumWorker",
    "val_reader_num_workers": "ValReaderNumWorker",
    "inmemory_cache_all": "InMemoryCacheAll",
    "num_gpus": "NumGPUs",
}


def accessors(cls: Class) -> Class:
    """Gives a class setX, which returns the object, and getX for each parameter: num_proc has setNumProc, getNumProc.

    What the class defines itself stays as it is.
    """
    for name, param in list(vars(cls).items()):
        if isinstance(param, Param):
            names = ["".join(word[:1].upper() + word[1:] for word in name.split("_"))]
            names += [_OTHER_NAMES[name]] if name in _OTHER_NAMES else []
            for accessor in names:
                _add(cls, f"set{accessor}", _setter(name, param.doc))
                _add(cls, f"get{accessor}", _getter(name, param.doc))
    return cls


def _add(cls: type, name: str, function: Any) -> None:
    if name not in vars(cls):
        function.__name__, function.__qualname__ = name, f"{cls.__qualname__}.{name}"
        setattr(cls, name, function)


def _setter(name: str, doc: str) -> Any:
    def set_value(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set_value.__doc__ = f"Sets {name}: {doc}"
    return set_value


def _getter(name: str, doc: str) -> Any:
    def get_value(self: Any) -> Any:
        return self.getOrDefault(name)

    get_value.__doc__ = f"{name}: {doc}"
    return get_value


def _param(name: str, doc: str) -> Param[Any]:
    # Converters stay away: Param's own converters would refuse None, the default of most.
    return Param(Params._dummy(), name, doc)


DEFAULTS: Final[dict[str, Any]] = {
    "num_proc": None,
    "model": None,
    "backend": None,
    "store": None,
    "optimizer": None,
    "loss": None,
    "loss_weights": None,
    "metrics": [],
    "sample_weight_col": None,
    "feature_cols": None,
    "label_cols": None,
    "continuous_cols": None,
    "categorical_cols": None,
    "validation": None,
    "callbacks": [],
    "batch_size": 32,
    "val_batch_size": None,
    "epochs": 1,
    "verbose": 1,
    "random_seed": None,
    "shuffle_buffer_size": None,
    "shuffle": True,
    "partitions_per_process": 10,
    "run_id": None,
    "train_steps_per_epoch": None,
    "validation_steps_per_epoch": None,
    "transformation_fn": None,
    "transformation_edit_fields": None,
    "transformation_removed_fields": None,
    "train_reader_num_workers": 2,
    "val_reader_num_workers": 2,
    "reader_pool_type": "thread",
    "label_shapes": None,
    "inmemory_cache_all": False,
    "use_gpu": True,
    "mp_start_method": None,
    "backward_passes_per_step": 1,
    "gradient_compression": None,
    "compress_sparse_cols": False,
    "tensorflow_dataset_prefetch_buffer_size": 0,
}


# The parameters that make up a Transformation. Estimators have them, and give them to their models.
TRANSFORMATION: Final = ("transformation_fn", "transformation_edit_fields", "transformation_removed_fields")


class OptionalParams(Params):
    """Params for which None is no value: setting it brings the default back."""

    def _set(self, **values: Any) -> Any:
        given = {name: value for name, value in values.items() if value is not None}
        for name in values.keys() - given.keys():
            self.clear(self.getParam(name))
        return super()._set(**given)


@accessors
class EstimatorParams(OptionalParams):
    """The parameters of every estimator."""

    num_proc = _param("num_proc", "number of processes that train; default: spark.default.parallelism")
    model = _param("model", "the model to train")
    backend = _param("backend", "object that runs a function on all ranks; excludes num_proc")
    store = _param("store", "where training data and checkpoints are kept")
    optimizer = _param("optimizer", "optimizer, its learning rate that of one process")
    loss = _param("loss", "loss function, or a list with one for each label")
    loss_weights = _param("loss_weights", "weight of each label's loss in the sum")
    metrics = _param("metrics", "metrics to report")
    sample_weight_col = _param("sample_weight_col", "column with the weight of each row in the loss")
    feature_cols = _param("feature_cols", "columns that are the model's inputs, in order")
    label_cols = _param("label_cols", "columns that are the labels, in the order of the model's outputs")
    continuous_cols = _param("continuous_cols", "kept for scripts that set it: columns are taken as they are")
    categorical_cols = _param("categorical_cols", "kept for scripts that set it: columns are taken as they are")
    validation = _param("validation", "share of the rows, or the column that marks rows, for validation")
    callbacks = _param("callbacks", "callbacks of the training")
    batch_size = _param("batch_size", "rows in a batch of one process")
    val_batch_size = _param("val_batch_size", "rows in a batch of validation; default: batch_size")
    epochs = _param("epochs", "passes over the training data")
    verbose = _param("verbose", "0: silent, 1: progress, 2: a line an epoch")
    random_seed = _param("random_seed", "seed of shuffling, splitting and the framework; default: a new one each time")
    shuffle_buffer_size = _param("shuffle_buffer_size", "deprecated, without effect")
    shuffle = _param("shuffle", "whether rows come in another order in each epoch")
    partitions_per_process = _param("partitions_per_process", "files of training data for each process")
    run_id = _param("run_id", "name of the run in the store; one that exists is gone on with")
    train_steps_per_epoch = _param("train_steps_per_epoch", "steps in an epoch; default: until all rows were used")
    validation_steps_per_epoch = _param("validation_steps_per_epoch", "the same for validation")
    transformation_fn = _param("transformation_fn", "function from a pandas DataFrame to one, called for each batch")
    transformation_edit_fields = _param(
        "transformation_edit_fields",
        "columns that transformation_fn adds or changes: (name, numpy type, shape, whether nullable)",
    )
    transformation_removed_fields = _param("transformation_removed_fields", "columns that transformation_fn removes")
    train_reader_num_workers = _param("train_reader_num_workers", "threads that read training data in each process")
    val_reader_num_workers = _param("val_reader_num_workers", "threads that read validation data in each process")
    reader_pool_type = _param("reader_pool_type", "kept for scripts that set it: readers use threads")
    label_shapes = _param("label_shapes", "shape of each label as the loss gets it, -1 for the batch")
    inmemory_cache_all = _param("inmemory_cache_all", "whether each process keeps its rows in memory")
    use_gpu = _param("use_gpu", "whether GPUs are used, if there are some")
    mp_start_method = _param("mp_start_method", "kept for scripts that set it: no processes are started for reading")
    backward_passes_per_step = _param("backward_passes_per_step", "batches whose gradients are summed up for a step")
    gradient_compression = _param("gradient_compression", "compressor of gradients: hvd.Compression.fp16")
    compress_sparse_cols = _param("compress_sparse_cols", "whether sparse vectors are stored as such")
    tensorflow_dataset_prefetch_buffer_size = _param(
        "tensorflow_dataset_prefetch_buffer_size", "batches that are made ahead of the training; 0: none"
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**copy.deepcopy(DEFAULTS))  # programs append to the lists that they get

    def _check_params(self, metadata: Any) -> None:
        """ValueError unless the parameters make sense; metadata describes the columns. For subclasses to extend."""
        for name in ("model", "store", "feature_cols", "label_cols"):
            if self.getOrDefault(name) is None or self.getOrDefault(name) == []:
                what = name.replace("_", " ").capitalize()
                raise refused(f"{what} parameter is required: call set{_camel(name)}() or pass {name}=.")
        for name in ("feature_cols", "label_cols"):
            if isinstance(self.getOrDefault(name), str):
                raise refused(f"{name} must be a list of columns, such as [{self.getOrDefault(name)!r}].")
        for name in ("batch_size", "epochs", "partitions_per_process", "backward_passes_per_step"):
            check_positive(name, self.getOrDefault(name))
        for name in ("val_batch_size", "train_steps_per_epoch", "validation_steps_per_epoch", "num_proc"):
            if self.getOrDefault(name) is not None:
                check_positive(name, self.getOrDefault(name))
        labels = self.getOrDefault("label_cols")
        for name in ("loss_weights", "label_shapes"):
            value = self.getOrDefault(name)
            if value is not None and len(value) != len(labels):
                raise refused(
                    f"{name} has {len(value)} entries for {len(labels)} label columns {labels}: give one each."
                )

    def _check_validation(self, columns: list[str]) -> None:
        """Whether `validation` is a share or a column of these."""
        check_validation(self.getOrDefault("validation"), columns)


def check_validation(validation: Any, columns: list[str] | None = None) -> None:
    """ValueError unless it is None, a share in [0, 1) or, where columns are given, the name of one of these."""
    if validation is None:
        return
    if isinstance(validation, str):
        if columns is not None and validation not in columns:
            raise refused(f"validation names the column {validation!r}, which the DataFrame does not have: {columns}.")
        return
    if isinstance(validation, bool) or not isinstance(validation, (int, float)):
        raise refused(f"validation must be a share or the name of a column, not {type(validation).__name__}.")
    if not 0 <= validation < 1:
        raise refused(f"validation must be a share in [0, 1), not {validation}: some rows must be left to train with.")


def check_positive(name: str, value: Any) -> None:
    """ValueError unless `value` is an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value <= 0:
        raise refused(f"{name} must be an integer above 0, not {value!r}.")


def refused(sentence: str, code: ErrorCode = TrainingCode.INVALID_ARGUMENT) -> ValueError:
    return ValueError(coded(code, sentence))


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


@accessors
class ModelParams(OptionalParams, HasOutputCols):
    """The parameters of every trained model. outputCols: columns that transform() adds; default: <label>__output."""

    history = _param("history", "measurements of each epoch")
    model = _param("model", "the trained model")
    feature_columns = _param("feature_columns", "columns that are the model's inputs, in order")
    label_columns = _param("label_columns", "the labels that the model predicts, in the order of its outputs")
    run_id = _param("run_id", "name of the run that trained it")
    transformation_fn = _param("transformation_fn", "function that changes the features before the model sees them")
    transformation_edit_fields = _param("transformation_edit_fields", "types and shapes of the columns that it makes")
    transformation_removed_fields = _param("transformation_removed_fields", "columns that are left out")
    _metadata = _param("_metadata", "how the columns looked in the training data")

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            history=None,
            model=None,
            feature_columns=None,
            label_columns=None,
            run_id=None,
            _metadata=None,
            **dict.fromkeys(TRANSFORMATION),
        )

    def setLabelColoumns(self, value: Any) -> Any:  # noqa: N802
        """Sets label_columns. The spelling is part of the API; setLabelColumns is the same."""
        return self._set(label_columns=value)

    def setOutputCols(self, value: list[str]) -> Any:  # noqa: N802
        """The columns that transform() adds, one for each label column."""
        return self._set(outputCols=value)

    def getOutputCols(self) -> list[str]:  # noqa: N802
        """The columns that transform() adds."""
        if self.isDefined("outputCols"):
            return list(self.getOrDefault("outputCols"))
        return [f"{label}__output" for label in self.getOrDefault("label_columns")]

    def _get_metadata(self) -> Any:
        return self.getOrDefault("_metadata")
