"""Coordinators of one store stand for each other: a world goes on with another one, or the same started again."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import etcd_server
import grpc
import pytest
from etcd_server import Etcd
from event_words import TAKEN_OVER, WAS_LOST
from replicas import Replica, server_of
from resources import eventually
from stopped_jobs import job
from tcp_proxy import Proxy

from horovod.base.errors import ClusterCode
from horovod.coordinator.config import Limits
from horovod.protos.v1 import membership_pb2, membership_pb2_grpc

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def log(tmp_path: Path) -> Iterator[IO[str]]:
    with (tmp_path / "log").open("w+") as written:
        yield written


def said(log: IO[str], words: str) -> int:
    log.seek(0)
    return log.read().count(words)


def test_the_other_one_goes_on_when_one_is_killed_and_so_in_turn(etcd: Etcd, log: IO[str]) -> None:
    with Replica(etcd.url, "--insecure", log=log) as one, Replica(etcd.url, "--insecure", log=log) as other:
        replicas = {replica.address: replica for replica in (one, other)}
        with job(f"{one.address},{other.address}", None) as ranks:
            for _ in range(3):
                address = server_of(etcd.endpoints[0])
                replicas[address].kill()
                ranks.works()
                assert server_of(etcd.endpoints[0]) not in ("", address)
                replicas[address].start()
            ranks.end_well()
    assert said(log, f"{TAKEN_OVER}, with 2 of 2") == 3
    assert not said(log, WAS_LOST)


def test_members_are_sent_to_the_one_that_serves_their_job(etcd: Etcd, log: IO[str]) -> None:
    with (
        Replica(etcd.url, "--insecure", log=log) as one,
        Replica(etcd.url, "--insecure", log=log) as other,
        job([one.address, other.address], None) as ranks,  # each knows one of them only
    ):
        ranks.works()
        ranks.end_well()


def test_the_only_one_is_killed_and_started_again(etcd: Etcd, log: IO[str]) -> None:
    with Replica(etcd.url, log=log) as only, job(only.address, None) as ranks:
        for number in (signal.SIGKILL, signal.SIGTERM):
            only.send_signal(number)
            only.process.communicate()
            only.start()
            ranks.works()
        ranks.end_well()
    assert not said(log, WAS_LOST)


def test_one_without_its_store_is_left(etcd: Etcd, log: IO[str]) -> None:
    with (
        Proxy(etcd.endpoints[0]) as way,
        Replica(f"etcd://{way.address}", "--insecure", log=log) as one,
        Replica(etcd.url, "--insecure", log=log) as other,
        job(f"{one.address},{other.address}", None, Limits()) as ranks,
    ):
        ranks.works()
        assert server_of(etcd.endpoints[0]) == one.address
        way.refuse()
        assert eventually(lambda: server_of(etcd.endpoints[0]) == other.address, 60.0)
        ranks.works()
        with (
            joining(one.address, "late") as late,
            pytest.raises(grpc.RpcError, match=rf"\[{ClusterCode.STORE_FAILED}\]"),
        ):
            next(late)
        way.admit()
        assert eventually(lambda: said(log, f"Job 'default' {TAKEN_OVER} by {other.address}") == 1, 60.0)
        ranks.works()
        assert not said(log, WAS_LOST)
        ranks.end_well()


@contextmanager
def joining(address: str, member_id: str, unreachable: str = "") -> Iterator[Iterator[membership_pb2.MembershipEvent]]:
    """What a coordinator tells a member of a job of three that asks to join, and that could not reach another one."""
    join = membership_pb2.JoinRequest(protocol_version=3, job="reach", member_id=member_id, size=3, pid=1)
    join.host.name = "host"
    requests: queue.SimpleQueue[membership_pb2.MemberMessage | None] = queue.SimpleQueue()
    requests.put(membership_pb2.MemberMessage(join=join, unreachable=unreachable))
    with grpc.insecure_channel(address) as channel:
        events = membership_pb2_grpc.MembershipStub(channel).Join(iter(requests.get, None), timeout=60)
        yield events
        requests.put(None)
        events.cancel()


def test_the_other_one_serves_a_member_that_can_not_reach_the_first(etcd: Etcd, log: IO[str]) -> None:
    with (
        Replica(etcd.url, "--insecure", log=log) as one,
        Replica(etcd.url, "--insecure", log=log) as other,
        joining(one.address, "first") as first,
    ):
        assert "1 of 3" in next(first).progress.sentence
        for unreachable in ("", "127.0.0.1:9"):
            with joining(other.address, f"sent on {unreachable}", unreachable) as event:
                assert next(event).redirect.address == one.address
        with joining(other.address, "second", one.address) as second:
            assert "1 of 3" in next(second).progress.sentence
            assert next(first).redirect.address == other.address
