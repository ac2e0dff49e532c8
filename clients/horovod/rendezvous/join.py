"""How processes that another launcher started find their coordinator at hvd.init(), which needs none of ours then.

Rank 0 opens a coordinator in its own process. On one host the others learn of it through a file (meeting.py). Between
hosts there is no channel that belongs to the job alone, so a token must be given (HOROVOD_TOKEN); then the host of
rank 0, where the launcher tells it, and a port that follows from the run are enough. Everybody can compute that port,
so the coordinator proves that it knows the token before it is shown one (worker/runtime/token.py), unless the
settings name certificates. Otherwise hvd.init() fails and says which variables to set: processes that train alone
although they were started together would be worse.

The end: rank 0 leaves its world like any other, and at the exit of its process waits until the others have left too
before the coordinator stops, so that their goodbyes are heard. One that takes longer than EXIT_WAIT_S is told that the
coordinator is stopping.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import hashlib
import logging
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from horovod.base.addresses import loopback_listen, with_port
from horovod.base.errors import AccessCode, SettingCode, WorldCode, code_of, coded, without_code
from horovod.base.proofs import MIN_CLUSTER_TOKEN_LENGTH
from horovod.base.setting import split_ports
from horovod.base.settings import Settings
from horovod.base.tls import unnamed_file
from horovod.rendezvous import task_of
from horovod.rendezvous.clusters import Task
from horovod.rendezvous.meeting import Meeting, Published, folder, publish, read
from horovod.worker.runtime import context
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.token import given_token

if TYPE_CHECKING:
    from horovod.base.run_certificate import UnnamedCertificate
    from horovod.coordinator.server import EmbeddedCoordinator
    from horovod.coordinator.tls import ServerTls
    from horovod.worker.runtime.tls import ClientTls

log = logging.getLogger(__name__)

EXIT_WAIT_S = 30.0  # after a program that went well; the launcher waits for all its processes anyway
FAILED_EXIT_WAIT_S = 2.0
_LOOK_S = 0.02
_CONNECT_S = 5.0
_CONNECT_AGAIN_S = 0.2
_PORTS = range(20_000, 32_000)  # unless the launcher names others; the kernel gives outgoing connections higher ones


@dataclass
class _Met:
    """What the first hvd.init() of this process found; later ones use it again."""

    pid: int
    address: str
    token: str
    coordinator: EmbeddedCoordinator | None = None  # rank 0 only
    published: Published | None = None
    # The certificate of rank 0's coordinator, on rank 0 only; lives as long as this process.
    certificate: UnnamedCertificate | None = None
    tls: dict[str, Any] = field(default_factory=dict)  # settings that differ from what was given


_given: Task | None = None  # what `known_as` says; read and written by the thread that calls hvd.init()
_met: _Met | None = None  # read and written in hvd.init(), under the lock of context.py, and when the process ends


@contextlib.contextmanager
def known_as(task: Task) -> Iterator[None]:
    """For hvd.init() within the context, `task` is what a launcher says of this process, unless settings name a
    coordinator. For programs whose processes know each other already.
    """
    global _given
    _given = task
    try:
        yield
    finally:
        _given = None


def _task_of(settings: Settings) -> Task | None:
    if _given is not None and settings.coordinator is None:
        return _given
    return task_of(settings, os.environ)


@contextlib.contextmanager
def joined(settings: Settings) -> Iterator[Settings]:
    """The settings with all that follows from the launcher that started this process, for as long as it joins.

    They stay as they are where none did or where they say it themselves. ValueError with what to do where the world
    can't be formed by the launcher's variables.
    """
    task = _task_of(settings)
    if task is None:
        yield settings
        return
    log.info("This process was started by %s as rank %d of %d.", task.launcher, task.rank, task.size)
    settings = dataclasses.replace(settings, rank=task.rank, size=task.size)
    if settings.coordinator is not None:
        yield settings
        return
    met = _meet(task, settings)
    yield dataclasses.replace(settings, coordinator=met.address, token=met.token, **met.tls)
    if met.published is not None:
        met.published.close()  # all ranks have come; a later program of this run must not find the address


def size_of_world(settings: Settings) -> int:
    """How many processes the world will have."""
    task = _task_of(settings)
    return task.size if task is not None else settings.size or 1


def _meet(task: Task, settings: Settings) -> _Met:
    global _met
    if _met is None or _met.pid != os.getpid():
        if task.one_host:
            _met = _meet_on_this_host(task, settings)
            _met.tls = dict.fromkeys(("tls_ca", "tls_cert", "tls_key", "tls_server_name"))  # on loopback there is none
        elif task.first_host is not None and (token := given_token(settings)) is not None:
            _met = _meet_between_hosts(task, task.first_host, token, settings)
        else:
            raise StartError(coded(SettingCode.MISSING_SETTING, _what_is_missing(task)))
    return _met


# -- on one host -------------------------------------------------------------------------------------------------------
def _meet_on_this_host(task: Task, settings: Settings) -> _Met:
    run = [task.launcher, settings.job, *(task.run or _ancestor(task))]
    path = folder() / f"horovod-{hashlib.sha256(chr(0).join(run).encode()).hexdigest()[:32]}"
    if task.rank == 0:
        token = given_token(settings) or secrets.token_urlsafe(32)
        coordinator = _open(loopback_listen(), token)
        try:
            published = publish(path, Meeting(coordinator.address, token, os.getpid()))
        except FileExistsError as error:
            coordinator.stop()
            raise StartError(
                coded(
                    SettingCode.LAUNCHER_VARIABLES,
                    f"{_they(task)}, and another process is rank 0 of them already. A program that a rank starts "
                    "inherits the launcher's variables: set HOROVOD_CLUSTER=none for it.",
                )
            ) from error
        except OSError as error:
            coordinator.stop()
            raise StartError(
                coded(
                    SettingCode.UNUSABLE_FILE,
                    f"{_they(task)}, but can't write the file {path}, by which the others find it: {error.strerror}.",
                )
            ) from error
        return _Met(os.getpid(), coordinator.address, token, coordinator, published)
    deadline = time.monotonic() + settings.start_timeout_seconds
    while (meeting := read(path)) is None:
        if time.monotonic() > deadline:
            raise StartError(
                coded(
                    WorldCode.INCOMPLETE_WORLD,
                    f"{_they(task)}, but rank 0 did not call hvd.init() within "
                    f"{settings.start_timeout_seconds:g} s of rank {task.rank}. Check what rank 0 does, or "
                    "give it more time with HOROVOD_START_TIMEOUT.",
                )
            )
        time.sleep(_LOOK_S)
    return _Met(os.getpid(), meeting.address, meeting.token)


def _ancestor(task: Task) -> list[str]:
    """Names the launcher's process above this one; its number alone may be given to another process later."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents() if task.ancestor else ():
            if task.ancestor in parent.name():
                return [str(parent.pid), str(parent.create_time())]
    raise StartError(
        coded(
            SettingCode.LAUNCHER_VARIABLES,
            f"{_they(task)}, but its variables do not name the run, so the processes can't find each other. Start "
            f"horovod-coordinator and give them HOROVOD_COORDINATOR ({task.variable_option}), or use horovodrun.",
        )
    )


