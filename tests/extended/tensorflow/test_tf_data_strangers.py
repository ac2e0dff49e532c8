"""Who has no key reaches no server of a tf.data service: attacks on real servers of TensorFlow's."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from error_codes import ends_with
from other_user import start_as_other_user
from resources import eventually

from horovod.base.errors import TrainingCode
from horovod.base.run_certificate import run_certificate

_DEADLINE_S = 60.0


@dataclass
class _Guarded:
    """A dispatcher of TensorFlow's in this process, behind its fence and this process's relay."""

    fence: Any
    relay: Any
    service: str
    address: tuple[str, int]

    def own_way(self, server: str) -> socket.socket:
        """A connection as TensorFlow's client makes it."""
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(_DEADLINE_S)
        one.connect(self.relay.path(self.service, server).removeprefix("unix:"))
        return one


@pytest.fixture
def guarded(request: pytest.FixtureRequest) -> Iterator[_Guarded]:
    import tensorflow as tf

    from horovod.tensorflow.data.fence import Fence, Relay

    relay, fence = Relay.own(), Fence()
    service = relay.service(request.node.nodeid.encode(), _DEADLINE_S)
    data = tf.data.experimental.service
    with relay.serve(service, "dispatcher-0", fence) as address:
        server = data.DispatchServer(data.DispatcherConfig(port=fence.port))
        try:
            fence.check()
            host, _, port = address.rpartition(":")
            yield _Guarded(fence, relay, service, (host, int(port)))
        finally:
            server._stop()
    fence.close()
    assert eventually(lambda: not _listens(fence.port)), "the server of TensorFlow has not ended"


def _listens(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), _DEADLINE_S):
        return True
    return False


def test_who_has_the_key_is_answered(guarded: _Guarded) -> None:
    guarded.relay.found(guarded.service, "dispatcher-0", "{}:{}".format(*guarded.address))
    with guarded.own_way("dispatcher-0") as one:
        assert one.recv(1)  # gRPC's server speaks first


# Each line that it prints is what one attempt to reach the server, or to take the relay's port, has brought.
_OTHER_USER = """
port, guard, host = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def attempt(target, source=None, option=None, family=socket.AF_INET):
    with socket.socket(family) as one:
        one.settimeout(60)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(":ffff:" not in target))
        for name in option or ():
            one.setsockopt(socket.SOL_SOCKET, name, 1)
        try:
            if source:
                one.bind(source)
            one.connect((target, port))
            print(one.recv(100) or "ended", flush=True)
        except OSError as error:
            print(type(error).__name__, error.errno, flush=True)

for target in ("127.0.0.1", "127.1.2.3", host):
    attempt(target)
attempt("::1", family=socket.AF_INET6)
attempt("::ffff:127.0.0.1", family=socket.AF_INET6)
attempt("::1", ("::1", guard), family=socket.AF_INET6)
print("taking")
for option in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
    for source in ("127.0.0.1", "127.99.0.1", "0.0.0.0"):
        attempt("127.0.0.1", (source, guard), option)
    attempt("::ffff:127.0.0.1", ("::ffff:127.0.0.1", guard), option, socket.AF_INET6)
"""


def test_another_user_reaches_no_server_and_can_not_stand_where_the_relay_does(guarded: _Guarded) -> None:
    from horovod.tensorflow.data.rendezvous import host_address

    with start_as_other_user(
        _OTHER_USER, str(guarded.fence.port), str(guarded.fence.guard_port), host_address()
    ) as one:
        said, problems = one.communicate(timeout=_DEADLINE_S)
    reached, _, taken = said.partition("taking\n")
    assert len(reached.splitlines()) == 6, problems
    assert all(line == "ended" or line.startswith("ConnectionResetError") for line in reached.splitlines()), reached
    assert taken.splitlines() == ["OSError 98"] * 16, taken  # EADDRINUSE


def _no_proof(nonce: bytes) -> bytes:
    return os.urandom(64)


def _reflected(nonce: bytes) -> bytes:
    return nonce + hashlib.sha256(nonce).digest()


@pytest.mark.parametrize("answer", [_no_proof, _reflected])
def test_a_relay_tells_nothing_to_who_has_no_key(guarded: _Guarded, answer: Callable[[bytes], bytes]) -> None:
    tls = ssl._create_unverified_context()
    with socket.create_connection(guarded.address, _DEADLINE_S) as raw, tls.wrap_socket(raw) as one:
        nonce = one.recv(32)
        assert len(nonce) == 32
        one.sendall(answer(nonce))
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""


def test_silent_connections_take_no_seat_from_who_has_the_key(guarded: _Guarded) -> None:
    guarded.relay.found(guarded.service, "dispatcher-0", "{}:{}".format(*guarded.address))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(guarded.address, _DEADLINE_S)) for _ in range(100)]
        with guarded.own_way("dispatcher-0") as one:
            assert one.recv(1)
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""  # it has lost its seat


