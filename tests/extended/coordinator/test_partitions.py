"""Networks that fall apart between training, coordinators and their store: there are never two worlds of one job.

Each node of the store, each of the two coordinators and each of two hosts of training has a network namespace. Where
all can meet again, or one coordinator is reached by all of training and most of the store, training ends with the same
bits as if nothing had been. Where not, each process is told so within the limits, and in words that are true.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import etcd_server
import pytest
from event_words import TAKEN_OVER, UNKNOWN_WHICH_SIDE, WAS_LOST
from fault_training import JOINS, NAMES, NEW_NAMES, PROCESS_SETS, STEADY, Training, pass_seconds
from partitions import ETCD, HERE, HOSTS, THERE, A, B, Site, check_history
from resources import eventually
from runtime_harness import Program

from benchmarks.namespaces import Network, NetworkError, check_possible

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

WITHIN_GRACE_S = 4.0
UNREACHABLE_S = 5.0
TAKEN_OVER_S = 40.0  # a replica without its store goes after two leases at most

# Trains until it can't, then waits to be told.
ENDS = """
hvd.init()
world = current().world
print(world.epoch, flush=True)
try:
    while True:
        allreduce("x")
        time.sleep(0.01)
except HorovodInternalError as error:
    print(str(error).replace(chr(10), " "), flush=True)
sys.stdin.readline()
os._exit(0)
"""

# Joins a job, once.
JOINS_ONCE = """
from horovod.worker.runtime.errors import StartError
try:
    hvd.init()
except StartError as error:
    print("no world:", str(error).replace(chr(10), " "), flush=True)
else:
    allreduce("y")
    print(current().world.epoch, flush=True)
    sys.stdin.readline()
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