# -- between hosts -----------------------------------------------------------------------------------------------------
def _meet_between_hosts(task: Task, host: str, token: str, settings: Settings) -> _Met:
    from horovod.worker.runtime.tls import ClientTls

    if len(token) < MIN_CLUSTER_TOKEN_LENGTH:
        raise StartError(
            coded(
                AccessCode.WEAK_TOKEN,
                f"{_they(task)}, and HOROVOD_TOKEN has {len(token)} characters, so anybody who can connect to rank 0 "
                f"could guess it. Use a random one of {MIN_CLUSTER_TOKEN_LENGTH} or more, for example of `openssl "
                "rand -hex 32`.",
            )
        )
    # A rank with another token comes to the same port, so that it is told of that, and not that nobody is there.
    digest = hashlib.sha256(chr(0).join(task.run).encode()).digest()
    ports = split_ports(settings.ports or "") or task.ports or _PORTS
    port = ports[int.from_bytes(digest[:8], "big") % len(ports)]
    if (own := ClientTls.of(settings)) is None:
        return _meet_by_proof(task, host, port, token, settings)
    if task.rank != 0:
        _await_rank_0(task, host, port, None, time.monotonic() + settings.start_timeout_seconds)
        return _Met(os.getpid(), with_port(host, port), token)
    coordinator = _open(_everywhere(port), token, _tls(task, own))
    # The certificate is for the name by which the other ranks connect.
    tls = {"tls_server_name": own.server_name or host}
    return _Met(os.getpid(), with_port(own_address(), port), token, coordinator, tls=tls)


