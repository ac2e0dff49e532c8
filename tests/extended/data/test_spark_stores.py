"""Stores: paths, HDFS, Databricks, and writes that fail. What all stores do alike is in test_stores_everywhere.py."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from error_codes import ends_with
from fsspec.implementations.arrow import HadoopFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from horovod.base.errors import DataCode, TrainingCode
from horovod.data import ParquetReader
from horovod.spark.common import data_files
from horovod.spark.common.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store
from horovod.spark.common.store.files import write_file


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("/data/x", "file:///data/x"),
        ("file:///data/x/", "file:///data/x"),
        ("s3a://bucket/x/", "s3a://bucket/x"),
        ("abfss://box@account.dfs.core.windows.net/x", "abfss://box@account.dfs.core.windows.net/x"),
    ],
)
def test_paths(path: str, prefix: str) -> None:
    store = Store.create(path if "://" in path else Path(path))
    assert type(store) is FilesystemStore
    assert store.get_train_data_path() == f"{prefix}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{prefix}/intermediate_val_data.3"
    assert store.get_test_data_path() == f"{prefix}/intermediate_test_data"
    assert store.get_runs_path() == f"{prefix}/runs"
    assert store.get_run_path("a") == f"{prefix}/runs/a"
    assert store.get_checkpoint_path("a") == f"{prefix}/runs/a/checkpoint"
    assert store.get_logs_path("a") == f"{prefix}/runs/a/logs"


def test_paths_that_are_given() -> None:
    store = LocalStore(
        "/p", train_path="/t", val_path="s3://v", runs_path="r", save_runs=False, checkpoint_filename="last.keras"
    )
    assert store.get_train_data_path() == "file:///t"
    assert store.get_val_data_path(0) == "s3://v.0"
    assert store.get_runs_path() == f"file://{os.getcwd()}/r"
    assert store.get_checkpoint_filename() == "last.keras"
    assert not store.saving_runs()
    assert store.get_checkpoint_path("a") is store.get_logs_path("a") is None
    assert LocalStore("/p", checkpoint_filename="x").get_checkpoint_path("a") == "file:///p/runs/a/x"


class Fails:
    """Lets go of half of the content, then raises."""

    def __init__(self, error: type[BaseException] = OSError) -> None:
        self.error = error

    def fsync(self, descriptor: int) -> None:
        os.truncate(descriptor, 1)
        raise self.error("the disk is full")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_earlier_file_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    store = LocalStore(str(tmp_path))
    path = f"{tmp_path}/runs/a/checkpoint"
    store.write_text(path, "earlier")
    monkeypatch.setattr(os, "fsync", Fails(error).fsync)
    with pytest.raises(error):
        store.write_text(path, "later")
    monkeypatch.undo()
    assert [(file.name, file.read_text()) for file in Path(path).parent.iterdir()] == [("checkpoint", "earlier")]


class Renaming(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose uploads are visible while they go on, and which renames onto no file, as HDFS."""

    protocol = "renaming"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    fails = False  # in the middle of an upload
    renames: int | None = None  # so often, before the connection is gone
    is_reached = True
    is_silent = False  # about a rename that it refuses, as WebHDFS is

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("renaming://")))

    def info(self, path: str, **kwargs: Any) -> Any:
        if not self.is_reached:
            raise OSError("the connection is gone")
        return super().info(path, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        super().pipe_file(path, value[: len(value) // 2] if self.fails else value, **kwargs)
        if self.fails:
            raise OSError("the connection is gone")

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            if self.is_silent:
                return
            raise OSError("it exists")
        if self.renames is not None:
            self.renames -= 1
            if self.renames < 0:
                raise OSError("the connection is gone")
        super().mv(path1, path2, **kwargs)


@pytest.fixture
def files() -> Iterator[Renaming]:
    yield Renaming()
    Renaming.store.clear()


def test_a_write_that_fails_leaves_the_earlier_file_where_uploads_are_visible(files: Renaming) -> None:
    for content in (b"earlier", b"late"):
        write_file(files, "/run/checkpoint", content)
        files.is_silent = True
    assert files.cat_file("/run/checkpoint") == b"late"
    assert files.find("/run") == ["/run/checkpoint"]
    for failure in ({"fails": True}, {"renames": 1}):
        vars(files).update(failure)
        with pytest.raises(OSError, match="the connection is gone"):
            write_file(files, "/run/checkpoint", b"later")
        vars(files).update(fails=False, renames=None)
    assert files.find("/run") == ["/run/.checkpoint.earlier"]  # its writer could not give it back its name


def test_a_file_that_was_being_replaced_is_found(files: Renaming) -> None:
    store = FilesystemStore("renaming://p")
    store._fs = files
    path = store.get_checkpoint_path("run")
    assert path is not None
    for content in (b"1", b"2", b"3", b"4"):
        files.renames = 1 if content == b"3" else None  # the earlier one is out of the way, then the writer dies
        with pytest.raises(OSError, match="gone") if files.renames else contextlib.nullcontext():
            store.write(path, content)
        assert store.exists(path)
        assert store.read(path) == (b"2" if content == b"3" else content)
    store.write(path, b"5")
    assert files.find("/p") == ["/p/runs/run/checkpoint"]


def test_a_file_system_that_cannot_be_asked_is_an_error(files: Renaming) -> None:
    """An answer that there is nothing would begin a run anew, or train without validation."""
    store = FilesystemStore("renaming://p")
    store._fs = files
    files.is_reached = False
    for ask in (store.exists, store.is_parquet_dataset, store.get_checkpoints):
        with pytest.raises(OSError, match="the connection is gone"):
            ask("renaming://p/run")


@pytest.mark.parametrize(
    ("given", "how", "cluster", "prefix"),
    [
        ("hdfs://namenode:8020/p", {}, ("namenode", 8020), "hdfs://namenode:8020/p"),
        ("hdfs://nameservice/p/", {}, ("nameservice", 0), "hdfs://nameservice/p"),
        ("hdfs:///p", {}, ("default", 0), "hdfs:///p"),
        ("/p", {}, ("default", 0), "hdfs:///p"),
        ("/p", {"host": "namenode", "port": 8020}, ("namenode", 8020), "hdfs://namenode:8020/p"),
        ("hdfs://namenode/p", {"host": "namenode", "port": 8020}, ("namenode", 8020), "hdfs://namenode:8020/p"),
    ],
)
def test_paths_of_hdfs(given: str, how: dict[str, Any], cluster: tuple[str, int], prefix: str) -> None:
    store = HDFSStore(given, **how, train_path="/train")
    assert store.prefix_path == prefix
    assert (store._hdfs_kwargs["host"], store._hdfs_kwargs["port"]) == cluster
    assert store.get_val_data_path() == f"{prefix}/intermediate_val_data"
    assert store.get_localized_path(store.get_val_data_path()) == "/p/intermediate_val_data"
    assert store.get_train_data_path(1) == f"{store.path_prefix}/train.1"
    if given.startswith("hdfs:"):
        assert isinstance(Store.create(given, **how), HDFSStore)


@pytest.mark.parametrize(
    ("given", "how"),
    [
        ("s3://bucket/p", {}),
        ("file:///p", {}),
        ("hdfs://namenode:port/p", {}),
        ("hdfs://namenode", {}),
        ("relative", {}),
        ("hdfs://namenode:8020/p", {"host": "other"}),
        ("hdfs://namenode:8020/p", {"port": 9000}),
        ("hdfs://namenode:8020/p", {"train_path": "hdfs://other:8020/t"}),
        ("hdfs:///p", {"runs_path": "hdfs://namenode/r"}),
    ],
    ids=str,
)
def test_wrong_paths_of_hdfs(given: str, how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=ends_with(DataCode.WRONG_STORE_PATH)):
        HDFSStore(given, **how)


def test_hdfs_without_hadoop(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "driver")):
        HDFSStore("/p", driver="libhdfs3")
    monkeypatch.setenv("ARROW_LIBHDFS_DIR", "/nowhere")
    monkeypatch.setenv("HADOOP_HOME", "/nowhere")
    with pytest.raises(OSError, match=ends_with(DataCode.MISSING_DATA_PACKAGE)):
        HDFSStore("hdfs://namenode:8020/p").exists("/p")


def test_processes_upload_to_hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one connection, only what has changed, and as open files."""
    uploads: list[tuple[str, bytes]] = []
    connections = []

    class Files:
        def __init__(self) -> None:
            connections.append(self)

        def upload(self, path: str, file: Any) -> None:
            uploads.append((path, file.read()))

    store = HDFSStore("hdfs://namenode:8020/p")
    monkeypatch.setattr(store, "_get_filesystem_fn", lambda: Files)
    sync = store.sync_fn("run")
    for number, expected in ((1, ["a", "logs/b"]), (2, ["a"])):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "a").write_text(f"{number}" * number)
        if number == 1:
            (tmp_path / "logs/b").touch()
        sync(str(tmp_path))
        assert sorted(path for path, _ in uploads) == [f"/p/runs/run/{name}" for name in expected]
        uploads.clear()
    sync(str(tmp_path))
    assert not uploads
    assert len(connections) == 1


def test_hdfs_on_a_disk_that_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but libhdfs itself is what it is with Hadoop: fsspec, and pyarrow's file systems below it."""
    made: list[dict[str, Any]] = []

    def hadoop(**options: Any) -> pa.fs.FileSystem:
        made.append(options)
        return pa.fs.LocalFileSystem()

    monkeypatch.setattr(pa.fs, "HadoopFileSystem", hadoop)
    HadoopFileSystem.clear_instance_cache()
    prefix = f"hdfs://namenode:8020{tmp_path}"
    store = HDFSStore(prefix, user="trainer", extra_conf={"dfs.replication": "1"})
    for text in ("earlier", "later"):
        store.write_text(f"{store.get_run_path('run')}/last.ckpt", text)
    assert store.get_checkpoints("run") == [f"{prefix}/runs/run/last.ckpt"]
    assert store.read(store.get_checkpoints("run")[0]) == b"later"

    output = tmp_path / "output"
    output.mkdir()
    (output / "checkpoint").write_text("1")
    remote = pickle.loads(pickle.dumps(store.to_remote("run", None)))
    remote.sync(str(output))
    assert remote.checkpoint_path
    assert store.read(remote.checkpoint_path) == b"1"

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": np.arange(10)}), sink)
    store.write(f"{store.get_train_data_path()}/part-0.parquet", sink.getvalue().to_pybytes())
    assert store.is_parquet_dataset(store.get_train_data_path())
    (batch,) = ParquetReader(remote.train_data_path, storage_options=remote.storage_options, shuffle=False)
    assert batch["x"].tolist() == list(range(10))
    for options in made:
        assert (options["host"], options["port"], options["user"]) == ("namenode", 8020, "trainer")
        assert options["extra_conf"] == {"dfs.replication": "1"}
    HadoopFileSystem.clear_instance_cache()


@pytest.mark.parametrize("path", ["/dbfs/a/b", "dbfs:/a/b", "file:/dbfs/a/b", "file:///dbfs/a/b"])
def test_databricks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    if path.startswith("dbfs"):
        with pytest.raises(ValueError, match=ends_with(DataCode.WRONG_STORE_PATH, path, "DATABRICKS_RUNTIME_VERSION")):
            Store.create(path)
    else:
        assert type(Store.create(path)) is FilesystemStore
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    store = Store.create(path)
    assert isinstance(store, DBFSLocalStore)
    assert DBFSLocalStore.normalize_path(path) == "/dbfs/a/b"
    assert store.get_train_data_path() == "file:///dbfs/a/b/intermediate_train_data"
    assert store.get_checkpoint_filename() == "checkpoint.tf"
    assert store.get_checkpoint_path("run") == "file:///dbfs/a/b/runs/run/checkpoint.tf"


@pytest.mark.parametrize("path", ["dbfs://a/b", "/tmp/a", "s3://a"])
def test_databricks_wants_its_own_paths(path: str) -> None:
    with pytest.raises(ValueError, match=ends_with(DataCode.WRONG_STORE_PATH, path)):
        DBFSLocalStore(path)


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=ends_with(DataCode.MISSING_DATA_PACKAGE, "dropbox://a")):
        Store.create("dropbox://a").exists("dropbox://a")
    with pytest.raises(ValueError, match=ends_with(DataCode.WRONG_STORE_PATH, "nosuch")):
        Store.create("nosuch://a").exists("nosuch://a")


@pytest.mark.parametrize(
    ("timestamps", "kind"),
    [
        ("INT96", pa.timestamp("ns")),
        ("TIMESTAMP_MICROS", pa.timestamp("us", "UTC")),
        ("TIMESTAMP_MILLIS", pa.timestamp("ms", "UTC")),
    ],
)
def test_tasks_hold_one_file_and_one_row_group(
    monkeypatch: pytest.MonkeyPatch, timestamps: str, kind: pa.DataType
) -> None:
    monkeypatch.setattr(data_files, "ROW_GROUP_BYTES", 800)
    monkeypatch.setattr(data_files, "FILE_BYTES", 2000)
    times = pa.array(range(50), pa.timestamp("us", "Asia/Tokyo"))
    batches = [
        pa.RecordBatch.from_arrays([pa.array(range(start, start + 50)), times], names=["x", "time"])
        for start in range(0, 500, 50)
    ]
    batches.append(
        pa.RecordBatch.from_arrays(
            [pa.array(range(500, 720)), pa.concat_arrays([times] * 4 + [times[:20]])], names=["x", "time"]
        )
    )
    files = list(data_files.encoded(iter(batches), timestamps))
    read = [pq.ParquetFile(pa.BufferReader(content)) for content, _ in files]
    assert len(files) > 2
    assert [file.metadata.num_rows for file in read] == [rows for _, rows in files]
    assert all(file.metadata.row_group(0).num_rows <= 60 for file in read)
    table = pa.concat_tables(file.read() for file in read)
    assert table.column("x").to_pylist() == list(range(720))
    assert table.schema.field("time").type == kind
    assert list(data_files.encoded(iter([]), timestamps)) == []
