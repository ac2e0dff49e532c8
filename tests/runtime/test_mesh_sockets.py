"""TCP connections between threads that play ranks, with and without hostile company. Real sockets on loopback."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import tiers
from error_codes import ends_with
from resources import eventually

from horovod.base.errors import WorldCode
from horovod.worker.runtime import mesh
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.handshake import CONFIRM_BYTES, GREETING_BYTES, WELCOME_BYTES, Connecting
from horovod.worker.runtime.host import Interface
from horovod.worker.runtime.mesh import MOST_AUTOMATIC_CONNECTIONS, Listeners, connect_peers
from horovod.worker.runtime.world import Endpoint, Member, World

SECRET = b"s" * 32
LOOPBACK = [Interface("lo", ("127.0.0.1",))]
Peers = dict[int, list[int]]


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


class Ranks:
    """`size` ranks in threads; each has listeners and sees the same members."""

    def __init__(self, size: int, interfaces: list[Interface] = LOOPBACK) -> None:
        self.listeners = [Listeners(interfaces) for _ in range(size)]
        members = tuple(
            Member(r, r, size, 0, 1, f"m{r}", "node-a", "", 100 + r, tuple(self.listeners[r].endpoints))
            for r in range(size)
        )
        self.worlds = [World("job", 7, r, members, SECRET) for r in range(size)]
        self.pool = ThreadPoolExecutor(size)

    def connect(self, rank: int, connections: int | None = 1, seconds: float = 30.0) -> Future[Peers]:
        return self.pool.submit(
            connect_peers,
            self.worlds[rank],
            self.listeners[rank],
            connections=connections,
            deadline=time.monotonic() + seconds,
        )

    def see(self, rank: int, **changes: object) -> None:
        """Changes what every rank believes about the members."""
        self.worlds = [
            replace(w, members=tuple(replace(m, **changes) if m.rank == rank else m for m in w.members))  # type: ignore[arg-type]
            for w in self.worlds
        ]

    def close(self) -> None:
        for listeners in self.listeners:
            listeners.close()
        self.pool.shutdown()


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    made: list[Ranks] = []

    def make(*args: object) -> Ranks:
        made.append(Ranks(*args))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for world in made:
        world.close()
    # Whatever happened, nothing but the connections that were handed out may be left, and the test closes those.
    gc.collect()
    assert eventually(lambda: set(os.listdir("/proc/self/fd")) <= before)


def check_and_close(all_peers: list[Peers], connections: int = 1) -> None:
    """Every pair is joined by `connections` sockets in the same order: each rank says who it is on each."""
    size = len(all_peers)
    open_sockets = [{p: [socket.socket(fileno=fd) for fd in fds] for p, fds in peers.items()} for peers in all_peers]
    with contextlib.ExitStack() as stack:
        for rank, peers in enumerate(open_sockets):
            assert sorted(peers) == [r for r in range(size) if r != rank]
            for peer, socks in peers.items():
                assert len(socks) == connections
                for index, sock in enumerate(socks):
                    stack.callback(sock.close)
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                    assert not os.get_blocking(sock.fileno())
                    sock.settimeout(10)
                    sock.sendall(struct.pack("!III", rank, peer, index))
        for rank, peers in enumerate(open_sockets):
            for peer, socks in peers.items():
                for index, sock in enumerate(socks):
                    assert struct.unpack("!III", sock.recv(12, socket.MSG_WAITALL)) == (peer, rank, index)


@pytest.mark.parametrize(("size", "connections"), [(2, 1), (2, 3), (3, 2), (5, 1)])
def test_every_pair_is_connected_in_the_same_order(ranks, size, connections):
    world = ranks(size)
    futures = [world.connect(r, connections) for r in range(size)]
    check_and_close([f.result() for f in futures], connections)


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_ipv6_and_several_addresses(ranks):
    world = ranks(3, [Interface("lo", ("127.0.0.1", "::1"))])
    futures = [world.connect(r, 2) for r in range(3)]
    peers = [f.result() for f in futures]
    families = set()
    for fds in peers[2].values():
        for fd in fds:
            with socket.socket(fileno=os.dup(fd)) as sock:
                families.add(sock.family)
    assert families == {socket.AF_INET, socket.AF_INET6}  # the connections of a pair are spread over the addresses
    check_and_close(peers, 2)


def addresses_of(fds: list[int]) -> list[str]:
    """Of the other ends. Closes the sockets."""
    addresses = []
    for fd in fds:
        with socket.socket(fileno=fd) as sock:
            addresses.append(sock.getpeername()[0])
    return addresses


def connect_and_look(world: Ranks) -> dict[tuple[int, int], list[str]]:
    """Where each rank's connections to a lower one go to, by (rank, lower rank), when their number is not set."""
    futures = [world.connect(r, None) for r in range(len(world.worlds))]
    found = [{peer: addresses_of(fds) for peer, fds in future.result().items()} for future in futures]
    for rank, peers in enumerate(found):
        for peer, addresses in peers.items():
            assert len(addresses) == len(found[peer][rank])  # both ends count alike
    return {(rank, peer): peers[peer] for rank, peers in enumerate(found) for peer in peers if peer < rank}


