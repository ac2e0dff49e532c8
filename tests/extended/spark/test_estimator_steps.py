"""What estimators decide without a Spark: the arithmetic of epochs, parameters, transformations, shapes of labels."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from error_codes import ends_with
from hypothesis import given
from hypothesis import strategies as st

from horovod.base.errors import DataCode, ErrorCode, OperationCode, TrainingCode

pytest.importorskip("pyspark")
import torch
import torch.nn.functional as F

from horovod.spark.common.backend import LocalBackend
from horovod.spark.common.batches import Epoch, NVTabularDataModule
from horovod.spark.common.serialization import decode, encode
from horovod.spark.common.store import FilesystemStore, Store
from horovod.spark.common.training import same_devices
from horovod.spark.common.transformation import Transformation
from horovod.spark.keras import KerasEstimator, KerasModel
from horovod.spark.keras.datamodule import PetastormDataModule
from horovod.spark.lightning import TorchEstimator as LightningEstimator
from horovod.spark.lightning.remote import _scale_scheduler
from horovod.spark.torch import TorchEstimator, TorchModel
from horovod.spark.torch.ranks import Losses, same_shapes
from horovod.spark.torch.tensors import as_array, number


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40))
def test_every_row_counts_once(total: int, size: int, batch_size: int) -> None:
    epoch = Epoch(total, size, batch_size)
    rows = [[epoch.rows(rank, step) for rank in range(size)] for step in range(epoch.steps)]
    assert sum(map(sum, rows)) == total
    for step, of_ranks in enumerate(rows):
        assert sum(of_ranks) > 0
        # The mean over ranks of scaled means is the mean over rows: each row has the weight 1 / rows of the step.
        for rank, own in enumerate(of_ranks):
            assert epoch.scale(rank, step) == pytest.approx(own * size / sum(of_ranks))


WITHOUT_DEFAULT = """
num_proc model backend store optimizer loss loss_weights sample_weight_col feature_cols label_cols continuous_cols
categorical_cols validation val_batch_size random_seed shuffle_buffer_size run_id train_steps_per_epoch
validation_steps_per_epoch transformation_fn transformation_edit_fields transformation_removed_fields label_shapes
mp_start_method gradient_compression
"""
COMMON: dict[str, Any] = {
    **dict.fromkeys(WITHOUT_DEFAULT.split()),
    "metrics": [],
    "callbacks": [],
    "batch_size": 32,
    "epochs": 1,
    "verbose": 1,
    "shuffle": True,
    "partitions_per_process": 10,
    "train_reader_num_workers": 2,
    "val_reader_num_workers": 2,
    "reader_pool_type": "thread",
    "inmemory_cache_all": False,
    "use_gpu": True,
    "backward_passes_per_step": 1,
    "compress_sparse_cols": False,
    "tensorflow_dataset_prefetch_buffer_size": 0,
}
MODULE = dict.fromkeys(["input_shapes", "loss_constructors", "train_minibatch_fn"])
LIGHTNING_WITHOUT_DEFAULT = """
num_gpus logger data_module loader_num_epochs profiler trainer_args train_async_data_loader_queue_size
val_async_data_loader_queue_size
"""
LIGHTNING: dict[str, Any] = {
    **dict.fromkeys(LIGHTNING_WITHOUT_DEFAULT.split()),
    "log_every_n_steps": 50,
    "terminate_on_nan": False,
    "debug_data_loader": False,
}
KERAS = {
    "custom_objects": {},
    "checkpoint_callback": None,
    "data_module": PetastormDataModule,
    "backend_env": {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"},
}
OTHER_NAMES = {
    "shuffle_buffer_size": "ShufflingBufferSize",
    "train_reader_num_workers": "TrainReaderNumWorker",
    "val_reader_num_workers": "ValReaderNumWorker",
    "inmemory_cache_all": "InMemoryCacheAll",
}


@pytest.mark.parametrize(
    ("cls", "own"),
    [
        (KerasEstimator, KERAS),
        (TorchEstimator, {**MODULE, "data_module": PetastormDataModule}),
        (LightningEstimator, {**MODULE, **LIGHTNING}),
    ],
    ids=["keras", "torch", "lightning"],
)
def test_parameters_have_the_defaults_and_names_of_the_table(cls: Any, own: dict[str, Any]) -> None:
    defaults = {**COMMON, **own}
    made = cls(**dict.fromkeys(defaults))
    assert {param.name for param in made.params} == set(defaults)
    for name, default in defaults.items():
        camel = "".join(word.capitalize() for word in name.split("_"))
        for accessor in {camel, OTHER_NAMES.get(name, camel)}:
            get, put = getattr(made, f"get{accessor}"), getattr(made, f"set{accessor}")
            assert get() == default, name
            value = object()
            assert put(value) is made
            assert get() is value
            assert put(None) is made
            assert get() == default, name
        assert cls(**{name: 5}).getOrDefault(name) == 5
    made.getCallbacks().append("of this one alone")
    assert cls().getCallbacks() == []


@pytest.mark.parametrize("cls", [TorchModel, KerasModel])
def test_columns_of_a_model(cls: Any) -> None:
    model = cls(feature_columns=["x"], label_columns=["y"])
    assert model.getOutputCols() == ["y__output"]
    assert model.setLabelColoumns(["a", "b"]).getOutputCols() == ["a__output", "b__output"]
    assert model.getLabelColumns() == ["a", "b"]
    assert model.setOutputCols(["one", "two"]).getOutputCols() == ["one", "two"]


INVALID, CONTRADICTORY = TrainingCode.INVALID_ARGUMENT, TrainingCode.CONTRADICTORY_ARGUMENTS


def locked() -> torch.nn.Module:
    model = torch.nn.Linear(3, 1)
    model.lock = threading.Lock()  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("changed", "code", "facts"),
    [
        ({"model": None}, INVALID, ["Model parameter is required"]),
        ({"model": "resnet"}, INVALID, ["torch.nn.Module", "str"]),
        ({"store": None}, INVALID, ["Store"]),
        ({"loss": None}, INVALID, ["Loss"]),
        ({"optimizer": None}, INVALID, ["Optimizer"]),
        ({"feature_cols": None}, INVALID, ["Feature cols"]),
        ({"feature_cols": "x"}, INVALID, ["feature_cols", "['x']"]),
        ({"label_cols": []}, INVALID, ["Label cols"]),
        ({"batch_size": 0}, INVALID, ["batch_size", "0"]),
        ({"epochs": 1.5}, INVALID, ["epochs", "1.5"]),
        ({"backward_passes_per_step": -1}, INVALID, ["backward_passes_per_step", "-1"]),
        ({"val_batch_size": True}, INVALID, ["val_batch_size"]),
        ({"loss_weights": [1.0, 2.0]}, INVALID, ["loss_weights", "2", "1"]),
        ({"loss": [F.mse_loss, F.mse_loss]}, INVALID, ["2 losses", "1 label"]),
        ({"callbacks": [threading.Lock()]}, OperationCode.UNPICKLABLE, ["callbacks", "lock"]),
        ({"model": locked()}, OperationCode.UNPICKLABLE, ["model", "lock"]),
        ({"loss_constructors": [torch.nn.MSELoss]}, CONTRADICTORY, ["loss", "loss_constructors"]),
        ({"optimizer": torch.optim.SGD(torch.nn.Linear(3, 1).parameters())}, CONTRADICTORY, ["model.parameters()"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_parameters_are_refused_before_anything_starts(
    changed: dict[str, Any], code: ErrorCode, facts: list[str]
) -> None:
    model = changed.get("model") if isinstance(changed.get("model"), torch.nn.Module) else torch.nn.Linear(3, 1)
    arguments = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": F.mse_loss,
        "store": object(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": np.int64(4),
    }
    if "model" not in changed:
        TorchEstimator(**arguments)._check_params(None)
    with pytest.raises(ValueError, match=ends_with(code, *facts)):
        TorchEstimator(**{**arguments, **changed})._check_params(None)


def test_an_optimizer_with_a_closure_needs_a_step_that_gives_it_one() -> None:
    model = torch.nn.Linear(3, 1)
    arguments = {"model": model, "loss": F.mse_loss, "store": object(), "feature_cols": ["x"], "label_cols": ["y"]}
    made = TorchEstimator(**arguments, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match=ends_with(CONTRADICTORY, "LBFGS", "train_minibatch_fn")):
        made._check_params(None)
    made.setTrainMinibatchFn(lambda *_: None)._check_params(None)


def test_a_run_has_one_training_and_stays_in_its_folder() -> None:
    made = TorchEstimator(run_id="one")
    for maps in ([{made.epochs: 1}, {made.epochs: 2}], [{}, {made.run_id: "one"}]):
        with pytest.raises(ValueError, match=ends_with(CONTRADICTORY, "run_id", "'one'")):
            made.fitMultiple(None, maps)
    made.fitMultiple(None, [{}, {made.run_id: "two"}, {made.run_id: None}])
    for run_id in ("..", "../../other", "a/../b"):
        with pytest.raises(ValueError, match=ends_with(INVALID, "run_id", run_id)):
            made.setRunId(run_id)._get_or_create_run_id()
    assert made.setRunId("a/b ..")._get_or_create_run_id() == "a/b .."


def test_a_keras_estimator_refuses_likewise() -> None:
    arguments = {"store": object(), "feature_cols": ["x"], "label_cols": ["y"], "loss": "mse", "optimizer": "sgd"}
    with pytest.raises(ValueError, match=ends_with(INVALID, "Keras", "torch.nn")):
        KerasEstimator(**arguments, model=torch.nn.Linear(1, 1))._check_params(None)
    with pytest.raises(NotImplementedError, match=ends_with(DataCode.MISSING_DATA_PACKAGE, "NVTabular")):
        KerasEstimator(**arguments, model="x", data_module=NVTabularDataModule)._check_params(None)


@pytest.mark.parametrize("where", ["prefix_path", "runs_path"])
def test_a_store_that_can_not_be_written_is_found_before_anything_is_computed(tmp_path: Path, where: str) -> None:
    (file := tmp_path / "file").touch()
    store = Store.create(**{"prefix_path": str(tmp_path), where: str(file / "folder")})
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    columns = {"feature_cols": ["x"], "label_cols": ["y"]}
    made = TorchEstimator(model=model, optimizer=optimizer, loss=F.mse_loss, store=store, **columns)
    for fit in (lambda: made.fit(MagicMock(columns=["x", "y"])), made.fit_on_parquet):
        with pytest.raises(OSError, match=ends_with(DataCode.DATA_STORE_FAILED, "file/folder", "Not a directory")):
            fit()


def test_a_store_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    for url in (str(tmp_path), "memory://writable"):
        store = FilesystemStore(url)
        store.check_writable(True)
        assert not store.fs.find(store.get_localized_path(store.prefix_path))


def test_ranks_train_on_devices_of_one_kind() -> None:
    same_devices("cpu", lambda kind: [kind, "cpu"])
    with pytest.raises(RuntimeError, match=ends_with(CONTRADICTORY, "rank 1 has cuda", "use_gpu")):
        same_devices("cpu", lambda kind: [kind, "cuda"])


def test_a_backend_knows_its_number_of_processes() -> None:
    backend = LocalBackend(2)
    assert TorchEstimator(backend=backend)._get_or_create_backend() is backend
    with pytest.raises(ValueError, match=ends_with(CONTRADICTORY, "num_proc")):
        TorchEstimator(backend=backend, num_proc=2)._get_or_create_backend()


def test_parameters_are_json_or_pickled() -> None:
    for value in (None, True, 1, 0.5, "text", [1, [2]], {"a": [1.0]}):
        assert encode(value) is value
    for value in ((1, 2), {1: 2}, float("inf"), {"horovod.pickled": 1}, [(1,)], int):
        encoded = encode(value)
        assert isinstance(encoded, dict)
        assert decode(encoded) == value


def halved(frame: Any) -> Any:
    frame["x"] = frame["x"] / 2
    return frame


def words(row: Any) -> Any:
    return {"length": len(row["text"]), "letters": np.array([ord(letter) for letter in row["text"]]), "y": row["y"]}


def test_a_transformation_takes_batches_or_rows() -> None:
    batch = {"x": np.array([1.0, 2.0]), "text": np.array(["ab", "cd"], dtype=object), "y": np.array([3, 4])}
    of_batch = Transformation(halved, [("x", np.float32, (1,), False)], ["text"])
    of_rows = Transformation(words, None, ["y"])
    for _ in range(2):
        found = of_batch(batch)
        assert found["x"].tolist() == [[0.5], [1.0]]
        assert found["x"].dtype == np.float32
        assert list(found) == ["x", "y"]
        found = of_rows(batch)
        assert {name: values.tolist() for name, values in found.items()} == {
            "length": [2, 2],
            "letters": [[97, 98], [99, 100]],
        }
    assert batch["x"].tolist() == [1.0, 2.0]
    assert Transformation(None, None, ["x"])(batch)["text"].tolist() == ["ab", "cd"]

    with pytest.raises(ValueError, match=ends_with(DataCode.INVALID_BATCH, "DataFrame", "dict", "NoneType")):
        Transformation(lambda _: None, None, None)(batch)
    with pytest.raises(KeyError, match="absent"):
        Transformation(lambda frame: frame["absent"], None, None)(batch)
    with pytest.raises(ValueError, match=ends_with(DataCode.INVALID_BATCH, "2 rows")):
        Transformation(lambda frame: frame[frame["x"] > 2], None, None)(batch)
    batch["text"][0] = "abc"
    with pytest.raises(ValueError, match=ends_with(DataCode.DIFFERENT_SHAPES, "letters", "(2,)", "(3,)")):
        Transformation(words, None, None)(batch)


def test_labels_get_the_shape_of_outputs_and_never_make_pairs() -> None:
    output, label = torch.rand(4, 1), torch.tensor([1, 0, 1, 1])
    outputs, labels = same_shapes(output, [label])
    assert F.mse_loss(outputs[0], labels[0]) == F.mse_loss(output[:, 0], label.float())
    F.binary_cross_entropy(outputs[0], labels[0])
    classes = torch.rand(4, 3)
    assert same_shapes(classes, [label])[1][0] is label  # the number of a class
    with pytest.raises(ValueError, match=ends_with(CONTRADICTORY, "1 outputs", "2 label")):
        same_shapes(output, [label, label])
    with pytest.raises(ValueError, match=ends_with(CONTRADICTORY, "dict", "label_cols")):
        same_shapes({"logits": output}, [label])


def test_a_loss_is_one_number_and_predictions_are_arrays() -> None:
    output = torch.rand(4, 1, dtype=torch.bfloat16)
    assert as_array(output).dtype == np.float32
    for value in (2.0, np.float32(2), np.array([2]), torch.tensor([2.0], requires_grad=True)):
        assert number(value, "it") == 2.0
    for loss in (lambda output, _: output, lambda *_: None, lambda *_: 1.0):
        with pytest.raises(ValueError, match=ends_with(INVALID, "the loss <lambda>")):
            Losses([loss], None, "cpu")([output], [output])


def test_rates_of_schedulers_are_scaled_with_all_parts() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    parts: list[Any] = [
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
    ]
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    _scale_scheduler(vars(scheduler), 2)
    assert [part.base_lrs for part in parts] == [[0.2], [0.2]]
    state = scheduler.state_dict()
    _scale_scheduler(state, 1 / 2)
    assert [part["base_lrs"] for part in state["_schedulers"]] == [[0.1], [0.1]]
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4, eta_min=0.01)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=0.01)
    for one in (cosine, plateau):
        _scale_scheduler(vars(one), 2)
    assert (cosine.eta_min, plateau.min_lrs) == (0.02, [0.02])
