"""Several engines in one process, each driven by a thread of its own: the smallest world that runs everything native.

The coordinator is replaced by the few lines that agree on ids, so these tests show the engine alone. Transports:
"in_process" (plain memory between threads), "shm" (memfd segments, mapped twice), "tcp" (connected socket pairs),
"gloo" (the same with Gloo's algorithms; skipped where Horovod was built without Gloo), "hosts" (socket pairs, and
memory between ranks of one of the hosts that hosts_of() deals them to), "sparse" and "sparse_hosts" (as "tcp" and
"hosts", with socket pairs between partners only).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from event_words import NO_GLOO

from horovod import _core

DTYPES = {dtype.name.lower(): dtype for dtype in _core.DType if "FLOAT8" not in dtype.name}
ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER, *_ = _core.OpType
AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT, *_ = _core.ReduceOp
ALLREDUCE_SUM = _core.OpSpec(ALLREDUCE, op=SUM)
TRANSPORTS = ("in_process", "shm", "tcp")  # with our own algorithms
SPARSE = ("sparse", "sparse_hosts")
EVERY_TRANSPORT = (*TRANSPORTS, "hosts", "gloo", *SPARSE)
SOCKETS = ("tcp", "gloo", "hosts", *SPARSE)


def spec(kind: int, options: dict[str, Any]) -> _core.OpSpec:
    """The spec of an operation; what belongs to it is taken out of `options`."""
    names = {"op": "reduce_op"}
    fields = ("op", "prescale", "postscale", "root", "process_set")
    found = {field: options.pop(names.get(field, field)) for field in fields if names.get(field, field) in options}
    return _core.OpSpec(kind, **found)


class Member:
    """One rank: its engine and NumPy-level operations."""

    def __init__(self, engine: Any, rank: int, size: int) -> None:
        self.engine = engine
        self.rank = rank
        self.size = size
        self._keep: dict[_core.Handle, Any] = {}

    def submit(
        self, kind: int, name: str, arrays: list[np.ndarray], outputs: list[np.ndarray | None], **kw: Any
    ) -> _core.Handle:
        tensors = [
            (a.ctypes.data, 0 if o is None else o.ctypes.data, DTYPES[str(a.dtype)], a.shape)
            for a, o in zip(arrays, outputs, strict=True)
        ]
        handle = self.engine.submit(spec(kind, kw), name, tensors, **kw)
        self._keep[handle] = (arrays, outputs)
        return handle

    def wait(self, handle: _core.Handle) -> Any:
        result = handle.result()
        arrays, outputs = self._keep.pop(handle)
        if result is None:
            return outputs[0] if len(outputs) == 1 else outputs
        if isinstance(result, tuple):
            return self._adopt(result[0][0], arrays[0].dtype), result[1]
        adopted = [self._adopt(out, a.dtype) for out, a in zip(result, arrays, strict=True)]
        return adopted[0] if len(adopted) == 1 else adopted

    @staticmethod
    def _adopt(output: Any, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer(output, dtype=dtype).reshape(output.shape)

    def allreduce_async(
        self, array: np.ndarray, name: str = "allreduce.noname", op: int = SUM, **kw: Any
    ) -> _core.Handle:
        return self.submit(ALLREDUCE, name, [array], [array], reduce_op=op, **kw)

    def allreduce(self, array: np.ndarray, name: str = "allreduce.noname", op: int = SUM, **kw: Any) -> np.ndarray:
        return self.wait(self.allreduce_async(array, name, op, wait_follows=True, **kw))

    def broadcast(self, array: np.ndarray, root: int, name: str = "broadcast.noname", **kw: Any) -> np.ndarray:
        return self.wait(self.submit(BROADCAST, name, [array], [array], root=root, wait_follows=True, **kw))

    def allgather(self, array: np.ndarray, name: str = "allgather.noname", **kw: Any) -> np.ndarray:
        return self.wait(self.submit(ALLGATHER, name, [array], [None], wait_follows=True, **kw))

    def alltoall(
        self, array: np.ndarray, splits: list[int] | None = None, name: str = "alltoall.noname", **kw: Any
    ) -> Any:
        return self.wait(self.submit(ALLTOALL, name, [array], [None], splits=splits, wait_follows=True, **kw))

    def reducescatter(
        self, array: np.ndarray, op: int = SUM, name: str = "reducescatter.noname", **kw: Any
    ) -> np.ndarray:
        return self.wait(self.submit(REDUCESCATTER, name, [array], [None], reduce_op=op, wait_follows=True, **kw))

    def barrier(self, name: str = "barrier.noname", **kw: Any) -> None:
        self.engine.submit(spec(BARRIER, kw), name, [], wait_follows=True, **kw).result()


class Negotiator:
    """Gives a name its id once every rank of its set has announced it; a thread for each engine's outbox."""

    def __init__(self, engines: list[Any]) -> None:
        self._engines = engines
        self._lock = threading.Lock()
        self._announced: dict[tuple[int, str], set[int]] = {}
        self._next: dict[int, int] = {}
        self.sets = {0: list(range(len(engines)))}
        self.announced: list[tuple[Any, ...]] = []
        self.blocked: list[tuple[int, str]] = []
        self.recalled: list[tuple[int, list[int]]] = []
        self.notes: list[tuple[int, bool, str]] = []
        self.joined = threading.Event()  # some rank is in join()
        self._threads = [threading.Thread(target=self._serve, args=(rank,)) for rank in range(len(engines))]
        for thread in self._threads:
            thread.start()

    def _serve(self, rank: int) -> None:
        while (items := self._engines[rank].next_outbox(1000)) is not None:
            for kind, payload in items:
                if kind == "announce":
                    self._announce(rank, payload)
                elif kind == "blocked":
                    self.blocked.append((rank, payload[0]))
                elif kind == "note":
                    self.notes.append((rank, *payload))
                elif kind == "join":
                    self.joined.set()
                elif kind == "recalled":
                    self.recalled.append((rank, list(payload[1])))

    def _announce(self, rank: int, op: tuple[Any, ...]) -> None:
        name, process_set = op[0], op[7]
        members = self.sets[process_set]
        with self._lock:
            self.announced.append(op)
            ranks = self._announced.setdefault((process_set, name), set())
            ranks.add(rank)
            if len(ranks) < len(members):
                return
            del self._announced[process_set, name]
            number = self._next.get(process_set, 0)
            self._next[process_set] = number + 1
        for member in members:
            self._engines[member].apply_plan(process_set, name, number)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def connect(
    size: int,
    connections: int,
    hosts: Sequence[int] = (),
    placement: Sequence[int] = (),
    options: Mapping[str, int] | None = None,
) -> list[dict[int, list[int]]]:
    sockets: list[dict[int, list[int]]] = [{} for _ in range(size)]
    for a in range(size):
        for b in _core.partners(a, size, hosts=hosts, placement=placement, options=options or {}):
            for _ in range(connections if a < b else 0):
                one, other = socket.socketpair()
                sockets[a].setdefault(b, []).append(one.detach())
                sockets[b].setdefault(a, []).append(other.detach())
    return sockets


