"""Elastic jobs in networks that fall apart: one side goes on, there are never two worlds, and then all meet again.

Each node of the store, each of two coordinators and each of two hosts of training has a network namespace. The side
that goes on is the one with a coordinator and most of the store. The other one is told, waits, and comes back as new.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import etcd_server
import pytest
from partitions import ETCD, HERE, HOSTS, THERE, A, B, Site, check_history
from runtime_harness import Program

from benchmarks.namespaces import Network, NetworkError, check_possible

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

SIZE = 4

# Says each world that it is in and each error, and joins the next world, until it is told to end.
SCRIPT = """
import select
from horovod.base.errors import code_of
from horovod.worker.runtime.context import when_world_changes

known = set()
when_world_changes(lambda change: known.add(change.epoch))
hvd.init()
step, wish = 0, 0
while True:
    world = current().world
    print("world", world.epoch, world.size, flush=True)
    try:
        while not wish:
            step += 1
            if select.select([sys.stdin], [], [], 0)[0]:
                wish = 100_000
            total = allreduce("x", 1.0 + 100 * (world.epoch in known) + wish)
            if total >= 100_000:
                wish = 100_000
            elif total >= 100:
                break
            else:
                assert total == world.size, total
            time.sleep(0.01)
    except HorovodInternalError as error:
        print("error", code_of(str(error)), flush=True)
    if wish:
        break
    hvd.join_again()
hvd.shutdown()
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        check_possible()
        with Network(HOSTS) as made:
            yield made
    except NetworkError as error:
        pytest.skip(str(error))


class ElasticJob:
    """Processes on the two hosts, of whom any number can be a world."""

    def __init__(self, site: Site, stack: ExitStack, here: int) -> None:
        """here: how many of them are HERE; the others are THERE."""
        self._site = site
        self._since = time.monotonic()
        limits = {"HOROVOD_MIN_SIZE": "1", "HOROVOD_MAX_SIZE": str(SIZE), "HOROVOD_ELASTIC_HUNG_SECONDS": "2"}
        limits |= {"HOROVOD_START_TIMEOUT": "120"}
        hosts = [HERE] * here + [THERE] * (SIZE - here)
        programs = [stack.enter_context(site.program(SCRIPT, host, **limits)) for host in hosts]
        self.here, self.there = programs[:here], programs[here:]
        self.epoch = 0
        self.are_in_a_world(programs, SIZE)

    def are_in_a_world(self, programs: Sequence[Program], size: int) -> None:
        """All say so, after any number of errors and of worlds that did not last. No others were in such a world."""
        epochs = set()
        for program in programs:
            while (line := program.line()) and not (line.startswith("world") and line.endswith(f" {size}")):
                assert line.startswith("error") or int(line.split()[1]) > self.epoch, line
            assert line, program.finish()
            epochs.add(int(line.split()[1]))
        print(f"{time.monotonic() - self._since:.1f} s: a world of {size}")
        (epoch,) = epochs
        assert epoch > self.epoch
        self.epoch = epoch

    def is_told(self, programs: Sequence[Program]) -> None:
        for program in programs:
            assert program.line().startswith("error")

    def ends(self) -> None:
        programs = [*self.here, *self.there]
        for program in programs:
            program.tell()
        said = [program.finish() for program in programs]
        assert said == [""] * SIZE, said
        worlds = check_history(self._site.history(), "default")
        assert worlds[-1].epoch == self.epoch
        assert len(worlds[-1].members) == SIZE


def sides(site: Site, coordinator: str, store: str) -> tuple[list[int], list[int]]:
    """Who is with HERE and who is with THERE. coordinator, store: with whom who serves, and most of the store, are."""
    serving = site.serving()
    here, there = [HERE], [THERE]
    (here if coordinator == "here" else there).append(serving)
    (there if coordinator == "here" else here).append(A + B - serving)
    few, most = (there, here) if store == "here" else (here, there)
    few.append(0)
    most += [1, 2]
    return here, there


@pytest.mark.parametrize("here", [2, 3], ids=["2/2", "3/1"])
@pytest.mark.parametrize("coordinator", ["here", "there"])
@pytest.mark.parametrize("store", ["here", "there"])
def test_everything_falls_apart(network: Network, tmp_path: Path, here: int, coordinator: str, store: str) -> None:
    """With whom most of the store is goes on, be they many or few."""
    with ExitStack() as stack:
        site = Site(network, tmp_path, stack)
        job = ElasticJob(site, stack, here)
        site.partitions.cut(*sides(site, coordinator, store))
        go_on, wait = (job.here, job.there) if store == "here" else (job.there, job.here)
        job.are_in_a_world(go_on, len(go_on))
        job.is_told(wait)
        site.partitions.heal()
        job.are_in_a_world([*go_on, *wait], SIZE)
        job.ends()


@pytest.mark.parametrize("is_heard", [False, True], ids=["says nothing", "hears nothing"])
def test_a_host_is_cut_off_in_one_direction(network: Network, tmp_path: Path, is_heard: bool) -> None:
    with ExitStack() as stack:
        site = Site(network, tmp_path, stack)
        job = ElasticJob(site, stack, 3)
        ends = [THERE], [*ETCD, A, B, HERE]
        site.partitions.cut(*(ends[::-1] if is_heard else ends), one_way=True)
        job.are_in_a_world(job.here, 3)
        job.is_told(job.there)
        site.partitions.heal()
        job.are_in_a_world([*job.here, *job.there], SIZE)
        job.ends()