def test_one_connection_through_each_interface_that_both_have(ranks):
    two = [Interface("eth0", ("127.0.0.1",)), Interface("eth1", ("127.0.0.2",))]
    world = ranks(4, two)
    world.see(1, endpoints=tuple(world.listeners[1].endpoints[1:]))
    assert connect_and_look(world) == {
        (1, 0): ["127.0.0.1"],
        (2, 0): ["127.0.0.1", "127.0.0.2"],
        (2, 1): ["127.0.0.2"],
        (3, 0): ["127.0.0.1", "127.0.0.2"],
        (3, 1): ["127.0.0.2"],
        (3, 2): ["127.0.0.1", "127.0.0.2"],
    }


def test_a_second_address_of_an_interface_is_no_second_interface(ranks):
    assert connect_and_look(ranks(2, [Interface("eth0", ("127.0.0.1", "127.0.0.2"))])) == {(1, 0): ["127.0.0.1"]}


def test_connections_take_another_interface_before_another_address(ranks):
    interfaces = [Interface("eth0", ("127.0.0.1", "127.0.0.2")), Interface("eth1", ("127.0.0.3",))]
    assert connect_and_look(ranks(2, interfaces)) == {(1, 0): ["127.0.0.1", "127.0.0.3"]}


def test_many_interfaces_do_not_make_many_connections(ranks):
    interfaces = [Interface(f"eth{i}", (f"127.0.0.{i + 1}",)) for i in range(MOST_AUTOMATIC_CONNECTIONS + 2)]
    assert len(connect_and_look(ranks(2, interfaces))[1, 0]) == MOST_AUTOMATIC_CONNECTIONS


def test_a_rank_may_come_late(ranks):
    world = ranks(2)
    early = world.connect(1)
    with contextlib.suppress(TimeoutError):
        early.exception(timeout=0.1)  # it has begun, and cannot end alone
    assert not early.done()
    check_and_close([world.connect(0).result(), early.result()])


def test_dead_addresses_are_skipped(ranks):
    world = ranks(2)
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        dead = Endpoint("127.0.0.1", refusing.getsockname()[1], "eth0")
        world.see(0, endpoints=(dead, *world.listeners[0].endpoints))
        futures = [world.connect(r, 2) for r in range(2)]
        check_and_close([f.result() for f in futures], 2)


def test_nobody_there_is_a_sentence_with_the_addresses_tried(ranks):
    world = ranks(2)
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        port = refusing.getsockname()[1]
        world.see(0, endpoints=(Endpoint("127.0.0.1", port, "eth0"),))
        tried = f"127.0.0.1:{port} (eth0): Connection refused"
        unreachable = ends_with(WorldCode.UNREACHABLE_PEER, "Rank 1 (pid 101)", "rank 0 (pid 100)", tried)
        with pytest.raises(StartError, match=unreachable):
            world.connect(1, seconds=0.2).result()


def test_a_peer_that_never_comes_is_a_sentence(ranks):
    world = ranks(3)
    with pytest.raises(StartError, match=ends_with(WorldCode.UNREACHABLE_PEER, "rank 1 ", "(lo)", "[2]")):
        world.connect(0, seconds=0.1).result()


def test_a_peer_without_an_address_is_a_sentence(ranks):
    world = ranks(2)
    world.see(0, endpoints=())
    with pytest.raises(StartError, match=ends_with(WorldCode.MEMBERS_DISAGREE, "rank 0 ", "HOROVOD_TRANSPORT")):
        world.connect(1).result()


def test_an_address_that_is_none_is_a_sentence(ranks):
    world = ranks(2)
    world.see(0, endpoints=(Endpoint("not-an-address.invalid", 70000),))
    with pytest.raises(StartError, match=ends_with(WorldCode.UNREACHABLE_PEER, "not-an-address.invalid:70000")):
        world.connect(1, seconds=0.1).result()


def test_check_ends_the_wait(ranks):
    world = ranks(2)

    def check() -> None:
        raise StartError("rank 1 died")

    with pytest.raises(StartError, match="rank 1 died"):
        connect_peers(world.worlds[0], world.listeners[0], connections=1, deadline=time.monotonic() + 30, check=check)