@pytest.fixture
def site(network: Network, tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(network, tmp_path, stack)


def works_on(site: Site, training: Training, other_than: int, node: int = 2) -> None:
    """All kinds of steps are done, by the other coordinator."""
    pauses = {kind: training.works(kind) for kind in (NEW_NAMES, JOINS, PROCESS_SETS, STEADY)}
    print({NAMES[kind]: f"{seconds * 1000:.0f} ms" for kind, seconds in pauses.items()})
    assert site.serving(node) not in (0, other_than)


@pytest.mark.parametrize("also", [(), "B"], ids=["from the store", "from the store and the other coordinator"])
def test_a_coordinator_is_cut_off_from_its_store(site: Site, also: str) -> None:
    """Training reaches it all the same, and leaves it."""
    with site.training() as training:
        training.works(NEW_NAMES)
        serving = site.serving()
        site.partitions.cut([serving], [*ETCD, *([A + B - serving] if also else [])])
        training.tell(NEW_NAMES)
        assert eventually(lambda: site.serving() not in (0, serving), TAKEN_OVER_S)
        print(f"longest step: {training.answer(NEW_NAMES) * 1000:.0f} ms")
        works_on(site, training, serving)
        site.partitions.heal()
        works_on(site, training, serving)
        # It hears of that when it reaches the store again, for which its connection may have to be made anew.
        assert eventually(lambda: site.said(f"{TAKEN_OVER} by"), TAKEN_OVER_S)
        site.ends_alike(training)


def test_a_coordinator_is_cut_off_from_training(site: Site) -> None:
    """The store and the other coordinator reach it all the same."""
    with site.training() as training:
        training.works(NEW_NAMES)
        serving = site.serving()
        site.partitions.cut([serving], [HERE, THERE])
        works_on(site, training, serving)
        site.partitions.heal()
        works_on(site, training, serving)
        site.ends_alike(training)


def test_each_coordinator_is_reached_by_a_part_of_training(site: Site) -> None:
    """Neither can serve. What is agreed goes on, nobody is lost, and the rest waits until the network is whole."""
    with site.training() as training:
        training.works(NEW_NAMES)
        training.works(STEADY)
        site.partitions.cut([A], [THERE])
        site.partitions.cut([B], [HERE])
        training.works(STEADY)
        pass_seconds(2 * WITHIN_GRACE_S)
        training.works(STEADY)
        training.tell(NEW_NAMES)
        pass_seconds(WITHIN_GRACE_S)
        site.partitions.heal()
        training.answer(NEW_NAMES)
        works_on(site, training, 0)
        site.ends_alike(training)


def test_a_coordinator_that_was_replaced_hears_nothing_from_its_node_of_the_store(site: Site) -> None:
    """It keeps the members that reach it, which the one that replaced it waits for, until it asks another node."""
    with site.training() as training:
        training.works(NEW_NAMES)
        serving = site.serving()
        site.lead(1)
        site.etcd.signal(0, signal.SIGSTOP)  # the watches of both are there
        try:
            site.partitions.cut([serving], [HERE])
            works_on(site, training, serving)
        finally:
            site.etcd.signal(0, signal.SIGCONT)
        site.partitions.heal()
        site.ends_alike(training)


def test_the_store_is_split_with_a_coordinator_on_each_side(site: Site) -> None:
    """Who serves and the leader of the store are on the smaller side; training reaches both."""
    with site.training() as training:
        training.works(NEW_NAMES)
        serving = site.serving()
        site.lead(0)
        site.partitions.cut([0, serving], [1, 2, A + B - serving])
        training.tell(NEW_NAMES)
        assert eventually(lambda: site.serving() not in (0, serving), TAKEN_OVER_S)
        training.answer(NEW_NAMES)
        works_on(site, training, serving)
        site.partitions.heal()
        works_on(site, training, serving)
        site.ends_alike(training)


def test_everything_is_split_for_less_than_the_grace(site: Site) -> None:
    with site.training() as training:
        training.works(NEW_NAMES)
        serving = site.serving()
        site.partitions.cut([0, serving, HERE], [1, 2, A + B - serving, THERE])
        training.tell(NEW_NAMES)
        pass_seconds(WITHIN_GRACE_S)
        site.partitions.heal()
        print(f"longest step: {training.answer(NEW_NAMES) * 1000:.0f} ms")
        for kind in (JOINS, PROCESS_SETS, STEADY):
            training.works(kind)
        site.ends_alike(training)


def test_everything_is_split_for_longer(network: Network, tmp_path: Path) -> None:
    """Both sides of training are told. A new world forms where most of the store is, and nowhere else."""
    limits = {"HOROVOD_UNREACHABLE_TIMEOUT_SECONDS": f"{UNREACHABLE_S:.0f}"}
    with ExitStack() as stack:
        site = Site(network, tmp_path, stack, 3, "--reattach-grace-seconds", "4")
        here, there = (stack.enter_context(site.program(ENDS, host, **limits)) for host in (HERE, THERE))
        assert here.line() == there.line() == "1"
        serving = site.serving()
        site.partitions.cut([0, serving, HERE], [1, 2, A + B - serving, THERE])
        are_told(site, here, there)
        for program in (here, there):
            program.tell()
        # Two more on each side would be a world of the same job.
        beyond = [stack.enter_context(site.program(JOINS_ONCE, THERE, HOROVOD_START_TIMEOUT="100")) for _ in range(2)]
        assert {program.line() for program in beyond} == {"2"}
        alone = [stack.enter_context(site.program(JOINS_ONCE, HERE, HOROVOD_START_TIMEOUT="6")) for _ in range(2)]
        for program in alone:
            sentence = program.finish()
            print(sentence)
            assert sentence.startswith("no world:")
            assert "store" in sentence or "does not answer" in sentence
        site.partitions.heal()
        for program in beyond:
            program.tell()
            program.finish()
        worlds = check_history(site.history(), "default")
        assert [world.epoch for world in worlds] == [1, 2]


def are_told(site: Site, here: Program, there: Program) -> None:
    """Each that the other is lost, by an error that does not say more than can be known."""
    for program in (here, there):
        sentence = program.line()
        print(sentence)
        assert WAS_LOST in sentence or "unreachable" in sentence
        assert UNKNOWN_WHICH_SIDE in sentence or "can't be known" in sentence or "is down" in sentence


def test_no_side_has_most_of_anything(network: Network, tmp_path: Path) -> None:
    """Four nodes of the store, two and two; a coordinator and training on each side."""
    with ExitStack() as stack:
        site = Site(network, tmp_path, stack, nodes=4)
        sides = [0, 1, A, HERE], [2, 7, B, THERE]
        with site.training() as training:
            training.works(NEW_NAMES)
            site.partitions.cut(*sides)
            training.tell(NEW_NAMES)
            pass_seconds(WITHIN_GRACE_S)
            site.partitions.heal()
            print(f"longest step: {training.answer(NEW_NAMES) * 1000:.0f} ms")
            training.works(PROCESS_SETS)
            site.ends_alike(training)
        limits = {"HOROVOD_UNREACHABLE_TIMEOUT_SECONDS": f"{UNREACHABLE_S:.0f}", "HOROVOD_JOB": "other"}
        here, there = (stack.enter_context(site.program(ENDS, host, **limits)) for host in (HERE, THERE))
        assert here.line() == there.line() == "1"
        site.partitions.cut(*sides)
        are_told(site, here, there)
        more = [
            stack.enter_context(site.program(JOINS_ONCE, host, HOROVOD_START_TIMEOUT="6", HOROVOD_JOB="other"))
            for host in (HERE, HERE, THERE, THERE)
        ]
        for program in more:
            sentence = program.finish()
            print(sentence)
            assert sentence.startswith("no world:")
            assert "store" in sentence or "does not answer" in sentence
        for program in (here, there):
            program.tell()
        site.partitions.heal()
        again = {"HOROVOD_START_TIMEOUT": "100", "HOROVOD_JOB": "other"}
        pair = [stack.enter_context(site.program(JOINS_ONCE, host, **again)) for host in (HERE, THERE)]
        epochs = {program.line() for program in pair}
        assert len(epochs) == 1
        for program in pair:
            program.tell()
            program.finish()
        worlds = check_history(site.history(), "other")
        assert [world.epoch for world in worlds] == [1, int(epochs.pop())]
