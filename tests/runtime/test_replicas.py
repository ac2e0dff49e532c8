"""Coordinators of one store stand for each other: a world goes on with another one, or the same started again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import etcd_server
import pytest
from etcd_server import Etcd
from replicas import Replica, server_of
from stopped_jobs import Job, job

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


def ends_well(ranks: Job) -> None:
    for program in ranks.programs:
        assert program.process.stdin is not None
        program.process.stdin.close()
        program.process.stdin = None
    for program in ranks.programs:
        assert program.finish() == ""


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
            ends_well(ranks)
    assert said(log, "was taken over, with 2 of 2 member(s)") == 3
    assert not said(log, "was lost")


def test_members_are_sent_to_the_one_that_serves_their_job(etcd: Etcd, log: IO[str]) -> None:
    with (
        Replica(etcd.url, "--insecure", log=log) as one,
        Replica(etcd.url, "--insecure", log=log) as other,
        job([one.address, other.address], None) as ranks,  # each knows one of them only
    ):
        ranks.works()
        ends_well(ranks)


def test_the_only_one_is_killed_and_started_again(etcd: Etcd, log: IO[str]) -> None:
    with Replica(etcd.url, log=log) as only, job(only.address, None) as ranks:
        for number in (signal.SIGKILL, signal.SIGTERM):
            only.send_signal(number)
            only.process.communicate()
            only.start()
            ranks.works()
        ends_well(ranks)
    assert not said(log, "was lost")
