"""Data sets that are read and transformed by other processes than those that train (TensorFlow's tf.data service).

    horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker config.json     # a job of workers
    horovodrun -np 2 python train.py config.json                                      # a job that trains

    >>> config = TfDataServiceConfig.read("config.json", wait_for_file_creation=True)
    >>> dataset = send_to_data_service(dataset, config, hvd.rank(), hvd.size())

Workers belong to dispatchers, which share out a data set. Dispatchers run beside the workers (dispatcher_side
"compute") or in the training processes ("training").

TensorFlow's servers obey everybody. So they can be reached only by processes that have the configuration, which holds
the service's key (fence.py, relay.py), unless the configuration says `insecure`.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import tensorflow as tf

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import rank as own_rank
from horovod.tensorflow.data.fence import Fence, Relay
from horovod.tensorflow.data.rendezvous import Address, Client, host_address

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]


@dataclass(frozen=True)
class TfDataServiceConfig:
    """The facts about the service that both jobs share. Raises ValueError if dispatcher_side is neither "compute" nor
    "training".

    >>> config = TfDataServiceConfig.read("config.json", wait_for_file_creation=True)

    insecure: work without a key. Anybody who can connect to a dispatcher or worker can then run code there as its user.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: list[Address]
    key: bytes
    timeout: int = 60
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.dispatcher_side not in ("compute", "training"):
            raise ValueError(
                coded(
                    TrainingCode.INVALID_ARGUMENT,
                    f'dispatcher_side must be "compute" or "training", not {self.dispatcher_side!r}.',
                )
            )

    def compute_client(self, verbose: int = 1) -> Client:
        """A client of the service; its `shutdown` ends all workers."""
        return Client(self.addresses, self.key, self.timeout, verbose)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"key": base64.b64encode(self.key).decode()}

    @staticmethod
    def from_dict(config: dict[str, Any]) -> TfDataServiceConfig:
        """The configuration from the values that `to_dict` returned."""
        addresses = [(str(host), int(port)) for host, port in config["addresses"]]
        return TfDataServiceConfig(**(config | {"key": base64.b64decode(config["key"]), "addresses": addresses}))

    def write(self, filename: str) -> None:
        """Writes the file at once, and readable by its owner alone: it has the key in it."""
        path = Path(filename)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            json.dump(self.to_dict(), file)
        temporary.replace(path)

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """The configuration in the file. With wait_for_file_creation, waits without limit until the file exists."""
        if wait_for_file_creation:
            wait_for_file(Path(filename))
        return TfDataServiceConfig.from_dict(json.loads(Path(filename).read_text()))


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """The address of this training process's dispatcher, whose workers are ready. Example:

        >>> with tf_data_service(config, hvd.rank()) as address:
        ...     dataset = dataset.apply(tf.data.experimental.service.distribute("distributed_epoch", address))
        ...     model.fit(dataset)

    Dispatchers on the training side run in the first ranks until the context ends. Workers run until a program calls
    `compute_config.compute_client().shutdown()`.

    Raises TimeoutError: dispatcher or workers did not come in time; ConnectionError: the service is gone.
    """
    client = compute_config.compute_client()
    own = rank % compute_config.dispatchers
    ways = _Ways(compute_config)
    with contextlib.ExitStack() as stack:
        if compute_config.dispatcher_side == "training" and rank < compute_config.dispatchers:
            stack.enter_context(_dispatcher(client, ways, rank))
        address = ways.to_dispatcher(own, client.wait_for_dispatcher_registration(own))
        ways.to_workers(client.wait_for_dispatcher_worker_registration(own))
        yield f"grpc://{address}"


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """The data set, which the workers of the service compute.

    >>> dataset = send_to_data_service(dataset, config, hvd.rank(), hvd.size())

    Args:
        dataset: a tf.data.Dataset, the same on all ranks.
        compute_config: of a service whose dispatchers are on its own side.
        rank, size: of this training process, and how many there are; size is needed for round_robin.
        processing_mode: "distributed_epoch": workers share out one pass over the data; "parallel_epochs": each makes
            a separate pass; or another value of tf.data.experimental.service.distribute.
        reuse_dataset: ranks of one dispatcher share the elements, so that each element goes to one of them.
        round_robin: ranks of one dispatcher share the elements in turns, at the same pace.

    Raises:
        ValueError: the dispatchers are in the training processes (use `tf_data_service`), or round_robin without size.
        TimeoutError, ConnectionError: as `tf_data_service`.
    """
    if compute_config.dispatcher_side == "training":
        raise ValueError(
            coded(
                TrainingCode.CONTRADICTORY_ARGUMENTS,
                "send_to_data_service needs dispatchers that outlive it. With dispatcher_side='training' use: "
                "with tf_data_service(compute_config, rank) as address.",
            )
        )
    if round_robin and size is None:
        raise ValueError(
            coded(
                TrainingCode.CONTRADICTORY_ARGUMENTS, "round_robin=True needs size, the number of training processes."
            )
        )
    with tf_data_service(compute_config, rank) as address:
        shared: dict[str, Any] = {}
        if reuse_dataset:
            shared["job_name"] = "shared"
        if round_robin:
            shared |= {"job_name": "shared", "consumer_index": rank, "num_consumers": size}
        return dataset.apply(
            tf.data.experimental.service.distribute(processing_mode=processing_mode, service=address, **shared)
        )


