"""Keeps strangers from TensorFlow's servers of a tf.data service, and leads its clients to them (docs/adr/0116).

TensorFlow's server listens on all addresses and obeys whoever connects. So a `Fence` listens on its port first. Linux
shares out the connections to a port among the sockets of one user that ask for it (SO_REUSEPORT, socket(7)), and a BPF
program may choose the socket. Ours gives TensorFlow the connections from 127.0.0.0/8 that have one source port, and the
fence all others, which it ends. A socket of this process holds that source port, so no other user can bind it. Linux
drops packets of other hosts that claim an address in 127.0.0.0/8 (RFC 1122, 3.2.1.3 g). Only the relay (relay.py) uses
that source port, for peers that have proven the key.

TensorFlow's client gets the address `unix:/proc/self/fd/1013/...`. The number is a folder that only this user can open,
with a socket of the relay for each server. A worker tells one address to all processes of a service; in each of them
it leads to the process's own relay.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from horovod.base.errors import TrainingCode, coded
from horovod.base.run_certificate import run_certificate
from horovod.tensorflow.data.relay import DONE, MOST_PACKET_BYTES
from horovod.tensorflow.data.rendezvous import host_address

_FOLDER_DESCRIPTOR: Final = 1013
_PREFIX: Final = "horovod-tf-data-"
_ANSWER_TIMEOUT_S: Final = 60.0
_BACKLOG: Final = 128
_SO_ATTACH_REUSEPORT_CBPF: Final = 51  # <asm-generic/socket.h>; Python has no name for it
_ADVICE: Final = (
    "Start the service on a host that supports this, or with --insecure (TfDataServiceConfig(insecure=True)). "
    "With --insecure, anybody who can connect to a worker can run code there as its user."
)


class UnprotectedError(RuntimeError):
    """Strangers can't be kept from a server of TensorFlow's on this host."""

    def __init__(self, problem: str) -> None:
        super().__init__(coded(TrainingCode.DATA_SERVICE_UNPROTECTED, f"{problem} {_ADVICE}"))


class Fence:
    """Takes a port for TensorFlow's server, and keeps it until `close`, which comes after the server's end."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as stack:
            guard = stack.enter_context(socket.socket())
            guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            guard.bind(("0.0.0.0", 0))  # noqa: S104 - it never listens; it holds the port on all addresses
            self.guard_port: int = guard.getsockname()[1]
            listener = stack.enter_context(_listener_on_all_addresses())
            self.port: int = listener.getsockname()[1]
            try:
                _steer(listener, self.guard_port)
            except OSError as error:
                raise UnprotectedError(
                    f"Linux can't restrict who reaches TensorFlow's server on this host ({error})."
                ) from error
            listener.listen(_BACKLOG)
            # Numbers and no objects: Python, when it ends, would close these while TensorFlow still serves.
            self._guard, self.listener = guard.detach(), listener.detach()

    def check(self) -> None:
        """Raises UnprotectedError if TensorFlow's server, which runs now, answers somebody who just connects."""
        hosts = dict.fromkeys(["127.0.0.1", host_address(), "::1"])
        for host in hosts:
            try:
                with socket.create_connection((host, self.port), timeout=_ANSWER_TIMEOUT_S) as stranger:
                    said = stranger.recv(1)  # gRPC's server speaks first, at once
            except OSError:
                continue
            if said:
                raise UnprotectedError(f"TensorFlow's server answers anybody at {host}:{self.port}.")

    def close(self) -> None:
        """Ends the fence if TensorFlow's server has closed its sockets. Otherwise it stays until the process ends."""
        if _listening(self.port) <= 1:
            os.close(self.listener)
            os.close(self._guard)