def test_no_address_to_listen_on():
    with pytest.raises(StartError, match=ends_with(WorldCode.NO_INTERFACE, "192.0.2.1 (eth9)")):
        Listeners([Interface("eth9", ("192.0.2.1",))])


# -- strangers ---------------------------------------------------------------------------------------------------------
def dial(listeners: Listeners) -> socket.socket:
    endpoint = listeners.endpoints[0]
    return socket.create_connection((endpoint.address, endpoint.port), timeout=10)


def good_greeting(world: World, sender: int = 1) -> bytes:
    return Connecting(world.secret, world.epoch, sender, 0, 0).take_output()


@pytest.mark.parametrize(
    "first_bytes",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 200, id="http"),
        pytest.param(os.urandom(4096), id="garbage"),
        pytest.param(b"\0" * GREETING_BYTES, id="zeros"),
        pytest.param(Connecting(b"t" * 32, 7, 1, 0, 0).take_output(), id="wrong secret"),
        pytest.param(Connecting(SECRET, 6, 1, 0, 0).take_output(), id="wrong epoch"),
        pytest.param(Connecting(SECRET, 7, 1, 1, 0).take_output(), id="wrong receiver"),
        pytest.param(Connecting(SECRET, 7, 0, 0, 0).take_output(), id="own rank"),
        pytest.param(Connecting(SECRET, 7, 9, 0, 0).take_output(), id="unknown rank"),
        pytest.param(Connecting(SECRET, 7, 1, 0, 5).take_output(), id="unknown index"),
    ],
)
def test_a_stranger_gets_no_answer_and_hurts_nobody(ranks, first_bytes):
    world = ranks(2)
    with dial(world.listeners[0]) as stranger:
        stranger.sendall(first_bytes)
        waiting = world.connect(0)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # closed without a byte
        check_and_close([waiting.result(), world.connect(1).result()] if waiting.done() else _both(world, waiting))


def _both(world: Ranks, zero: Future[Peers]) -> list[Peers]:
    one = world.connect(1)
    return [zero.result(), one.result()]


def test_silent_and_slow_strangers_hold_nobody_up(ranks):
    world = ranks(2)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(dial(world.listeners[0])) for _ in range(20)]
        slow = stack.enter_context(dial(world.listeners[0]))
        slow.sendall(good_greeting(world.worlds[0])[:10])
        futures = [world.connect(r) for r in range(2)]
        check_and_close([f.result() for f in futures])
        for sock in (*silent, slow):
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""  # and they are closed in the end


def test_more_strangers_than_allowed_push_out_the_oldest(ranks, monkeypatch):
    monkeypatch.setattr(mesh, "MAX_STRANGERS", 3)
    world = ranks(2)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(dial(world.listeners[0])) for _ in range(10)]
        waiting = world.connect(0)
        for sock in strangers[:6]:
            assert sock.recv(1) == b""
        check_and_close(_both(world, waiting))


def test_a_stranger_that_takes_too_long_is_dropped(ranks, monkeypatch):
    monkeypatch.setattr(mesh, "STRANGER_SECONDS", 0.05)
    world = ranks(2)
    with dial(world.listeners[0]) as stranger:
        waiting = world.connect(0)
        assert stranger.recv(1) == b""
        check_and_close(_both(world, waiting))


class Cutter:
    """Stands between two ranks and cuts the first connection after `up` bytes to and `down` bytes from the listener."""

    def __init__(self, target: Endpoint, up: int, down: int, reset: bool) -> None:
        self._target = (target.address, target.port)
        self._up, self._down, self._reset = up, down, reset
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1], "cut")
        self.connections = 0
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(self._target)
            if self.connections == 1:
                self._cut(client, server)
            else:
                for a, b in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=self._pump, args=(a, b), daemon=True))
                    self._threads[-1].start()

    def _cut(self, client: socket.socket, server: socket.socket) -> None:
        # Greeting up, welcome down, confirmation up; each direction stops at its offset.
        with contextlib.suppress(OSError):
            first = min(self._up, GREETING_BYTES)
            server.sendall(client.recv(first, socket.MSG_WAITALL) if first else b"")
            if self._down:
                client.sendall(server.recv(self._down, socket.MSG_WAITALL))
            if self._down == WELCOME_BYTES:  # the connecting side is to believe that all is well
                confirm = client.recv(CONFIRM_BYTES, socket.MSG_WAITALL)
                server.sendall(confirm[: self._up - GREETING_BYTES])
        for sock in (client, server):
            if self._reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


