"""Training goes on, bit for bit, whatever happens to coordinators and to their store.

Two coordinators on three nodes of etcd. One world lives through a row of faults; the longest step around each fault is
printed (pytest -s). What decides is that the steps come, that nobody is lost, and what comes out in the end.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import etcd_server
import pytest
from delaying_proxy import DelayingProxy
from etcd_server import Etcd, ctl
from event_words import WAS_LOST
from fault_training import (
    JOINS,
    NAMES,
    NEW_NAMES,
    PROCESS_SETS,
    STEADY,
    TORCH_SCRIPT,
    Training,
    pass_seconds,
    undisturbed,
)
from partitions import HOSTS, Site
from replicas import Replica, server_of
from tcp_proxy import Proxy

from benchmarks.namespaces import Network, NetworkError, check_possible

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

KINDS = (STEADY, NEW_NAMES, JOINS, PROCESS_SETS)
STOPPED_S = {STEADY: 5.0, NEW_NAMES: 20.0, JOINS: 5.0, PROCESS_SETS: 5.0}  # all longer than a leader's lease
ALL_STOPPED_S = 5.0
OUTAGE_S = 10.0


class Cluster:
    """Coordinators on three nodes of etcd."""

    def __init__(self, etcd: Etcd, log: Path, stack: ExitStack, store: str = "", count: int = 2) -> None:
        self.etcd = etcd
        self._log = log
        written = stack.enter_context(log.open("w"))
        self.replicas = [
            stack.enter_context(Replica(store or etcd.url, "--insecure", log=written)) for _ in range(count)
        ]
        self.addresses = ",".join(replica.address for replica in self.replicas)

    def serving(self) -> Replica:
        node = next(number for number, one in enumerate(self.etcd.nodes) if one is not None)
        address = server_of(self.etcd.endpoints[node])
        return next(replica for replica in self.replicas if replica.address == address)

    def lost(self) -> list[str]:
        lines = self._log.read_text().splitlines()
        return [line for line in lines if WAS_LOST in line or "declared lost" in line]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd"), 3) as running:
        yield running


@pytest.fixture
def cluster(etcd: Etcd, tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(etcd, tmp_path / "log", stack)


def tell(fault: str, kind: int, seconds: float) -> None:
    print(f"{fault}, {NAMES[kind]}: the longest step took {seconds * 1000:.0f} ms")


def ends_alike(cluster: Cluster, training: Training) -> None:
    kinds, result = training.end()
    assert not cluster.lost()
    assert result == undisturbed(cluster.addresses, kinds, "undisturbed")


def leader(etcd: Etcd) -> int:
    """The node of etcd that leads."""
    for number, endpoint in enumerate(etcd.endpoints):
        status = ctl(endpoint, "endpoint", "status")
        if status.split(", ")[4] == "true":
            return number
    raise AssertionError("no node leads")


def test_the_serving_coordinator_is_killed(cluster: Cluster) -> None:
    with Training(cluster.addresses) as training:
        for kind in KINDS:
            training.works(kind)
            serving = cluster.serving()
            serving.kill()
            tell("kill -9 of the serving coordinator", kind, training.works(kind))
            assert kind == STEADY or cluster.serving() is not serving
            serving.start()
        ends_alike(cluster, training)


def test_the_serving_coordinator_is_stopped_for_a_while(cluster: Cluster) -> None:
    with Training(cluster.addresses) as training:
        for kind in KINDS:
            training.works(kind)
            serving = cluster.serving()
            serving.send_signal(signal.SIGSTOP)
            pauses = [training.works(kind)]
            pass_seconds(STOPPED_S[kind])
            serving.send_signal(signal.SIGCONT)
            pauses.append(training.works(kind))
            tell(f"SIGSTOP of the serving coordinator for {STOPPED_S[kind]:.0f} s", kind, max(pauses))
        ends_alike(cluster, training)


def test_all_coordinators_are_killed(cluster: Cluster) -> None:
    with Training(cluster.addresses) as training:
        for kind in KINDS:
            training.works(kind)
            for replica in cluster.replicas:
                replica.kill()
            training.tell(kind)
            for replica in cluster.replicas:
                replica.start()
            tell("kill -9 of all coordinators", kind, training.answer(kind))
        ends_alike(cluster, training)


def test_nodes_of_the_store_are_killed(cluster: Cluster, etcd: Etcd) -> None:
    with Training(cluster.addresses) as training:
        training.works(NEW_NAMES)
        node = leader(etcd)
        etcd.kill(node)
        tell("kill -9 of etcd's leader", NEW_NAMES, training.works(NEW_NAMES))
        assert etcd.start(node).wait(etcd_server.READY_S)
        for node in range(2):
            etcd.kill(node)
        pauses = [training.works(kind) for kind in KINDS]
        pass_seconds(OUTAGE_S)
        pauses += [training.works(kind) for kind in KINDS]
        for ready in [etcd.start(node) for node in range(2)]:
            assert ready.wait(etcd_server.READY_S)
        for kind in KINDS:
            tell(
                f"two of three nodes of etcd down for {OUTAGE_S:.0f} s",
                kind,
                max(pauses[kind], pauses[kind + len(KINDS)]),
            )
        training.works(NEW_NAMES)
        serving = cluster.serving()
        serving.kill()  # the store has all that is needed
        tell("kill -9 of the serving coordinator after that", NEW_NAMES, training.works(NEW_NAMES))
        serving.start()
        ends_alike(cluster, training)


def test_connections_break(cluster: Cluster) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(replica.address)) for replica in cluster.replicas]
        for replica, proxy in zip(cluster.replicas, proxies, strict=True):
            replica.advertise(proxy.address)
        training = stack.enter_context(Training(",".join(proxy.address for proxy in proxies)))
        for kind in KINDS:
            training.works(kind)
            assert sum(proxy.cut() for proxy in proxies)
            tell("connections that are reset", kind, training.works(kind))
        for kind in (STEADY, NEW_NAMES):
            training.works(kind)
            assert sum(proxy.mute() for proxy in proxies)
            pauses = [training.works(kind)]
            pass_seconds(OUTAGE_S / 2)
            pauses.append(training.works(kind))
            tell("connections on which nothing gets through any more", kind, max(pauses))
        ends_alike(cluster, training)


def test_the_store_is_slow(etcd: Etcd, tmp_path: Path) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(DelayingProxy(endpoint, 0.2)) for endpoint in etcd.endpoints]
        store = "etcd://" + ",".join(proxy.address for proxy in proxies)
        cluster = Cluster(etcd, tmp_path / "log", stack, store)
        training = stack.enter_context(Training(cluster.addresses))
        for kind in KINDS:
            training.works(kind)
            serving = cluster.serving()
            serving.kill()
            tell("kill -9 of the serving coordinator, 200 ms for each call to the store", kind, training.works(kind))
            serving.start()
        ends_alike(cluster, training)


def test_pytorch_when_all_coordinators_are_stopped_for_a_while(cluster: Cluster) -> None:
    ranks = ((),) * 2
    with Training(cluster.addresses, prefixes=ranks, script=TORCH_SCRIPT) as training:
        for kind in KINDS:
            training.works(kind)
            for replica in cluster.replicas:
                replica.send_signal(signal.SIGSTOP)
            pauses = [training.works(kind)] if kind == STEADY else []
            training.tell(kind)
            pass_seconds(ALL_STOPPED_S)
            for replica in cluster.replicas:
                replica.send_signal(signal.SIGCONT)
            pauses.append(training.answer(kind))
            tell(f"PyTorch, SIGSTOP of all coordinators for {ALL_STOPPED_S:.0f} s", kind, max(pauses))
        kinds, result = training.end()
        assert not cluster.lost()
        assert result == undisturbed(cluster.addresses, kinds, "undisturbed", ranks, TORCH_SCRIPT)


def test_pytorch_when_nothing_gets_to_the_serving_coordinator(tmp_path: Path) -> None:
    """From nowhere, without a word: its packets vanish."""
    with ExitStack() as stack:
        try:
            check_possible()
            network = stack.enter_context(Network(HOSTS))
        except NetworkError as error:
            pytest.skip(str(error))
        site = Site(network, tmp_path, stack)
        training = stack.enter_context(site.torch_training())
        for kind in (STEADY, JOINS, PROCESS_SETS):
            training.works(kind)
            serving = site.serving()
            site.partitions.cut([serving], {*range(HOSTS)} - {serving})
            pauses = [training.works(kind)]
            pass_seconds(OUTAGE_S)
            pauses.append(training.works(kind))
            site.partitions.heal()
            pauses.append(training.works(kind))
            tell(f"PyTorch, packets of the serving coordinator vanish for {OUTAGE_S:.0f} s", kind, max(pauses))
        site.ends_alike(training)
