"""Looks at what listens on the coordinator's port when gRPC cannot talk to it, to say so in words.

An HTTP/2 server's first frame must be SETTINGS (RFC 9113, section 3.4), whatever we send, so its first nine bytes tell
a gRPC server from everything else.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass

from horovod.base.errors import AccessCode, EngineCode, ErrorCode, WorldCode, coded
from horovod.base.words import is_out_of_descriptors, reason_of
from horovod.worker.runtime.tls import ClientTls, explained, not_welcome, speaks_tls

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
FRAME_HEADER_BYTES = 9
_SETTINGS = 4
_CHECK_ADDRESS = "Check HOROVOD_COORDINATOR (or the address given to hvd.init()) and that the coordinator runs there."


@dataclass(frozen=True)
class Finding:
    """What was seen, as the end of a sentence "the coordinator at host:port ..."."""

    words: str
    remedy: str = _CHECK_ADDRESS
    code: ErrorCode = WorldCode.COORDINATOR_UNREACHABLE
    hopeless: bool = False  # waiting will not make it a coordinator
    speaks_grpc: bool = False

    def sentence(self, address: str) -> str:
        return coded(self.code, f"The coordinator at {address} {self.words}. {self.remedy}")


_SILENT = Finding("closes connections without an answer")
_SPEAKS_TLS = Finding(
    "speaks TLS, which this process was not told to use",
    "Set HOROVOD_TLS_CA to the file of the certificate authority by which that coordinator is known.",
    AccessCode.TLS_ON_ONE_SIDE,
    hopeless=True,
)


def probe(host: str, port: int, timeout_seconds: float, tls: ClientTls | None = None) -> Finding:
    """Speaks as a member would: over TLS where `tls` is given."""
    finding = _look(host, port, timeout_seconds, tls)
    if finding is not _SILENT:
        return finding
    # Nothing but an end: gRPC's way to say that TLS is missing, or the certificate of a client. A coordinator that is
    # just being stopped ends connections, too, but takes no second one.
    if tls is None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=timeout_seconds) as plain:
            return _SPEAKS_TLS if speaks_tls(plain) else _SILENT
    elif _look(host, port, timeout_seconds, tls) is _SILENT:
        return Finding(*not_welcome(tls), hopeless=True)
    return finding


def _look(host: str, port: int, timeout_seconds: float, tls: ClientTls | None) -> Finding:
    answer = b""
    name = (tls.server_name if tls is not None else None) or host
    try:
        with (
            socket.create_connection((host, port), timeout=timeout_seconds) as plain,
            contextlib.suppress(ConnectionResetError, BrokenPipeError),
            contextlib.nullcontext(plain)
            if tls is None
            else tls.context().wrap_socket(plain, server_hostname=name) as sock,
        ):
            sock.sendall(PREFACE + EMPTY_SETTINGS)
            while len(answer) < FRAME_HEADER_BYTES and (data := sock.recv(FRAME_HEADER_BYTES - len(answer))):
                answer += data
    except ssl.SSLError as error:
        assert tls is not None
        return Finding(*explained(error, tls, name), hopeless=True)
    except socket.gaierror as error:
        return Finding(f"cannot be found: {error.strerror}")
    except TimeoutError:
        return Finding("does not answer")
    except OSError as error:
        code = EngineCode.TOO_MANY_OPEN_FILES if is_out_of_descriptors(error) else WorldCode.COORDINATOR_UNREACHABLE
        return Finding(f"cannot be reached: {reason_of(error)}", code=code)
    return judge(answer)


def judge(answer: bytes) -> Finding:
    """What the first bytes of an answer say about the program that sent them."""
    if len(answer) == FRAME_HEADER_BYTES and answer[3] == _SETTINGS and answer[5:] == b"\0\0\0\0":
        return Finding("speaks gRPC but ended the connection", speaks_grpc=True)
    if not answer:
        return _SILENT
    if answer[:1] in (b"\x15", b"\x16") and answer[1:2] == b"\x03":
        return _SPEAKS_TLS
    words = f"is not a Horovod coordinator: it answered {answer!r}"
    return Finding(words, code=WorldCode.NOT_A_COORDINATOR, hopeless=True)


# The way to a coordinator through the agent of this host, which relays calls over one connection for all its ranks
# (worker/agent/relay.py). An address stays that of the coordinator; only the connection leads to the agent's socket.
#
# A relay may end at any time, with its agent. So it is looked at before each connection, and without it this process
# connects to the coordinator itself.

TO = "horovod-relay-to"  # in a call's metadata: the coordinator's address
PINGS = "horovod-relay-pings"  # "20.0 5.0": seconds for the answer to a ping, and between two pings
ANSWER_SECONDS = 0.5  # gRPC's threads answer without Python; one that is later is stopped


def headers(address: str, keepalive_timeout_seconds: float, keepalive_seconds: float) -> tuple[tuple[str, str], ...]:
    """What tells the relay where calls are to go. They are for the relay only."""
    return (TO, address), (PINGS, f"{keepalive_timeout_seconds:g} {keepalive_seconds:g}")


def answers(path: str) -> bool:
    """Whether a relay serves this socket now."""
    answer = b""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(ANSWER_SECONDS)
        plain.connect(path)
        plain.sendall(PREFACE + EMPTY_SETTINGS)
        while len(answer) < FRAME_HEADER_BYTES and (data := plain.recv(FRAME_HEADER_BYTES - len(answer))):
            answer += data
    return judge(answer).speaks_grpc