class Relay:
    """The relay of this process, which all its services share. It ends with the process."""

    _of_process: tuple[int, Relay] | None = None
    _making = threading.Lock()

    @classmethod
    def own(cls) -> Relay:
        """The relay of this process. A forked child has one of its own."""
        with cls._making:
            found = cls._of_process
            if found is None or found[0] != os.getpid() or found[1]._process.poll() is not None:
                found = cls._of_process = (os.getpid(), cls())
            return found[1]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: set[str] = set()
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        _number_the_folder(self._folder)
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(_ANSWER_TIMEOUT_S)
        program = Path(__file__).with_name("relay.py")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(program), str(self._folder)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
            )

    def service(self, key: bytes, timeout_s: float) -> str:
        """Tells the relay of a service. Returns the name under which the other methods know it."""
        name = hashlib.sha256(b"horovod tf.data service\0" + key).hexdigest()[:16]
        with self._lock:
            if name not in self._opened:
                self._ask({"order": "service", "id": name, "key": key.hex(), "timeout_s": timeout_s})
                (self._folder / name).mkdir()
                self._opened.add(name)
        return name

    def path(self, service: str, server: str) -> str:
        """Where TensorFlow in this process finds that server. Its connections wait until `found` has told the rest."""
        within = f"{service}/{server}"
        address = f"/proc/self/fd/{_FOLDER_DESCRIPTOR}/{within}"
        with self._lock:
            if within not in self._opened:
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(address)  # the folder's own path may be longer than a socket's may be
                    listener.listen(_BACKLOG)
                    self._ask({"order": "connect", "id": service, "name": server}, [listener.fileno()])
                self._opened.add(within)
        return f"unix:{address}"

    def found(self, service: str, server: str, address: str) -> None:
        """The relay of that server is at this address, HOST:PORT."""
        host, _, port = address.rpartition(":")
        with self._lock:
            self._ask({"order": "address", "id": service, "name": server, "host": host, "port": int(port)})

    @contextlib.contextmanager
    def serve(self, service: str, server: str, fence: Fence) -> Iterator[str]:
        """Relays of other processes reach TensorFlow's server behind the fence at the address, HOST:PORT."""
        with socket.create_server(("", 0), backlog=_BACKLOG) as listener, run_certificate() as certificate:
            if certificate is None:
                raise UnprotectedError(
                    "No certificate could be made for a tf.data server. Install the program openssl or the package "
                    "cryptography on this host."
                )
            with self._lock:
                self._ask(
                    {
                        "order": "serve",
                        "id": service,
                        "name": server,
                        "port": fence.port,
                        "guard_port": fence.guard_port,
                        "certificate": certificate.cert,
                        "private_key": certificate.key,
                    },
                    [listener.fileno(), fence.listener],
                )
            address = f"{host_address()}:{listener.getsockname()[1]}"
        try:
            yield address
        finally:
            with self._lock, contextlib.suppress(UnprotectedError):  # the relay has ended: then nobody is served
                self._ask({"order": "stop", "port": fence.port})

    def _ask(self, order: dict[str, Any], passed: Sequence[int] = ()) -> None:
        packet = json.dumps(order).encode()
        assert len(packet) < MOST_PACKET_BYTES
        try:
            socket.send_fds(self._orders, [packet], list(passed))
            answer = self._orders.recv(MOST_PACKET_BYTES)
        except OSError as error:
            raise UnprotectedError(f"The relay of tf.data services does not answer ({error}).") from error
        if answer != DONE:
            raise UnprotectedError(f"The relay of tf.data services failed: {answer.decode() or 'it has ended'}.")


def _listener_on_all_addresses() -> socket.socket:
    """Bound as gRPC binds: to :: for both families if the host has IPv6, else to 0.0.0.0."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        one = socket.socket()
        everywhere = "0.0.0.0"  # noqa: S104 - as TensorFlow's server, whose place it takes
    else:
        one = socket.socket(socket.AF_INET6)
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        everywhere = "::"
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind((everywhere, 0))
    return one


def _steer(listener: socket.socket, guard_port: int) -> None:
    """Connections from 127.0.0.0/8 and the port go to the second socket of the listener's group, all others to it.

    Classic BPF (<linux/filter.h>); the IPv4 header begins at SKF_NET_OFF. TensorFlow's sockets come after the listener,
    so the second one is TensorFlow's. While there is none, Linux falls back on the only socket.
    """
    header, of_port = -0x100000, 20  # bytes from the header's begin to the source port, if it has no options
    load_byte, load_half, equals, answer = 0x30, 0x28, 0x15, 0x06
    program = [
        (load_byte, 0, 0, header),
        (equals, 0, 5, 0x45),  # checks for IPv4 without options
        (load_byte, 0, 0, header + 12),
        (equals, 0, 3, 127),
        (load_half, 0, 0, header + of_port),
        (equals, 0, 1, guard_port),
        (answer, 0, 0, 1),
        (answer, 0, 0, 0),
    ]
    code = b"".join(struct.pack("HBBI", name, yes, no, value & 0xFFFFFFFF) for name, yes, no, value in program)
    kept = ctypes.create_string_buffer(code)
    listener.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, struct.pack("@HP", len(program), ctypes.addressof(kept))
    )


def _listening(port: int) -> int:
    """How many sockets of this network namespace listen on the port (proc_pid_net(5))."""
    listen, found = "0A", 0
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # no IPv6
            for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                found += state == listen and int(local.rpartition(":")[2], 16) == port
    return found


def _number_the_folder(folder: Path) -> None:
    """Opens the folder under the number that all processes of a service use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= _FOLDER_DESCRIPTOR:
        if hard != resource.RLIM_INFINITY and hard <= _FOLDER_DESCRIPTOR:
            raise UnprotectedError(
                f"A process may have {hard} open files here (ulimit -Hn), and a tf.data service needs the number "
                f"{_FOLDER_DESCRIPTOR}."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FOLDER_DESCRIPTOR + 1, hard))
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if number == _FOLDER_DESCRIPTOR:
            number = -1
            return
        # A forked child takes the number over from its parent; anything else there is somebody's file.
        if not _is_free(_FOLDER_DESCRIPTOR) and "/horovod-tf-data-" not in os.readlink(
            f"/proc/self/fd/{_FOLDER_DESCRIPTOR}"
        ):
            raise UnprotectedError(f"The descriptor {_FOLDER_DESCRIPTOR} of this process is in use.")
        os.dup2(number, _FOLDER_DESCRIPTOR, inheritable=False)
    finally:
        if number >= 0:
            os.close(number)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
    except OSError:
        return True
    return False