tf.data.Dataset.send_to_data_service = send_to_data_service  # dataset.send_to_data_service(config, rank)


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Runs a worker, and a dispatcher in some of the processes, until the service is shut down.

    >>> compute_worker_fn(config)  # returns when the service is shut down

    All processes of the job of workers call it with the same `compute_config`, after hvd.init(). Raises TimeoutError: a
    dispatcher did not come in time.
    """
    client = compute_config.compute_client()
    index = own_rank()
    ways = _Ways(compute_config)
    with contextlib.ExitStack() as stack:
        if compute_config.dispatcher_side == "compute" and index < compute_config.dispatchers:
            stack.enter_context(_dispatcher(client, ways, index))
        own = index // compute_config.workers_per_dispatcher
        dispatcher = ways.to_dispatcher(own, client.wait_for_dispatcher_registration(own))
        service = tf.data.experimental.service

        def start(port: int, address: str) -> Any:
            return service.WorkerServer(
                service.WorkerConfig(
                    dispatcher_address=dispatcher,
                    worker_address=address,
                    port=port,
                    heartbeat_interval_ms=1000,
                    dispatcher_timeout_ms=compute_config.timeout * 1000,
                )
            )

        address = stack.enter_context(ways.server(_worker_name(index), start))
        client.register_worker_for_dispatcher(own, index, address)
        with contextlib.suppress(ConnectionError):  # without the server the job is gone, too
            client.wait_for_shutdown()


class _Ways:
    """How this process reaches the servers of a service, and lets others reach its own."""

    def __init__(self, config: TfDataServiceConfig) -> None:
        self._workers_of_each = config.workers_per_dispatcher
        self._relay = None if config.insecure else Relay.own()
        self._service = self._relay.service(config.key, config.timeout) if self._relay else ""

    def to_dispatcher(self, dispatcher: int, address: str) -> str:
        """What TensorFlow in this process connects to, of a dispatcher that was registered with that address."""
        place = address.partition("://")[2]
        if self._relay is None:
            return place
        self._relay.found(self._service, _dispatcher_name(dispatcher), place)
        return self._relay.path(self._service, _dispatcher_name(dispatcher))

    def to_workers(self, addresses: dict[int, str]) -> None:
        """TensorFlow in this process can connect to these workers."""
        if self._relay is not None:
            for worker, address in addresses.items():
                self._relay.path(self._service, _worker_name(worker))
                self._relay.found(self._service, _worker_name(worker), address.partition("://")[2])

    def expect_workers(self, dispatcher: int) -> None:
        """A dispatcher of this process may call its workers before anybody has told where they are: its calls wait."""
        if self._relay is not None:
            first = dispatcher * self._workers_of_each
            for worker in range(first, first + self._workers_of_each):
                self._relay.path(self._service, _worker_name(worker))

    @contextlib.contextmanager
    def server(self, name: str, start: Callable[[int, str], Any]) -> Iterator[str]:
        """Runs a server of TensorFlow's that `start` makes. Yields the address under which it is registered.

        start: takes a port and the address that TensorFlow tells other processes.
        """
        if self._relay is None:
            server = start(0, f"{host_address()}:%port%")
            try:
                yield f"grpc://{host_address()}:{server._server.bound_port()}"
            finally:
                server._stop()
            return
        fence = Fence()
        try:
            with self._relay.serve(self._service, name, fence) as address:
                server = start(fence.port, self._relay.path(self._service, name))
                try:
                    fence.check()
                    yield f"relay://{address}"
                finally:
                    server._stop()
        finally:
            fence.close()


def _worker_name(index: int) -> str:
    return f"worker-{index}"


def _dispatcher_name(index: int) -> str:
    return f"dispatcher-{index}"


@contextlib.contextmanager
def _dispatcher(client: Client, ways: _Ways, index: int) -> Iterator[None]:
    def start(port: int, _: str) -> Any:
        service = tf.data.experimental.service
        return service.DispatchServer(service.DispatcherConfig(port=port))

    def tell() -> None:
        # The processes that need the workers get the same error.
        with contextlib.suppress(ConnectionError, TimeoutError):
            ways.to_workers(client.wait_for_dispatcher_worker_registration(index))

    with ways.server(_dispatcher_name(index), start) as address:
        ways.expect_workers(index)
        client.register_dispatcher(index, address)
        threading.Thread(target=tell, name="tf-data-workers", daemon=True).start()
        yield


# -- waiting until another process has made a file ---------------------------------------------------------------------
# Linux tells by inotify (man 7 inotify).

_CREATED: Final = 0x100  # IN_CREATE
_MOVED_TO: Final = 0x80  # IN_MOVED_TO
# inotify reports no files that another host makes in a shared folder, so the folder is also looked at this often.
_LOOK_AGAIN_S: Final = 1.0


def wait_for_file(path: Path) -> None:
    """Returns when there is a file of that name, however long it takes."""
    with ExitStack() as stack:
        events = _events_in(path.parent)
        if events is not None:
            stack.callback(os.close, events)
        while not path.exists():  # asked after the watch has begun, so that no file is missed
            for readable in select.select([] if events is None else [events], [], [], _LOOK_AGAIN_S)[0]:
                os.read(readable, 1 << 16)


def _events_in(folder: Path) -> int | None:
    """A descriptor that is readable when a file has appeared in the folder; None if it can't be watched."""
    libc = ctypes.CDLL(None)
    events: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if events < 0:
        return None
    if libc.inotify_add_watch(events, os.fsencode(folder), _CREATED | _MOVED_TO) < 0:  # there is no such folder yet
        os.close(events)
        return None
    return events
