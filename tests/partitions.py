"""A network of hosts that a test cuts in pieces and joins again, and what must hold of a store afterwards.

What is sent to a host that is cut off vanishes without a word, as behind a switch that has failed: its address is
made to belong to a network card that does not exist.
"""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from etcd_server import Etcd, ctl, ctl_command
from event_words import WAS_LOST
from fault_training import TORCH_SCRIPT, Training, undisturbed
from replicas import Replica, server_of
from runtime_harness import Program
from stopped_jobs import UNSEEN

from benchmarks.namespaces import Network
from benchmarks.world import Host
from horovod.protos.v1 import membership_pb2

_NOBODY = "02:00:00:00:00:fe"
_END = "horovod/jobs/~end"
ETCD, A, B, HERE, THERE = (0, 1, 2), 3, 4, 5, 6  # numbers of hosts; those after them are of the store, too
HOSTS = 8


class Partitions:
    """`with network: Partitions(network)`; hosts are given by their numbers."""

    def __init__(self, network: Network) -> None:
        self.hosts = network.hosts
        self._cut: set[tuple[int, int]] = set()

    def cut(self, side: Iterable[int], other_side: Iterable[int], one_way: bool = False) -> None:
        """Nothing gets from a host of one side to one of the other; nor back, unless it is `one_way`."""
        others = list(other_side)
        for one in side:
            for other in others:
                for here, there in ((one, other),) if one_way else ((one, other), (other, one)):
                    self._neighbour("replace", here, there, "lladdr", _NOBODY, "nud", "permanent")
                    self._cut.add((here, there))

    def heal(self) -> None:
        for here, there in self._cut:
            self._neighbour("del", here, there)
        self._cut.clear()

    def _neighbour(self, what: str, here: int, there: int, *more: str) -> None:
        host = self.hosts[here]
        command = ["ip", "-n", host.name, "neigh", what, self.hosts[there].address, "dev", "eth0", *more]
        subprocess.run(command, check=True)


def history(endpoint: str, host: Host) -> list[tuple[str, bytes | None, int]]:
    """All that was ever written under the jobs' keys, with the revisions; None: deleted."""
    end = secrets.token_hex(8)
    ctl(endpoint, "put", _END, end, prefix=host.prefix)
    command = [*host.prefix, *ctl_command(endpoint), "watch", "--rev=1", "--prefix", "horovod/jobs/", "-w", "json"]
    found: list[tuple[str, bytes | None, int]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"ETCDCTL_API": "3"}) as watch:
        assert watch.stdout is not None
        for line in watch.stdout:
            for event in json.loads(line).get("Events") or []:
                pair = event["kv"]
                value = None if event.get("type") else base64.b64decode(pair.get("value", ""))
                found.append((base64.b64decode(pair["key"]).decode(), value, pair["mod_revision"]))
            if any(key == _END and value == end.encode() for key, value, _ in found):
                break
        watch.kill()
    return found


def check_history(changes: Sequence[tuple[str, bytes | None, int]], job: str) -> list[membership_pb2.World]:
    """Epochs only went up, and never were there two worlds of one. Returns the worlds."""
    start = f"horovod/jobs/{job}/"
    # When no coordinator serves the job any more, the last one writes the latest number again, with a lease.
    epochs = [int(value) for key, value, _ in changes if key == start + "epoch" and value is not None]
    assert epochs == sorted(epochs), epochs
    written = [value for key, value, _ in changes if key == start + "world" and value is not None]
    worlds = [membership_pb2.WorldRecord.FromString(value).world for value in written]
    numbers = [world.epoch for world in worlds]
    assert numbers == sorted(set(numbers)), numbers
    assert set(numbers) <= set(epochs)
    members = Counter(member.member_id for world in worlds for member in world.members)
    assert all(count == 1 for count in members.values()), "a member is in two worlds"
    return worlds


class Site:
    """A store, coordinators A and B, and what happens to the network between all."""

    def __init__(self, network: Network, folder: Path, stack: ExitStack, nodes: int = 3, *arguments: str) -> None:
        self.partitions = Partitions(network)
        stack.callback(self.partitions.heal)
        self.hosts = network.hosts
        self.nodes = [*ETCD, *range(7, 4 + nodes)]
        self.etcd = stack.enter_context(Etcd(folder, nodes, hosts=[self.hosts[number] for number in self.nodes]))
        self._log = folder / "log"
        written = stack.enter_context(self._log.open("w"))
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
        self.ranks = [self.hosts[number].prefix for number in (HERE, HERE, THERE)]

    def serving(self, node: int = 2) -> int:
        """Who serves the job, as this node of the store has it."""
        address = server_of(self.etcd.endpoints[node], prefix=self.hosts[self.nodes[node]].prefix)
        return next((number for number, replica in self.replicas.items() if replica.address == address), 0)

    def lead(self, node: int) -> None:
        """This node of the store leads."""
        for number, endpoint in enumerate(self.etcd.endpoints):
            prefix = self.hosts[self.nodes[number]].prefix
            status = ctl(endpoint, "endpoint", "status", prefix=prefix).split(", ")
            if number == node:
                wanted = status[1]
            if status[4] == "true":
                leader, leads = (endpoint, prefix), number == node
        if not leads:
            ctl(leader[0], "move-leader", wanted, prefix=leader[1])

    def training(self, **environment: str) -> Training:
        return Training(self.addresses, prefixes=self.ranks, **environment)

    def program(self, script: str, host: int, **environment: str) -> Program:
        """Of a job of two."""
        environment |= {"HOROVOD_SIZE": "2", "HOROVOD_COORDINATOR": self.addresses, "HOROVOD_TRANSPORT": "tcp"}
        return Program(UNSEEN + script, self.hosts[host].prefix, **environment)

    def said(self, words: str) -> list[str]:
        return [line for line in self._log.read_text().splitlines() if words in line]

    def torch_training(self) -> Training:
        return Training(self.addresses, prefixes=self.ranks[1:], script=TORCH_SCRIPT)

    def ends_alike(self, training: Training) -> None:
        """Nobody was lost, and the result is that of an undisturbed run."""
        kinds, result = training.end()
        assert not self.said(WAS_LOST), self.said(WAS_LOST)
        assert len(check_history(self.history(), "default")) == 1
        assert result == undisturbed(self.addresses, kinds, "undisturbed", training.prefixes, training.script)

    def history(self) -> list[tuple[str, bytes | None, int]]:
        return history(self.etcd.endpoints[2], self.hosts[self.nodes[2]])
