"""The way to a coordinator through the agent of this host, which relays calls over one connection for all its ranks
(worker/agent/relay.py). An address stays that of the coordinator; only the connection leads to the agent's socket.

A relay may end at any time, with its agent. So it is looked at before each connection, and without it this process
connects to the coordinator itself.
"""

from __future__ import annotations

import contextlib
import socket

from horovod.worker.runtime.probe import EMPTY_SETTINGS, FRAME_HEADER_BYTES, PREFACE, judge

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