def hosts_of(size: int) -> list[int]:
    """The host of each rank: two or more of them, uneven and out of order where there are enough ranks."""
    return (
        [[], [0], [0, 1], [0, 0, 1], [0, 1, 0, 1], [0, 1, 1, 2, 0]][size] if size < 6 else [r % 3 for r in range(size)]
    )


class EngineWorld:
    """Context manager: `size` engines over `transport`; `hosts` instead of hosts_of() for "hosts".

    placement: by rank, which are of one host without sharing memory there.
    files: the libraries for GPUs, of all ranks or for each.
    """

    def __init__(
        self,
        size: int,
        transport: str = "in_process",
        connections: int = 1,
        hosts: Sequence[int] | None = None,
        files: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
        placement: Sequence[int] = (),
        **options: int,
    ) -> None:
        labels = [f"rank {rank} (thread {rank}) on host here" for rank in range(size)]
        if transport == "gloo":
            if NO_GLOO in _core.gloo_obstacle():
                pytest.skip("built without Gloo (libgloo-dev was not there)")
            options["gloo"] = 1
        if transport in SPARSE:
            options["full_mesh_members"] = 1
        self.size = size
        self.transport = transport
        self._connections = connections
        self._options = options
        self.hosts = list(hosts or hosts_of(size)) if transport in ("hosts", "sparse_hosts") else []
        self.placement = list(placement) or self.hosts or [0] * size
        common: dict[str, Any] = {"size": size, "epoch": 1, "labels": labels, "options": options}
        common["placement"] = self.placement
        of = [files] * size if isinstance(files, Mapping) else files or [{}] * size
        if size == 1:
            self.engines = [_core.Engine(rank=0, **common, **of[0])]
        elif transport in SOCKETS:
            paths = self._local_paths(self.hosts, size)
            sockets = connect(size, connections, paths[0].get("hosts", ()), self.placement, options)
            self.engines = [
                _core.Engine(rank=rank, sockets=sockets[rank], **paths[rank], **common, **of[rank])
                for rank in range(size)
            ]
        else:
            segments = [_core.Segment(in_process=transport == "in_process", options=options) for _ in range(size)]
            addresses = [segment.address for segment in segments]
            self.engines = [
                _core.Engine(rank=rank, segment=segments[rank], segment_addresses=addresses, **common, **of[rank])
                for rank in range(size)
            ]
        self.members = [Member(engine, rank, size) for rank, engine in enumerate(self.engines)]
        self.negotiator = self._negotiator()

    def _negotiator(self) -> Any:
        return Negotiator(self.engines)

    def _local_paths(self, hosts: Sequence[int], size: int) -> list[dict[str, Any]]:
        """What each member passes to share memory with others on its host; nothing on one host, or alone on each."""
        if len(set(hosts)) in (1, len(hosts)):
            return [{} for _ in range(size)]
        segments = [
            _core.Segment(in_process=True, options=self._options) if hosts.count(host) > 1 else None for host in hosts
        ]
        addresses = [segment.address if segment else "" for segment in segments]
        return [{"segment": segment, "segment_addresses": addresses, "hosts": hosts} for segment in segments]

    def add_set(self, number: int, *ranks: int) -> int:
        """Registers a process set on every rank; gives back its number."""
        self.negotiator.sets[number] = list(ranks)
        if self.transport in SOCKETS:
            paths = self._local_paths([self.hosts[rank] for rank in ranks] if self.hosts else [], len(ranks))
            sockets = connect(
                len(ranks),
                self._connections,
                paths[0].get("hosts", ()),
                [self.placement[rank] for rank in ranks],
                self._options,
            )
            for rank, engine in enumerate(self.engines):
                mine = sockets[ranks.index(rank)] if rank in ranks else {}
                path = paths[ranks.index(rank)] if rank in ranks else {}
                engine.add_process_set(number, ranks, sockets={ranks[peer]: fds for peer, fds in mine.items()}, **path)
            return number
        segments = {
            rank: _core.Segment(in_process=self.transport == "in_process", options=self._options) for rank in ranks
        }
        addresses = [segments[rank].address for rank in ranks]
        for rank, engine in enumerate(self.engines):
            engine.add_process_set(number, ranks, segment=segments.get(rank), segment_addresses=addresses)
        return number

    def remove_set(self, number: int) -> None:
        for engine in self.engines:
            engine.remove_process_set(number)

    def __enter__(self) -> EngineWorld:
        return self

    def __exit__(self, *exc: object) -> None:
        closers = [threading.Thread(target=engine.close) for engine in self.engines]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        self.negotiator.join()

    def run(self, body: Callable[[Member], Any], timeout: float = 60) -> list[Any]:
        """body on every member in a thread of its own; the results by rank, or the first exception."""
        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException]] = []

        def target(rank: int) -> None:
            try:
                results[rank] = body(self.members[rank])
            except BaseException as error:
                errors.append((rank, error))

        threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise TimeoutError(f"a rank is still running; others failed with {errors}")
        if errors:
            raise errors[0][1]
        return results
