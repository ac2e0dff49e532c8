"""Jobs of two processes that are stopped, cut off or busy in C, with limits that are short enough for a test."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
from resources import eventually
from runtime_harness import Program

from horovod.coordinator.config import Limits

SHORT = Limits(keepalive_timeout_s=0.4, reattach_grace_s=0.4)
UNSEEN = "from horovod.worker.runtime import witness; witness.process_namespace = lambda: ''\n"
ROUNDS = """
import ctypes
hvd.init()
print("ready", flush=True)
for line in sys.stdin:
    seconds, name = line.split()
    if int(seconds):
        ctypes.PyDLL(None).sleep(int(seconds))  # holds the GIL
    try:
        print(allreduce(name), flush=True)
    except HorovodInternalError as error:
        print(error, flush=True)
"""


class RoundsJob:
    """Ranks that do one round after another as they are told, each with a tensor that was never seen before."""

    def __init__(self, programs: list[Program]) -> None:
        self.programs = programs
        self._rounds = 0

    def works(self, *seconds: int) -> None:
        """Before its part, rank r holds the GIL for seconds[r]."""
        self._rounds += 1
        for rank in range(len(self.programs)):
            self.tell(rank, f"round.{self._rounds}", *seconds[rank : rank + 1])
        expected = str(float(len(self.programs)))
        assert [program.line() for program in self.programs] == [expected] * len(self.programs)

    def tell(self, rank: int, name: str, seconds: int = 0) -> None:
        self.programs[rank].tell(f"{seconds} {name}")

    def send_signal(self, rank: int, signum: int) -> None:
        self.programs[rank].process.send_signal(signum)

    def end_well(self) -> None:
        """No more rounds: every rank leaves, and has said nothing that was not asked for."""
        for program in self.programs:
            assert program.process.stdin is not None
            program.process.stdin.close()
            program.process.stdin = None
        for program in self.programs:
            assert program.finish() == ""

    def is_cut_off(self, rank: int, port: int) -> bool:
        """Its kernel has seen the other end of its connections to the port close."""
        connections = psutil.Process(self.programs[rank].process.pid).net_connections("tcp")
        return not any(
            one.raddr and one.raddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in connections
        )


@contextmanager
def job(
    addresses: str | list[str], token: str | None, limits: Limits = SHORT, script: str = ROUNDS, **environment: str
) -> Iterator[RoundsJob]:
    """Two ranks that find the coordinator at the address, or each at its own."""
    if isinstance(addresses, str):
        addresses = [addresses] * 2
    common = {
        "HOROVOD_SIZE": "2",
        **({"HOROVOD_TOKEN": token} if token else {}),  # a proxy's address leads to no token
        "HOROVOD_KEEPALIVE_TIMEOUT_SECONDS": str(limits.keepalive_timeout_s),
        "HOROVOD_REATTACH_GRACE_SECONDS": "30",  # for them: how long a first-time agreement may wait
        **environment,
    }
    with ExitStack() as stack:
        programs = [
            stack.enter_context(Program(script, HOROVOD_RANK=str(rank), HOROVOD_COORDINATOR=address, **common))
            for rank, address in enumerate(addresses)
        ]
        for program in programs:
            assert program.line() == "ready"
        made = RoundsJob(programs)
        made.works()
        yield made


def stop_all(grace_s: float, stall_s: float, stop_s: float) -> str:
    """A job that is stopped with its coordinator while rank 0 waits for rank 1; what the coordinator prints."""
    limits = Limits(keepalive_timeout_s=0.3, reattach_grace_s=grace_s)
    command = [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0"]
    command += ["--keepalive-timeout-seconds", "0.3", "--reattach-grace-seconds", str(grace_s)]
    stalls = {f"HOROVOD_STALL_{which}_TIME_SECONDS": str(stall_s) for which in ("CHECK", "SHUTDOWN")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            with job(address, None, limits, UNSEEN + ROUNDS, **stalls) as ranks:
                ranks.tell(0, "during")
                for rank in range(2):
                    ranks.send_signal(rank, signal.SIGSTOP)
                assert eventually(lambda: all(ranks.is_cut_off(rank, port_of(address)) for rank in range(2)))
                process.send_signal(signal.SIGSTOP)
                let_pass(stop_s)
                process.send_signal(signal.SIGCONT)
                for rank in range(2):
                    ranks.send_signal(rank, signal.SIGCONT)
                ranks.tell(1, "during")
                assert [program.line() for program in ranks.programs] == ["2.0", "2.0"]
                ranks.works()
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=60)
    return errors


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def let_pass(seconds: float) -> None:
    """The time itself is what such a test is about: nothing happens that one could wait for."""
    threading.Event().wait(seconds)
