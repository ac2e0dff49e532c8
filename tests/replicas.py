"""Coordinators that share a store in etcd, as processes that a test kills, stops and starts again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

from etcd_server import ctl

from benchmarks.ports import free_ports
from horovod.coordinator.store.seal import Seal
from horovod.protos.v1 import membership_pb2


class Replica:
    """One coordinator; it keeps its address when it starts again."""

    def __init__(
        self, store: str, *arguments: str, prefix: Sequence[str] = (), address: str = "", log: IO[str]
    ) -> None:
        """prefix: of the command, for a namespace. log: what it says."""
        self.address = address or f"127.0.0.1:{free_ports(1)[0]}"
        self._command = [
            *prefix, sys.executable, "-m", "horovod.coordinator", "--listen", self.address, "--store", store,
            "--verbose", *arguments,
        ]  # fmt: skip
        self._log = log
        self.process: subprocess.Popen[str]

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        assert self.address in self.process.stdout.readline()

    def advertise(self, address: str) -> None:
        """Starts anew, and says that it is reached under this address."""
        self.kill()
        self._command += ["--advertise", address]
        self.start()

    def kill(self) -> None:
        """Idempotent."""
        self.process.kill()
        if self.process.returncode is None:
            self.process.communicate()

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Replica:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def server_of(endpoint: str, job: str = "default", *options: str, prefix: Sequence[str] = ()) -> str:
    """The address of who serves the job, by what is in etcd; "" when nobody does.

    options: of etcdctl. prefix: of the command, for a namespace.
    """
    return holder_of(endpoint, job, *options, prefix=prefix).address


def holder_of(
    endpoint: str, job: str = "default", *options: str, prefix: Sequence[str] = (), token: str = ""
) -> membership_pb2.Serving:
    """As `server_of`, with the id of its process. token: of the coordinators; without one they do not seal."""
    import base64
    import json

    key = f"horovod/jobs/{job}/serving"
    found = json.loads(ctl(endpoint, *options, "get", key, "--write-out=json", prefix=prefix)).get("kvs", [])
    value = base64.b64decode(found[0]["value"]) if found else b""
    return membership_pb2.Serving.FromString(Seal([token]).open(key, value) if token and value else value)
