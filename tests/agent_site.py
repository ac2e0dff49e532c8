"""A cluster of hosts of its own: a store, coordinators A and B, two agents, and a job on both that a test disturbs."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from etcd_server import Etcd, ctl
from event_words import AGENT_SERVES
from partitions import Partitions
from replicas import Replica
from resources import eventually
from runtime_harness import PRELUDE
from stopped_jobs import UNSEEN

from benchmarks.namespaces import Network
from horovod.protos.v1 import membership_pb2

STORE, A, B, HERE, THERE = range(5)  # numbers of hosts
HOSTS = 5
DEADLINE_S = 90.0

# Takes steps until a file is there, some under new names, which the coordinator has to agree to.
_JOB = """
hvd.init()
rank = current().world.rank
stop, steps = sys.argv[1], 0
print("ready", flush=True)
while not allreduce("step", float(rank == 0 and os.path.exists(stop))):
    steps += 1
    if steps % 20 == 0 and sys.argv[2:] != ["steady"]:
        allreduce(f"new.{steps}")
    if steps % 10 == 0:
        print("step", flush=True)
    time.sleep(0.05)
print("sum", allreduce("last", rank + 1.0), flush=True)
hvd.shutdown()
"""


class LaunchedJob:
    """A launcher and its two ranks, one on each host."""

    def __init__(self, process: subprocess.Popen[str], stop: Path) -> None:
        self.process = process
        self._stop = stop

    def goes_on(self, steps: int = 2) -> None:
        """Both ranks have told of further steps, or it fails."""
        assert self.process.stdout is not None
        left = {0: steps, 1: steps}
        while any(count > 0 for count in left.values()):
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            if line.endswith(":step\n"):
                left[int(line[1])] -= 1

    def ends_well(self) -> None:
        """With the right output, none of it lost, and exit code 0."""
        self._stop.touch()
        out, err = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, err
        last = sorted(line for line in out.splitlines() if "sum" in line)
        assert last == ["[0]<stdout>:sum 3.0", "[1]<stdout>:sum 3.0"], out


class AgentSite:
    def __init__(self, network: Network, folder: Path, stack: ExitStack, *arguments: str) -> None:
        """arguments: of each coordinator."""
        self.hosts = network.hosts
        self.partitions = Partitions(network)
        stack.callback(self.partitions.heal)
        self.etcd = stack.enter_context(Etcd(folder / "etcd", hosts=[self.hosts[STORE]]))
        self._folder = folder
        self._stack = stack
        self.log = folder / "log"
        written = stack.enter_context(self.log.open("w"))
        self.replicas = {
            number: Replica(
                self.etcd.url,
                "--insecure",
                "--insecure-store",
                *arguments,
                prefix=self.hosts[number].prefix,
                address=f"{self.hosts[number].address}:29400",
                log=written,
            )
            for number in (A, B)
        }
        for replica in self.replicas.values():
            stack.enter_context(replica)
        self.addresses = ",".join(replica.address for replica in self.replicas.values())
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        self._agents: dict[int, subprocess.Popen[str]] = {}

    def leader(self) -> int:
        """Who serves agents, as the store has it; 0: nobody."""
        found = ctl(self.etcd.endpoints[0], "get", "horovod/cluster/leader", "-w", "json", prefix=self.hosts[0].prefix)
        pairs = json.loads(found).get("kvs", [])
        serving = membership_pb2.Serving.FromString(base64.b64decode(pairs[0]["value"]) if pairs else b"")
        return next((number for number, one in self.replicas.items() if one.address == serving.address), 0)

    def led_by(self, number: int) -> bool:
        """Whether that is so in the end."""
        return eventually(lambda: self.leader() == number, DEADLINE_S)

    def start_agent(self, host: int, *options: str) -> None:
        """Returns when it is registered."""
        name = f"host-{host}"
        command = (sys.executable, "-m", "horovod.worker.agent", "--coordinator", self.addresses, "--name", name)
        options = ("--slots", "1", "--gpus", "", "--state-dir", str(self._folder / name), *options)
        process = self._agents[host] = self._start(host, *command, *options)
        assert process.stdout is not None
        assert process.stdout.readline() == f"{AGENT_SERVES} 1 slots as {name}\n", process.communicate()[1]

    def kill_agent(self, host: int) -> None:
        self._agents[host].kill()
        self._agents[host].communicate()

    def launch(self, *arguments: str, name: str = "job") -> LaunchedJob:
        """Returns when both ranks train. arguments: of the job."""
        source, stop = self._folder / f"{name}.py", self._folder / f"{name}.stop"
        source.write_text(PRELUDE + UNSEEN + _JOB)
        job = (sys.executable, str(source), str(stop), *arguments)
        launcher = (sys.executable, "-m", "horovod.launch", "--coordinator", self.addresses, "-np", "2")
        found = LaunchedJob(self._start(HERE, *launcher, *job), stop)
        found.goes_on()
        return found

    def listing(self, host: int) -> str:
        """What `horovodrun ps` shows there."""
        command: Sequence[str] = (sys.executable, "-m", "horovod.launch", "ps", "--coordinator", self.addresses)
        return self._start(host, *command).communicate(timeout=DEADLINE_S)[0]

    def set_link(self, host: int, state: str) -> None:
        """state: up or down."""
        subprocess.run(["ip", "-n", self.hosts[host].name, "link", "set", "eth0", state], check=True)

    def said(self, words: str) -> list[str]:
        """Lines of the coordinators' logs."""
        return [line for line in self.log.read_text().splitlines() if words in line]

    def _start(self, host: int, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self.hosts[host].prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environ,
        )
        self._stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
