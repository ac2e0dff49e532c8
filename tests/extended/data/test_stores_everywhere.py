"""One store suite for every file system that users have data on: a disk, memory, and the services of three clouds."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import object_stores
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from error_codes import ends_with

from horovod.base.errors import DataCode
from horovod.data import ParquetReader, services
from horovod.spark.common.data_files import count_rows
from horovod.spark.common.store import FilesystemStore, Store, publishing

DEADLINE_S = 120.0
pytestmark = pytest.mark.timeout(300)
Services = Callable[[str], object_stores.Service]
numbers = itertools.count()


class Place(NamedTuple):
    """Where a test may keep its files."""

    url: str
    options: dict[str, Any]

    def store(self) -> FilesystemStore:
        made = Store.create(self.url, storage_options=self.options)
        assert type(made) is FilesystemStore
        return made


@pytest.fixture(params=["file", "memory", *object_stores.KINDS])
def place(request: pytest.FixtureRequest, tmp_path: Path, services: Services) -> Place:
    if request.param == "file":
        return Place(tmp_path.as_uri(), {})
    if request.param == "memory":
        return Place(f"memory://bucket/{next(numbers)}", {})
    service = services(request.param)
    return Place(service.url(f"experiments/{next(numbers)}"), service.options())


@pytest.fixture(params=object_stores.KINDS)
def service(request: pytest.FixtureRequest, services: Services) -> object_stores.Service:
    return services(request.param)


def table(rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": np.arange(rows)}), sink, row_group_size=4)
    return bytes(sink.getvalue().to_pybytes())


def below(store: FilesystemStore) -> list[str]:
    """All files of a store, also those that readers leave out."""
    folder = store.get_localized_path(store.prefix_path)
    store.fs.invalidate_cache()
    return sorted(str(name).removeprefix(folder).strip("/") for name in store.fs.find(folder))


def test_files(place: Place) -> None:
    store = place.store()
    assert store.get_run_path("run") == f"{place.url}/runs/run"
    path = store.get_checkpoint_path("run")
    assert path == f"{place.url}/runs/run/checkpoint"
    assert not store.exists(path)
    with pytest.raises(FileNotFoundError):
        store.read(path)
    assert store.get_checkpoints("run") == []
    for text in ("first", "zweite Fassung, größer", ""):
        store.write_text(path, text)
        assert store.exists(path)
        assert store.read(path).decode() == text
    other = Place(place.url, {**place.options, "skip_instance_cache": True}).store()  # as another process has
    assert other.exists(store.get_run_path("run"))
    store.write(f"{store.get_run_path('run')}/epoch=2.ckpt", b"2")
    store.write(f"{store.get_run_path('run')}/deep/epoch=1.ckpt", b"1")
    assert [name.removeprefix(store.get_run_path("run")) for name in store.get_checkpoints("run")] == [
        "/deep/epoch=1.ckpt",
        "/epoch=2.ckpt",
    ]
    assert store.get_checkpoints("run", "point") == [path]
    other.write_text(f"{store.get_run_path('run')}/last.ckpt", "3")
    assert store.read(f"{store.get_run_path('run')}/last.ckpt") == b"3"  # though it has listed the folder before
    names = ["checkpoint", "deep/epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert below(store) == [f"runs/run/{name}" for name in names]


def test_processes_bring_their_files(place: Place) -> None:
    store = place.store()
    remote = pickle.loads(pickle.dumps(store.to_remote("run", None)))
    assert (remote.run_path, remote.train_data_path) == (store.get_run_path("run"), store.get_train_data_path())
    with remote.get_local_output_dir() as folder:
        checkpoint, log = Path(folder, remote.checkpoint_filename), Path(folder, remote.logs_subdir, "events")
        log.parent.mkdir()
        checkpoint.write_text("1")
        log.write_text("a")
        remote.sync(folder)
        assert (store.read(remote.checkpoint_path), store.read(f"{remote.logs_path}/events")) == (b"1", b"a")
        store.write_text(remote.checkpoint_path, "not brought again")
        log.write_text("ab")
        remote.sync(folder)
        assert store.read(f"{remote.logs_path}/events") == b"ab"
        assert store.read(remote.checkpoint_path) == b"not brought again"
    assert not os.path.exists(folder)
    assert below(store) == ["runs/run/checkpoint", "runs/run/logs/events"]


def test_a_checkpoint_that_is_replaced_is_always_whole(place: Place, tmp_path: Path) -> None:
    """While another thread replaces it, from memory and from a file, as estimators and ranks do."""
    options = dict(place.options)
    if place.url.startswith("s3:"):  # s3fs reads objects in parts that are larger than a block
        options |= {"default_block_size": 1 << 16, "max_concurrency": 2}
    store = Place(place.url, options).store()
    path = store.get_checkpoint_path("run")
    assert path is not None
    contents = [letter * (1 << 20) for letter in (b"a", b"b")]
    store.write(path, contents[0])
    written = threading.Event()

    def replace() -> None:
        sync = store.sync_fn("run")
        for number in range(6):
            store.write(path, contents[number % 2])
            (tmp_path / "output").mkdir(exist_ok=True)
            (tmp_path / "output/checkpoint").write_bytes(contents[number % 2][: 1 << 19])
            sync(str(tmp_path / "output"))
        written.set()

    writer = threading.Thread(target=replace)
    writer.start()
    reads = 0
    while not written.is_set() or reads < 3:
        content = store.read(path)
        assert len(content) in (1 << 19, 1 << 20)
        assert len(set(content)) == 1
        reads += 1
        assert writer.is_alive() or written.is_set(), "the writer failed"
    writer.join()
    assert [name for name in below(store) if name.startswith("runs")] == ["runs/run/checkpoint"]


def rows_of(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch["x"]]


def test_data_is_read_here_and_in_other_processes(place: Place, spawned: ProcessPoolExecutor) -> None:
    store = place.store()
    path = store.get_train_data_path(0)
    assert not store.is_parquet_dataset(path)
    for part in (0, 1):
        store.write(f"{path}/part-{part}.parquet", table(10))
    store.write(f"{path}/_SUCCESS", b"")
    assert store.is_parquet_dataset(path)
    assert store.get_parquet_dataset(path).read().num_rows == 20
    remote = store.to_remote("run", 0)
    reader = ParquetReader(remote.train_data_path, storage_options=remote.storage_options, shuffle=False)
    expected = [*range(10), *range(10)]
    assert rows_of(reader) == expected
    if not place.url.startswith("memory:"):  # which a process has for itself
        assert rows_of(spawned.submit(list, reader).result(DEADLINE_S)) == expected

    receiver, sender = multiprocessing.Pipe(duplex=False)
    forked = multiprocessing.get_context("fork").Process(target=lambda: sender.send([rows_of(reader), below(store)]))
    forked.start()
    try:
        assert receiver.poll(DEADLINE_S)
        assert receiver.recv() == [expected, below(store)]
        forked.join(DEADLINE_S)
        assert forked.exitcode == 0
    finally:
        forked.kill()

    store.write(f"{store.get_val_data_path()}/part-0.parquet", b"no Parquet")
    assert not store.is_parquet_dataset(store.get_val_data_path())


def test_a_data_set_appears_as_a_whole(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.store()
    path = store.get_train_data_path()
    folder = store.get_localized_path(path)
    wanted = {f"part-{number}.parquet": table(10 + number) for number in (0, 1)}
    sizes = {name: len(content) for name, content in wanted.items()}

    def staged() -> str:
        staging = publishing.staging_name()
        for name, content in {**wanted, "part-1-of-an-attempt-that-failed.parquet": table(10)}.items():
            store.write(f"{path}/{staging}/{name}", content)
        return staging

    for name, content in (
        ("part-earlier.parquet", table(3)),
        ("y=1/part-earlier.parquet", table(4)),
        ("_SUCCESS", b""),
    ):
        store.write(f"{path}/{name}", content)
    staging = staged()
    with pytest.raises(OSError, match="part-2"):  # of a file system that hosts do not share
        publishing.publish(store.fs, folder, staging, {**sizes, "part-2.parquet": 1})
    assert count_rows(store, path).rows == 7

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "_check", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publishing.publish(store.fs, folder, staging, sizes)
    assert store.is_parquet_dataset(path)
    with pytest.raises(OSError, match=ends_with(DataCode.DATA_STORE_FAILED, publishing.UNFINISHED)):
        count_rows(store, path)
    with pytest.raises(OSError, match=ends_with(DataCode.UNREADABLE_DATA, publishing.UNFINISHED)):
        ParquetReader(path, storage_options=store.get_storage_options())

    staging = staged()
    publishing.publish(store.fs, folder, staging, sizes)
    assert count_rows(store, path).rows == 21
    publishing.discard(store.fs, f"{folder}/{staging}")
    publishing.discard(store.fs, f"{folder}/{staging}")
    assert below(store) == [f"intermediate_train_data/{name}" for name in wanted]
    store.write(f"{path}/{staging}/part-0.parquet", wanted["part-0.parquet"])

    def and_another_writes(*arguments: Any) -> None:
        remove(*arguments)
        store.write(f"{path}/other.parquet", b"")

    remove = publishing._remove
    monkeypatch.setattr(publishing, "_remove", and_another_writes)
    with pytest.raises(OSError, match=r"other\.parquet"):
        publishing.publish(store.fs, folder, staging, {"part-0.parquet": sizes["part-0.parquet"]})


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def spawned() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def test_options_come_from_variables_too(service: object_stores.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {f"FSSPEC_{service.kind.upper()}_{name.upper()}": value for name, value in service.options().items()}
    monkeypatch.setattr(fsspec.config, "conf", {})
    fsspec.config.set_conf_env(fsspec.config.conf, variables)  # as fsspec does when it is imported
    store = Store.create(service.url("variables"))
    store.write_text(store.get_run_path("run"), "here")
    assert Store.create(service.url("variables"), storage_options=service.options()).exists(store.get_run_path("run"))


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of the services try again as often as they do, and wait less before."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, *rest: sleep(min(seconds, 0.01), *rest))


def refused(store: Store, *facts: str) -> None:
    """Whatever is asked, the answer is an error with a code, and not that there is nothing."""
    path, data = store.get_checkpoint_path("run"), store.get_train_data_path()
    assert path is not None
    asks: list[Callable[[], Any]] = [
        lambda: store.exists(path),
        lambda: store.read(path),
        lambda: store.write(path, b"later"),
        lambda: store.get_checkpoints("run"),
        lambda: store.is_parquet_dataset(data),
    ]
    for ask in asks:
        with pytest.raises(OSError, match=ends_with(DataCode.DATA_STORE_FAILED, *facts)) as e:
            ask()
        assert type(pickle.loads(pickle.dumps(e.value))) is type(e.value)


def unreadable(store: Store) -> None:
    with pytest.raises(OSError, match=ends_with(DataCode.UNREADABLE_DATA, "intermediate_train_data")):
        ParquetReader(store.get_train_data_path(), storage_options=store.get_storage_options())


def test_a_bucket_that_is_not_there(service: object_stores.Service) -> None:
    store = Store.create(service.url("x", bucket="mistyped"), storage_options=service.options())
    refused(store, "mistyped")
    unreadable(store)


def test_credentials_that_are_refused(service: object_stores.Service) -> None:
    earlier = Store.create(service.url("refused"), storage_options=service.options())
    earlier.write(f"{earlier.get_run_path('run')}/checkpoint", b"earlier")
    with service.refusing_keys() as options:
        store = Store.create(service.url("refused"), storage_options={**options, "skip_instance_cache": True})
        refused(store)
        unreadable(store)
    assert earlier.read(f"{earlier.get_run_path('run')}/checkpoint") == b"earlier"


def test_credentials_that_are_not_there(service: object_stores.Service) -> None:
    absent: dict[str, dict[str, Any]] = {
        "s3": {"profile": "absent"},
        "gs": {"token": "/absent.json"},
        "abfs": {"connection_string": "absent"},
    }
    store = Store.create(service.url("x"), storage_options=absent[service.kind])
    refused(store)
    unreadable(store)


@pytest.mark.usefixtures("_impatient")
def test_a_service_that_is_away(service: object_stores.Service) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        store = Store.create(service.url("x"), storage_options=service.options(address))
        refused(store)
        unreadable(store)


def test_a_service_that_never_answers(service: object_stores.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages wait for minutes, and s3fs without end."""
    monkeypatch.setattr(services, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        refused(Store.create(service.url("x"), storage_options=service.options(address)))
