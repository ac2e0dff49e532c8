"""Connections that outlive a world, between threads that play processes and in real worlds, over loopback."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiers
from resources import eventually
from runtime_harness import Program

from horovod.coordinator.server import EmbeddedCoordinator
from horovod.worker.runtime import mesh, past_world
from horovod.worker.runtime.handshake import Resuming, StrangerError
from horovod.worker.runtime.host import Interface
from horovod.worker.runtime.mesh import Listeners, connect_peers
from horovod.worker.runtime.past_world import KeptLinks
from horovod.worker.runtime.world import Member, World

LOOPBACK = [Interface("lo", ("127.0.0.1",))]
Links = dict[int, socket.socket]


class Process:
    """What one process has between its worlds."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.kept = KeptLinks()
        self.links: Links = {}  # by rank
        self.keys: dict[int, bytes] = {}
        self.world: World

    def inodes(self) -> dict[int, int]:
        return {rank: os.fstat(link.fileno()).st_ino for rank, link in self.links.items()}

    def leave(self, descriptors: Sequence[int] | None = None) -> None:
        """As an engine leaves that gives away the connections to these ranks, or to all, and closes the others."""
        kept = {}
        for rank, link in self.links.items():
            if descriptors is None or rank in descriptors:
                kept[rank] = link.detach()
            else:
                link.close()
        self.links = {}
        self.kept.keep(self.world, kept)


def form(processes: Sequence[Process], epoch: int, seconds: float = 30.0) -> None:
    """A world of these processes in this order, with all connections."""
    listeners = [Listeners(LOOPBACK) for _ in processes]
    members = tuple(
        Member(rank, 0, 1, rank, 1, f"m{epoch}.{rank}", "node-a", "kernel", process.pid, tuple(listener.endpoints))
        for rank, (process, listener) in enumerate(zip(processes, listeners, strict=True))
    )
    secret = bytes([epoch]) * 32
    deadline = time.monotonic() + seconds

    def connect(rank: int) -> None:
        process, world = processes[rank], World("job", epoch, rank, members, secret)
        keys: dict[int, bytes] = {}
        kept = process.kept.take(world)
        peers = connect_peers(world, listeners[rank], connections=1, deadline=deadline, wire_keys=keys, kept=kept)
        assert len(process.kept) == 0
        process.world = world
        process.links = {peer: socket.socket(fileno=fd) for peer, [fd] in peers.items()}
        process.keys = {peer: keys[link.fileno()] for peer, link in process.links.items()}

    try:
        with ThreadPoolExecutor(len(processes)) as pool:
            list(pool.map(connect, range(len(processes))))
    finally:
        for listener in listeners:
            listener.close()
    check(processes)