def _meet_by_proof(task: Task, host: str, port: int, token: str, settings: Settings) -> _Met:
    """Over TLS with a certificate that rank 0 makes now, and that the others believe as it proves the token with it."""
    from horovod.base.run_certificate import SERVER_NAME, unnamed_certificate
    from horovod.coordinator.tls import ServerTls

    if task.rank != 0:
        certificate = _await_rank_0(task, host, port, token, time.monotonic() + settings.start_timeout_seconds)
        _, path = unnamed_file(certificate.encode())
        return _Met(os.getpid(), with_port(host, port), token, tls={"tls_ca": path, "tls_server_name": SERVER_NAME})
    made = unnamed_certificate()
    if made is None:
        raise StartError(
            coded(
                SettingCode.MISSING_SETTING,
                f"{_they(task)} on several hosts, and rank 0 can make no certificate, by which the others know it: "
                "there is neither the program openssl nor the package cryptography. Install one of them there, or give "
                "all ranks certificates (HOROVOD_TLS_CA, HOROVOD_TLS_CERT and HOROVOD_TLS_KEY).",
            )
        )
    try:
        coordinator = _open(_everywhere(port), token, ServerTls(made.cert, made.key), proves_token=True)
    except BaseException:
        made.close()
        raise
    tls = {"tls_ca": made.ca, "tls_server_name": SERVER_NAME}
    return _Met(os.getpid(), with_port(own_address(), port), token, coordinator, certificate=made, tls=tls)


def _tls(task: Task, own: ClientTls) -> ServerTls:
    """Rank 0 serves with the certificate that it would show as a member, and asks the others for theirs."""
    from horovod.coordinator.tls import ServerTls

    if own.cert is None or own.key is None:
        raise StartError(
            coded(
                SettingCode.MISSING_SETTING,
                f"{_they(task)}, and rank 0 opens the coordinator: with HOROVOD_TLS_CA it needs a certificate, too, "
                "for servers and for its host's name (HOROVOD_TLS_CERT and HOROVOD_TLS_KEY; `horovodrun certs DIR "
                "--hosts NAMES` makes coordinator.pem for both).",
            )
        )
    return ServerTls(own.cert, own.key, own.ca)


def _await_rank_0(task: Task, host: str, port: int, token: str | None, deadline: float) -> str:
    """Waits until rank 0 listens, without a warning on each rank that came before it.

    token: rank 0 has to prove that it knows it, and the certificate with which it did, in PEM, is returned. None: it is
    known by a certificate of the settings; "" is returned.
    """
    from horovod.base.run_certificate import SERVER_NAME
    from horovod.worker.runtime.token_proof import UnprovenError, proven_certificate

    while True:
        try:
            if token is not None:
                return proven_certificate(host, port, token, SERVER_NAME, _CONNECT_S)
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
            return ""
        except UnprovenError as error:
            if error.is_final or time.monotonic() > deadline:
                raise StartError(coded(AccessCode.UNPROVEN, _who_is_no_rank_0(task, host, port, error))) from error
        except OSError as error:
            unknown = isinstance(error, socket.gaierror) and not task.name_may_come
            if time.monotonic() > deadline or unknown:
                raise StartError(
                    coded(
                        WorldCode.INCOMPLETE_WORLD,
                        f"{_they(task)}, and rank 0 should open a coordinator at {with_port(host, port)}, which "
                        f"can't be reached ({error.strerror or error}). Check what rank 0 does and whether its "
                        "host accepts connections from others, or give rank 0 more time with "
                        "HOROVOD_START_TIMEOUT.",
                    )
                ) from error
        time.sleep(_CONNECT_AGAIN_S)


