#!/usr/bin/env python3
"""How long a job on many agents takes to start, and where the time goes: real agents of this machine, ranks without
PyTorch.

    python benchmarks/agents_start.py                        64 agents with one slot each
    python benchmarks/agents_start.py --agents 8
    python benchmarks/agents_start.py --namespaces           each agent in a network namespace, as on a host of its own

Coordinator, agents, shims and ranks are processes as users have them, and all share this machine's processors: on
hosts of their own, what an agent does would take its own share of the seconds only.

  registered  from the start of the agents until the last one is registered
  connected   from the submission until every host is known to reach every other (the first job only)
  started     from then until every agent has reported that its rank runs
  printed     from then until the last rank's first line has come back
  ended       from the moment every rank may end until the launcher knows that the job is over

Exit codes: 0, or 1 when something did not happen in --limit seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.namespaces import Network, NetworkError  # noqa: E402
from benchmarks.world import Host  # noqa: E402
from horovod.launch.cluster.client import Access, ClusterClient  # noqa: E402
from horovod.protos.v1 import jobs_pb2  # noqa: E402

CLONE_NEWNET = 0x40000000  # sched.h
RANK = "import os; print('up', flush=True); os.read(os.open(os.environ['GATE'], os.O_RDONLY), 1)"


@dataclass(frozen=True)
class Figures:
    """Seconds from one event to the next, and what the coordinator and all agents used of the processors meanwhile."""

    connected_s: float
    started_s: float
    printed_s: float
    ended_s: float
    coordinator_cpu_s: float
    agents_cpu_s: float


class TimedJob:
    """One job, from its submission to its end, with the time of each event."""

    def __init__(self, count: int, folder: Path) -> None:
        self._count = count
        self._gate = folder / "gate"
        self._seen: set[int] = set()
        self._at: dict[str, float] = {}
        self._writer: int | None = None

    async def run(self, cluster: ClusterClient) -> dict[str, float]:
        os.mkfifo(self._gate)
        held = os.open(self._gate, os.O_RDWR)  # so that ranks can open it before anybody writes
        self._writer = held
        environment = {"PATH": os.environ["PATH"], "GATE": str(self._gate)}
        record = await cluster.submit(
            jobs_pb2.JobSpec(
                command=[sys.executable, "-I", "-S", "-c", RANK],
                processes=self._count,
                environment=environment,
                directory="/",
                attended=True,
            )
        )
        await cluster.follow(jobs_pb2.Open(job=record.id, output=True, hold=True), self._changed, self._printed)
        self._mark("ended")
        os.close(held)
        self._gate.unlink()
        return self._at

    def _changed(self, record: jobs_pb2.JobRecord) -> None:
        self._at["submitted"] = record.submitted_at
        if record.started_at:
            self._at["connected"] = record.started_at
        if record.shares and all(share.started for share in record.shares):
            self._mark("started")
        if record.state == jobs_pb2.JOB_STATE_FAILED:
            raise SystemExit(f"The job failed: {record.sentence}")

    async def _printed(self, output: jobs_pb2.Output) -> None:
        self._seen.add(output.rank)
        if len(self._seen) == self._count:
            self._mark("printed")
            assert self._writer is not None
            os.write(self._writer, b"g" * self._count)

    def _mark(self, event: str) -> None:
        self._at.setdefault(event, time.time())  # as the coordinator's, in the record: all is on one machine


class Cluster:
    """A coordinator and agents, as processes."""

    def __init__(self, count: int, folder: Path, hosts: Sequence[Host] = ()) -> None:
        """hosts: where each agent runs, and last where the coordinator does; none: all on the loopback interface."""
        listen = f"{hosts[-1].address}:29400" if hosts else "127.0.0.1:0"
        prefixes = [host.prefix for host in hosts] or [()] * (count + 1)
        token_file = folder / "token"
        self.token = secrets.token_hex(16)
        token_file.write_text(self.token)
        token_file.chmod(0o600)
        environ = {**os.environ, "HOROVOD_TOKEN": self.token}
        command = [*prefixes[-1], sys.executable, "-m", "horovod.coordinator", "--listen", listen, "--token-file"]
        self.coordinator = subprocess.Popen(
            [*command, str(token_file)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert self.coordinator.stdout is not None
        self.address = self.coordinator.stdout.readline().strip().rpartition(" ")[2]
        began = time.monotonic()
        self.agents = []
        log = (folder / "agents.log").open("a")
        for number in range(count):
            options = ["--name", f"h{number}", "--slots", "1", "--state-dir", str(folder / f"h{number}"), "--gpus", ""]
            agent = [*prefixes[number], sys.executable, "-m", "horovod.worker.agent", "--coordinator", self.address]
            self.agents.append(
                subprocess.Popen(
                    [*agent, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environ,
                )
            )
        log.close()
        for agent in self.agents:
            assert agent.stdout is not None
            agent.stdout.readline()
        self.registered_s = time.monotonic() - began

    def cpu_s(self) -> tuple[float, float]:
        """What the coordinator and all agents have used so far."""

        def used(process: subprocess.Popen[str]) -> float:
            times = psutil.Process(process.pid).cpu_times()
            return float(times.user + times.system)

        return used(self.coordinator), sum(used(agent) for agent in self.agents)

    def stop(self) -> None:
        """The agents first, which have nothing to wait for."""
        for process in self.agents:
            process.terminate()
        for process in self.agents:
            process.wait()
        self.coordinator.terminate()
        self.coordinator.wait()


async def measure(cluster: Cluster, count: int, folder: Path, limit_s: float) -> Figures:
    async with ClusterClient(Access([cluster.address], cluster.token)) as client:
        coordinator_s, agents_s = cluster.cpu_s()
        at = await asyncio.wait_for(TimedJob(count, folder).run(client), limit_s)
        coordinator_after_s, agents_after_s = cluster.cpu_s()
    return Figures(
        at["connected"] - at["submitted"],
        at["started"] - at["connected"],
        at["printed"] - at["started"],
        at["ended"] - at["printed"],
        coordinator_after_s - coordinator_s,
        agents_after_s - agents_s,
    )


@contextlib.contextmanager
def on(host: Host) -> Iterator[None]:
    """This process, which is to reach the coordinator, is on that host for a while."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(namespace: IO[str]) -> None:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"The namespace {namespace.name} can't be entered")

    with open("/proc/self/ns/net") as own, open(f"/run/netns/{host.name}") as its:
        enter(its)
        try:
            yield
        finally:
            enter(own)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64, metavar="N")
    parser.add_argument("--jobs", type=int, default=3, metavar="N", help="one after the other (default: 3)")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--namespaces", action="store_true", help="a network namespace for each agent; needs root")
    arguments = parser.parse_args(argv)
    found = []
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="horovod-agents-"))
        hosts: Sequence[Host] = ()
        if arguments.namespaces:
            try:
                hosts = stack.enter_context(Network(arguments.agents + 1)).hosts
            except NetworkError as error:
                print(error, file=sys.stderr)
                return 1
        cluster = Cluster(arguments.agents, Path(name), hosts)
        if hosts:
            stack.enter_context(on(hosts[-1]))
        try:
            if not arguments.json:
                print(f"{arguments.agents} agents are registered after {cluster.registered_s:.2f} s.")
            for number in range(arguments.jobs):
                figures = asyncio.run(measure(cluster, arguments.agents, Path(name), arguments.limit))
                found.append(asdict(figures))
                if not arguments.json:
                    words = ", ".join(
                        f"{field[:-2].replace('_', ' ')} {value:.2f} s" for field, value in found[-1].items()
                    )
                    print(f"job {number + 1}: {words}")
        except asyncio.TimeoutError:
            print(f"The job was not over within {arguments.limit:g} s.", file=sys.stderr)
            return 1
        finally:
            cluster.stop()
    if arguments.json:
        print(json.dumps({"agents": arguments.agents, "registered_s": cluster.registered_s, "jobs": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