def test_silent_connections_keep_nobody_from_the_board() -> None:
    from horovod.tensorflow.data.rendezvous import Client, Service

    service, before = Service(b"key", 1), threading.active_count()
    try:
        with contextlib.ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_connection(service.addresses[-1], _DEADLINE_S)) for _ in range(200)
            ]
            Client(service.addresses, b"key", _DEADLINE_S).register_worker_for_dispatcher(0, 0)
            while silent[0].recv(1000):  # the challenge; then the end, because it has lost its seat
                pass
            for one in silent[: 200 - 64]:
                while one.recv(1000):
                    pass
            assert threading.active_count() <= before + 64 + 1
    finally:
        service.close()


@contextlib.contextmanager
def _in_the_middle(target: tuple[str, int], own_tls: bool) -> Iterator[tuple[str, int]]:
    """Passes everything on, as an attacker who can change the network; with own_tls, it reads it as well."""
    with run_certificate() as certificate, socket.create_server(("127.0.0.1", 0)) as listener:
        assert certificate is not None
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate.cert, certificate.key)

        def copy(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data)
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def attend() -> None:
            with listener.accept()[0] as plain, socket.create_connection(target, _DEADLINE_S) as far:
                near, peer = plain, far
                if own_tls:
                    near = tls.wrap_socket(plain, server_side=True)
                    peer = ssl._create_unverified_context().wrap_socket(far)
                back = threading.Thread(target=copy, args=(peer, near))
                back.start()
                copy(near, peer)
                back.join()

        thread = threading.Thread(target=attend)
        thread.start()
        yield listener.getsockname()
        thread.join(_DEADLINE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("own_tls", [False, True])
def test_nobody_can_stand_between_two_relays(guarded: _Guarded, own_tls: bool) -> None:
    with _in_the_middle(guarded.address, own_tls) as address:
        guarded.relay.found(guarded.service, "dispatcher-0", "{}:{}".format(*address))
        with guarded.own_way("dispatcher-0") as one:
            assert bool(one.recv(1)) is not own_tls


def test_a_server_that_answers_anybody_is_noticed() -> None:
    import tensorflow as tf

    from horovod.tensorflow.data.fence import Fence, UnprotectedError

    server = tf.data.experimental.service.DispatchServer()
    fence = Fence()
    try:
        fence.port, port = int(server.target.rpartition(":")[2]), fence.port
        with pytest.raises(UnprotectedError, match=ends_with(TrainingCode.DATA_SERVICE_UNPROTECTED, "--insecure")):
            fence.check()
        fence.port = port
    finally:
        server._stop()
        fence.close()


def test_the_fence_outlasts_a_server_that_still_listens(guarded: _Guarded) -> None:
    guarded.fence.close()
    guarded.fence.check()


_STRANGER = """
import sys
import tensorflow as tf
dataset = tf.data.Dataset.range(1)
dataset = dataset.map(lambda one: (tf.io.write_file(sys.argv[2], "mine"), one)[1])
distribute = tf.data.experimental.service.distribute("parallel_epochs", f"grpc://127.0.0.1:{sys.argv[1]}")
print([int(one) for one in dataset.apply(distribute)])
"""


@pytest.mark.parametrize("insecure", [False, True])
def test_a_strangers_graph_runs_only_if_the_service_is_insecure(tmp_path: Path, insecure: bool) -> None:
    """With --insecure the same attack writes the file: so it is a real one."""
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig

    path, written = tmp_path / "config.json", tmp_path / "written"
    command = [sys.executable, "-m", "horovod.tensorflow.data.compute_worker", str(path)]
    service = subprocess.Popen([*command, "--insecure"] if insecure else command, stdin=subprocess.DEVNULL)
    try:
        config = TfDataServiceConfig.read(str(path), wait_for_file_creation=True)
        assert config.insecure is insecure
        client = config.compute_client()
        client.wait_for_dispatcher_worker_registration(0)
        own = {port for _, port in config.addresses}
        ports = [port for port in _listened_on(service.pid) if port not in own]
        assert len(ports) == 2  # the dispatcher's and the worker's
        if insecure:
            ports = [int(client.wait_for_dispatcher_registration(0).rpartition(":")[2])]
        for port in ports:
            stranger = subprocess.Popen(
                [sys.executable, "-c", _STRANGER, str(port), str(written)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "TF_CPP_MIN_LOG_LEVEL": "0",
                    "GRPC_VERBOSITY": "DEBUG",
                    "GRPC_TRACE": "connectivity_state",
                },
            )
            assert stranger.stderr is not None
            with stranger:
                # TensorFlow tries for ever, so the stranger is ended once gRPC tells that a connection was refused.
                assert any("-> TRANSIENT_FAILURE" in line for line in stranger.stderr) is not insecure
                stranger.kill()
        client.shutdown()
        assert service.wait(_DEADLINE_S) == 0
    finally:
        service.kill()
        service.wait()
    assert written.exists() is insecure


def _listened_on(pid: int) -> list[int]:
    """Ports on which the process listens."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(entry))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(int(words[1].rpartition(":")[2], 16))
    return sorted(found)