def check(processes: Sequence[Process]) -> None:
    """Each connection carries what is sent from now on, from the first byte, and both ends have its keys."""
    for rank, process in enumerate(processes):
        for peer, link in process.links.items():
            assert not os.get_blocking(link.fileno())
            link.settimeout(10)
            link.sendall(f"{rank} to {peer}".encode())
    for rank, process in enumerate(processes):
        for peer, link in process.links.items():
            assert link.recv(100) == f"{peer} to {rank}".encode()
            link.setblocking(False)
            ours, theirs = process.keys[peer], processes[peer].keys[rank]
            assert ours == theirs[len(theirs) // 2 :] + theirs[: len(theirs) // 2]


@pytest.fixture
def processes() -> Iterator[Callable[[int], list[Process]]]:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    made: list[Process] = []

    def make(count: int) -> list[Process]:
        for _ in range(count):
            made.append(Process(100 + len(made)))
        return made[-count:]

    yield make
    for process in made:
        process.kept.close()
        for link in process.links.values():
            link.close()
    # What tests before this one have left to gRPC's threads may open a descriptor for a moment.
    assert eventually(lambda: set(os.listdir("/proc/self/fd")) <= before)


def test_survivors_keep_what_joins_them(processes):
    first, second, third = everyone = processes(3)
    form(everyone, 1)
    between, keys = third.inodes()[0], third.keys[0]
    for sender, receiver in ((first, 2), (third, 0)):  # what the last world has left, in both directions
        sender.links[receiver].send(os.urandom(100_000))
    second.links[0].close()
    second.links[2].close()
    first.leave([2])
    third.leave([0])
    form([first, third], 2)  # it shrinks
    assert third.inodes() == {0: between}
    assert first.links[1].getpeername() == third.links[0].getsockname()
    assert third.keys[0] != keys
    [newcomer] = processes(1)
    first.leave()
    third.leave()
    form([newcomer, third, first], 3)  # it grows, and the two change their places
    assert third.inodes()[2] == between
    assert first.links[1].getpeername() == third.links[2].getsockname()


@pytest.mark.parametrize("who", [0, 1])
def test_a_connection_that_one_side_has_closed_is_made_anew(processes, who):
    pair = processes(2)
    form(pair, 1)
    before = pair[0].inodes()
    pair[who].leave([])
    pair[1 - who].leave()
    form(pair, 2)
    assert pair[0].inodes() != before


@pytest.mark.parametrize("who", [0, 1])
def test_a_side_that_holds_a_connection_and_says_nothing(processes, who, monkeypatch):
    monkeypatch.setattr(mesh, "KEPT_SECONDS", 0.3)
    pair = processes(2)
    form(pair, 1)
    stuck, goes_on = pair[who], pair[1 - who]
    [held] = stuck.links.values()  # an engine that can't be closed has it still
    stuck.links = {}
    goes_on.leave()
    form(pair, 2)
    assert held.fileno() not in {link.fileno() for link in stuck.links.values()}
    held.close()


def test_what_does_not_end_is_no_use(processes, monkeypatch):
    one, other = pair = processes(2)
    form(pair, 1)
    before = one.inodes()
    monkeypatch.setattr(mesh, "MAX_DISCARDED_BYTES", 50_000)
    monkeypatch.setattr(mesh, "SEEK_BYTES", 10_000)
    one.links[1].send(bytes(100_000))
    one.leave()
    other.leave()
    form(pair, 2)
    assert one.inodes() != before


def test_more_than_is_worth_to_be_sent(processes, monkeypatch):
    one, other = pair = processes(2)
    form(pair, 1)
    before = one.inodes()
    with contextlib.suppress(BlockingIOError):
        while one.links[1].send(bytes(1 << 20)):
            pass
    assert past_world._waiting_bytes(one.links[1]) > past_world.MAX_WAITING_BYTES
    one.leave()
    other.leave()
    has_looked = threading.Event()
    take, take_of_other = one.kept.take, other.kept.take

    def looks(world: World) -> Links:
        taken = take(world)
        has_looked.set()
        return taken

    def looks_later(world: World) -> Links:  # from then on it throws away what was sent, and nothing waits any more
        assert has_looked.wait(60)
        return take_of_other(world)

    monkeypatch.setattr(one.kept, "take", looks)
    monkeypatch.setattr(other.kept, "take", looks_later)
    form(pair, 2)
    assert one.inodes() != before


def test_a_link_to_another_process_than_it_seems_is_not_used(processes, monkeypatch):
    monkeypatch.setattr(mesh, "KEPT_SECONDS", 0.3)
    one, other, third = everyone = processes(3)
    form(everyone, 1)
    one.leave()
    other.leave()
    third.leave()
    one.kept._sockets = dict(zip(one.kept._sockets, reversed(one.kept._sockets.values()), strict=True))
    form(everyone, 2)  # its links to them are made anew; nobody takes the word of one for that of another


def test_threads_that_are_one_process_keep_nothing(processes):
    one, other = pair = processes(2)
    other.pid = one.pid
    form(pair, 1)
    one.leave()
    assert len(one.kept) == 0
    other.leave()


def test_a_forked_child_closes_its_copies_only(processes):
    one, other = pair = processes(2)
    form(pair, 1)
    inodes = one.inodes()
    one.leave()
    other.leave()
    child = os.fork()
    if child == 0:
        one.kept.close_copies()
        other.kept.close_copies()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    form(pair, 2)
    assert one.inodes() == inodes


def test_the_marker_comes_in_parts_and_behind_its_own_beginning(processes):
    one, other = pair = processes(2)
    form(pair, 1)
    link = other.links.pop(0)
    one.leave()

    def send_slowly() -> None:
        resuming = Resuming(bytes([2]) * 32, 2, 1, 0)
        ours = resuming.take_output()
        for part in (ours[:20], ours[:31], *(bytes([byte]) for byte in ours)):
            link.send(part)
        link.settimeout(10)
        theirs = link.recv(len(ours), socket.MSG_WAITALL)
        resuming.feed(theirs[-resuming.needs :])
        link.send(resuming.take_output() + b"next")

    sender = threading.Thread(target=send_slowly)
    sender.start()
    listeners = Listeners(LOOPBACK)
    members = tuple(
        Member(rank, 0, 1, rank, 1, f"m{rank}", "node-a", "kernel", process.pid, tuple(listeners.endpoints))
        for rank, process in enumerate(pair)
    )
    world = World("job", 2, 0, members, bytes([2]) * 32)
    try:
        deadline = time.monotonic() + 30
        peers = connect_peers(world, listeners, connections=1, deadline=deadline, kept=one.kept.take(world))
    finally:
        listeners.close()
    sender.join()
    with socket.socket(fileno=peers[1][0]) as resumed:
        assert resumed.recv(100) == b"next"
    link.close()


def test_only_the_higher_rank_gives_up(processes, monkeypatch):
    monkeypatch.setattr(mesh, "MAX_DISCARDED_BYTES", 50_000)
    monkeypatch.setattr(mesh, "SEEK_BYTES", 10_000)
    one, other = pair = processes(2)
    form(pair, 1)
    before = one.inodes()
    other.links[0].send(bytes(100_000))
    one.leave()
    other.leave()
    form(pair, 2)
    assert one.inodes() == before


def test_a_nonce_of_another_is_refused():
    ours, theirs = Resuming(b"s" * 32, 7, 0, 1), Resuming(b"s" * 32, 7, 1, 0)
    message = theirs.take_output()
    assert message[:32] == ours.marker
    with pytest.raises(StrangerError):
        ours.feed(message[32:-1] + bytes([message[-1] ^ 1]))
    for stranger in (Resuming(b"t" * 32, 7, 1, 0), Resuming(b"s" * 32, 8, 1, 0), Resuming(b"s" * 32, 7, 0, 1)):
        assert ours.marker not in stranger.take_output()


# Sums up 16 MB again and again, and says of each world how many members it has, and kept connections. At the end,
# whether there are as few descriptors as at first.
TRAINING = f"""
import itertools
import numpy as np
sys.path.append({str(Path(__file__).parents[1])!r})
from resources import descriptors, eventually

hvd.init()
first = descriptors()
last = frozenset()
while True:
    context, size = current(), hvd.size()
    try:
        for step in itertools.count():
            data = np.ones(1 << 22, np.float32)
            span = (data.ctypes.data, data.ctypes.data, 7, data.shape)
            context.engine.submit(OpSpec(0), "allreduce.x", [span]).result()
            assert (data == size).all(), (data.min(), data.max(), size)
            if step == 1:
                print(size, len(context.socket_inodes & last), flush=True)
                if size == 2:
                    break
    except HorovodInternalError:
        last = context.socket_inodes
        del context
        hvd.join_again()
    else:
        break
print(eventually(lambda: descriptors() < first))
hvd.shutdown()
"""


@pytest.mark.longer
@pytest.mark.parametrize("wire", tiers.pick(["plain"], ["encrypted"]))
def test_a_member_that_is_killed_in_the_middle_of_a_large_sum(coordinator: EmbeddedCoordinator, wire: str) -> None:
    environment = {
        "HOROVOD_COORDINATOR": coordinator.address,
        "HOROVOD_JOB": wire,
        "HOROVOD_SIZE": "4",
        "HOROVOD_MIN_SIZE": "1",
        "HOROVOD_MAX_SIZE": "4",
        "HOROVOD_TRANSPORT": "tcp",
        "HOROVOD_WIRE": wire,
    }
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(Program(TRAINING, **environment)) for _ in range(4)]
        assert [member.line() for member in members] == ["4 0"] * 4
        for size in (3, 2):
            members.pop().process.kill()
            assert [member.line().split()[0] for member in members] == [str(size)] * size
        assert [member.finish() for member in members] == ["True"] * 2
