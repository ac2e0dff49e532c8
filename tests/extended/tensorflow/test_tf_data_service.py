"""Data sets computed by a real tf.data service: a job of workers beside a job that trains."""

from __future__ import annotations

import select
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import TrainingCode


def _read(path: str, side: str, round_robin: bool) -> list[int]:
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow.data import compute_service as data

    config = data.TfDataServiceConfig.read(path, wait_for_file_creation=True)
    assert data.TfDataServiceConfig.from_dict(config.to_dict()) == config
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    rank, size = hvd.rank(), hvd.size()
    dataset = tf.data.Dataset.range(40).map(lambda number: number * 3)
    if side == "training":
        with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "tf_data_service")):
            data.send_to_data_service(dataset, config, rank)
        with data.tf_data_service(config, rank) as address:
            distributed = tf.data.experimental.service.distribute("distributed_epoch", address, job_name="all")
            found = [int(number) for number in dataset.apply(distributed)]
            hvd.allreduce(tf.zeros([]))  # rank 0 has the dispatcher
    elif round_robin:
        dataset = dataset.repeat()
        dataset = data.send_to_data_service(
            dataset, config, rank, size, processing_mode="parallel_epochs", round_robin=True
        )
        found = [int(number) for number in dataset.take(10)]
    else:
        dataset = data.send_to_data_service(dataset, config, rank, size, reuse_dataset=True)
        found = [int(number) for number in dataset]
    hvd.allreduce(tf.zeros([]))
    if rank == 0:
        config.compute_client().shutdown()
    return found


@pytest.mark.parametrize(
    ("side", "dispatchers", "round_robin"),
    [("compute", 1, False), ("compute", 1, True), ("training", 1, False)],
)
def test_workers_compute_what_others_train_on(
    tf_pair: World, tmp_path: Path, side: str, dispatchers: int, round_robin: bool
) -> None:
    path = str(tmp_path / "config.json")
    command = [sys.executable, "-m", "horovod.launch", "-np", "2", sys.executable, "-m"]
    command += ["horovod.tensorflow.data.compute_worker", path, "--dispatchers", str(dispatchers)]
    workers = subprocess.Popen(
        [*command, "--dispatcher-side", side],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        found = tf_pair.run(_read, path, side, round_robin)
        said = workers.communicate(timeout=60)[0].decode()
    finally:
        workers.kill()
        workers.wait()
    assert workers.returncode == 0, said
    assert not Path(path).exists()
    if round_robin:
        assert [len(numbers) for numbers in found] == [10, 10]
    else:
        assert sorted([*found[0], *found[1]]) == [3 * number for number in range(40)]


def test_what_is_refused() -> None:
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig
    from horovod.tensorflow.data.rendezvous import Client, Service

    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "dispatcher_side", "'elsewhere'")):
        TfDataServiceConfig(1, 1, "elsewhere", [], b"key")
    service = Service(b"key", 2)
    try:
        with pytest.raises(ConnectionError, match=ends_with(TrainingCode.DATA_SERVICE_UNREACHABLE, "the key")):
            Client(service.addresses, b"another", 5).wait_for_shutdown()
        client = Client(service.addresses, b"key", 5)
        client.register_worker_for_dispatcher(0, 3)
        incomplete = ends_with(TrainingCode.DATA_SERVICE_INCOMPLETE, "0 s", "2 workers of dispatcher 0 (there are 1)")
        with pytest.raises(TimeoutError, match=incomplete):
            client.wait_for_dispatcher_worker_registration(0, timeout=0)
        client.register_worker_for_dispatcher(0, 4)
        client.wait_for_dispatcher_worker_registration(0)
    finally:
        service.close()
    with pytest.raises(
        ConnectionError, match=ends_with(TrainingCode.DATA_SERVICE_UNREACHABLE, str(service.addresses[0]))
    ):
        client.shutdown()


@pytest.mark.parametrize("folder_exists", [True, False])
def test_waiting_for_the_file_ends_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder_exists: bool
) -> None:
    """In a folder that exists by the kernel's word: nothing looks for it a second time."""
    from horovod.tensorflow.data import compute_service
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig

    path = tmp_path / "folder" / "config.json"
    if folder_exists:
        path.parent.mkdir()
        monkeypatch.setattr(compute_service, "_LOOK_AGAIN_S", 3600.0)
    waits, select_ = threading.Event(), select.select

    def seen(*arguments: Any) -> Any:
        waits.set()
        return select_(*arguments)

    monkeypatch.setattr(compute_service.select, "select", seen)
    config = TfDataServiceConfig(1, 2, "compute", [("host", 1)], b"key")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(TfDataServiceConfig.read, str(path), wait_for_file_creation=True)
        assert waits.wait(60)
        path.parent.mkdir(exist_ok=True)
        (path.parent / "another").touch()
        config.write(str(path))
        assert found.result(60) == config