OFFSETS = [
    *[(up, 0) for up in range(GREETING_BYTES + 1)],
    *[(GREETING_BYTES, down) for down in range(1, WELCOME_BYTES)],
]
SOME_OFFSETS = [*OFFSETS[:2], *OFFSETS[2::16], *OFFSETS[GREETING_BYTES - 1 : GREETING_BYTES + 2], OFFSETS[-1]]


@pytest.mark.longer
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_connection_cut_at_any_offset_is_made_again(ranks, reset):
    """Until the connecting side has the whole welcome, it tries again; both sides end with one good connection."""
    for up, down in tiers.pick(SOME_OFFSETS, OFFSETS):
        world = ranks(2)
        cutter = Cutter(world.listeners[0].endpoints[0], up, down, reset)
        try:
            world.see(0, endpoints=(cutter.endpoint,))
            futures = [world.connect(r) for r in range(2)]
            check_and_close([f.result() for f in futures])
            assert cutter.connections == 2, (up, down)
        finally:
            cutter.close()


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_connection_cut_in_the_confirmation_fails_on_both_sides(ranks, reset):
    """The connecting side has proof and hands its socket out; the listening side says who did not come. No hang."""
    cutters = []
    pairs = []
    with contextlib.ExitStack() as stack:
        for up in range(GREETING_BYTES, GREETING_BYTES + CONFIRM_BYTES):  # all at once: each waits until its deadline
            world = ranks(2)
            cutters.append(Cutter(world.listeners[0].endpoints[0], up, WELCOME_BYTES, reset))
            stack.callback(cutters[-1].close)
            world.see(0, endpoints=(cutters[-1].endpoint,))
            pairs.append((world.connect(0, seconds=1), world.connect(1)))
        for listening, connecting in pairs:
            (fd,) = connecting.result()[0]
            with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionResetError):
                sock.settimeout(10)
                assert sock.recv(1) == b""
            with pytest.raises(StartError, match=ends_with(WorldCode.UNREACHABLE_PEER, "rank 1 ")):
                listening.result()
    assert [cutter.connections for cutter in cutters] == [1] * CONFIRM_BYTES


def test_a_peer_that_connects_twice_replaces_its_first_connection(ranks):
    world = ranks(3)
    waiting = world.connect(0)  # also waits for rank 2, so it is still there for the second connection
    first = _by_hand(world.worlds[0], world.listeners[0], sender=1)
    second = _by_hand(world.worlds[0], world.listeners[0], sender=1)
    with first, second:
        assert first.recv(1) == b""
        last = _by_hand(world.worlds[0], world.listeners[0], sender=2)
        with last:
            peers = waiting.result()
            with socket.socket(fileno=peers[1][0]) as kept:
                kept.settimeout(10)
                second.sendall(b"x")
                assert kept.recv(1) == b"x"
            os.close(peers[2][0])


def _by_hand(world: World, listeners: Listeners, sender: int) -> socket.socket:
    sock = dial(listeners)
    side = Connecting(world.secret, world.epoch, sender, world.rank, 0)
    sock.sendall(side.take_output())
    side.feed(sock.recv(WELCOME_BYTES, socket.MSG_WAITALL))
    sock.sendall(side.take_output())
    return sock


def test_bytes_right_after_the_handshake_are_left_for_the_engine(ranks):
    world = ranks(2)
    waiting = world.connect(0)
    with dial(world.listeners[0]) as sock:
        side = Connecting(SECRET, 7, 1, 0, 0)
        sock.sendall(side.take_output())
        side.feed(sock.recv(WELCOME_BYTES, socket.MSG_WAITALL))
        sock.sendall(side.take_output() + b"first frame")
        with socket.socket(fileno=waiting.result()[1][0]) as kept:
            kept.settimeout(10)
            assert kept.recv(11, socket.MSG_WAITALL) == b"first frame"


def test_somebody_else_at_the_address_is_not_a_peer(ranks):
    """The connecting side asks for proof too: an echo server, for one, gets nowhere."""
    world = ranks(2)
    with socket.create_server(("127.0.0.1", 0)) as echo:

        def serve() -> None:
            while True:
                try:
                    client, _ = echo.accept()
                except OSError:
                    return
                with client, contextlib.suppress(OSError):
                    client.sendall(client.recv(WELCOME_BYTES, socket.MSG_WAITALL))

        thread = threading.Thread(target=serve)
        thread.start()
        world.see(0, endpoints=(Endpoint("127.0.0.1", echo.getsockname()[1], "eth0"),))
        with pytest.raises(
            StartError, match=ends_with(WorldCode.UNREACHABLE_PEER, "it did not prove that it belongs to this world")
        ):
            world.connect(1, seconds=0.2).result()
        echo.shutdown(socket.SHUT_RDWR)
        thread.join()