def _who_is_no_rank_0(task: Task, host: str, port: int, error: Exception) -> str:
    return (
        f"{_they(task)}. The process that answers at {with_port(host, port)}, where rank 0 should run a "
        f"coordinator, did not prove that it knows the token of this process: it {error}. The token was not sent. "
        "Either the ranks have different tokens (HOROVOD_TOKEN, HOROVOD_TOKEN_FILE), or only some have "
        "HOROVOD_TLS_CA, or another program listens there, perhaps of another user: on that host `ss -tlnp "
        f"'sport = :{port}'` shows which."
    )


def own_address() -> str:
    """A numeric address. The host's name often means the loopback interface, which tensors would then use as well."""
    from horovod.worker.runtime.host import choose_interfaces, interfaces

    addresses = [address for interface in choose_interfaces(interfaces()) for address in interface.addresses]
    return next((address for address in addresses if ":" not in address), addresses[0])


def _everywhere(port: int) -> str:
    from horovod.coordinator.address import every_host

    return with_port(every_host(), port)


def _what_is_missing(task: Task) -> str:
    start = f"{_they(task)} on several hosts"
    if task.first_host is not None:
        share = task.meeting_advice or f"write `export HOROVOD_TOKEN=$(openssl rand -hex 32)` before {task.launcher}"
        return (
            f"{start}. They find each other by themselves once they share a secret that no other user knows: {share}. "
            "Or start horovod-coordinator and set HOROVOD_COORDINATOR and HOROVOD_TOKEN."
        )
    if task.no_host:
        return (
            f"{start}, but {task.no_host} Or start horovod-coordinator and set HOROVOD_COORDINATOR and HOROVOD_TOKEN."
        )
    return (
        f"{start}, and does not tell them which one rank 0 is on. Run `horovod-coordinator --listen 0.0.0.0:29400 "
        "--token-file FILE` on one of them and set two variables, HOROVOD_COORDINATOR and HOROVOD_TOKEN "
        f"({task.variable_option}); ranks and size follow from {task.launcher}. Or set HOROVOD_CLUSTER=none for "
        "processes that train alone."
    )


def _they(task: Task) -> str:
    return f"This process was started by {task.launcher} as rank {task.rank} of {task.size}"


# -- rank 0 ------------------------------------------------------------------------------------------------------------
def _open(listen: str, token: str, tls: ServerTls | None = None, proves_token: bool = False) -> EmbeddedCoordinator:
    from horovod.coordinator.config import CoordinatorConfig
    from horovod.coordinator.server import EmbeddedCoordinator

    try:
        coordinator = EmbeddedCoordinator.of(
            CoordinatorConfig(listen, token, tls=tls, proves_token=proves_token)
        ).start()
    except OSError as error:
        why = error.strerror or str(error)
        raise StartError(
            coded(
                code_of(why) or WorldCode.COORDINATOR_UNREACHABLE,
                f"Rank 0 can't open a coordinator for the others. {without_code(why)} Or start horovod-coordinator "
                "and set HOROVOD_COORDINATOR and HOROVOD_TOKEN.",
            )
        ) from error
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_after_fork)
    return coordinator


def _at_exit() -> None:
    if _met is None or _met.coordinator is None:
        return
    context.at_exit()  # rank 0 leaves first, whichever of the two the interpreter calls first
    if _met.published is not None:
        _met.published.close()
    failed = getattr(sys, "last_value", None) is not None
    _met.coordinator.wait_until_empty(FAILED_EXIT_WAIT_S if failed else EXIT_WAIT_S)
    _met.coordinator.stop()


def _after_fork() -> None:
    """In a child: its copies of the coordinator's sockets would keep connections alive after rank 0 has ended."""
    global _met
    met, _met = _met, None
    if met is None or met.coordinator is None:
        return
    # Keeps it alive: the coordinator's thread can't be ended in a forked child.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(met.coordinator))
    port = int(met.coordinator.address.rpartition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                local = copy.getsockname()
            if isinstance(local, tuple) and local[1] == port:
                os.close(int(name))
