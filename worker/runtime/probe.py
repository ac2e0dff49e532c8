"""Looks at what listens on the coordinator's port when gRPC cannot talk to it, to say so in words.

An HTTP/2 server's first frame must be SETTINGS (RFC 9113, section 3.4), whatever we send, so its first nine bytes tell
a gRPC server from everything else.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from horovod.worker.words import reason_of

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_EMPTY_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEADER_BYTES = 9
_SETTINGS = 4


@dataclass(frozen=True)
class Finding:
    """What was seen, as the end of a sentence "the coordinator at host:port ..."."""

    words: str
    hopeless: bool = False  # it will not become a coordinator by waiting
    speaks_grpc: bool = False


def probe(host: str, port: int, timeout_seconds: float) -> Finding:
    answer = b""
    try:
        with (
            socket.create_connection((host, port), timeout=timeout_seconds) as sock,
            contextlib.suppress(ConnectionResetError, BrokenPipeError),
        ):
            sock.sendall(_PREFACE + _EMPTY_SETTINGS)
            while len(answer) < _FRAME_HEADER_BYTES and (data := sock.recv(_FRAME_HEADER_BYTES - len(answer))):
                answer += data
    except socket.gaierror as error:
        return Finding(f"cannot be found: {error.strerror}")
    except TimeoutError:
        return Finding("does not answer")
    except OSError as error:
        return Finding(f"cannot be reached: {reason_of(error)}")
    return judge(answer)


def judge(answer: bytes) -> Finding:
    """What the first bytes of an answer say about the program that sent them."""
    if len(answer) == _FRAME_HEADER_BYTES and answer[3] == _SETTINGS and answer[5:] == b"\0\0\0\0":
        return Finding("speaks gRPC but ended the connection", speaks_grpc=True)
    if not answer:
        return Finding("closes connections without an answer")
    if answer[:1] in (b"\x15", b"\x16") and answer[1:2] == b"\x03":
        return Finding("speaks TLS, which this process was not told to use", hopeless=True)
    return Finding(f"is not a Horovod coordinator: it answered {answer!r}", hopeless=True)
