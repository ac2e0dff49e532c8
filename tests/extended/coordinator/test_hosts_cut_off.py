"""Hosts that don't reach each other, while all of them reach the coordinator. If the network is cut for some seconds
during a training, no rank is called lost. If it is cut before the ranks connect, all are told who can't reach whom.

Each rank is a host; it takes steps of several operations. When the network is cut one rank has the result of an
operation and another one has not, so that they wait in different ones, all with blocked threads: like in a deadlock.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from error_codes import ends_with
from event_words import LISTENING, WAS_LOST
from fault_training import pass_seconds
from partitions import Partitions
from runtime_harness import Program
from stopped_jobs import UNSEEN

from benchmarks.namespaces import Network, NetworkError, check_possible
from horovod.base.errors import OperationCode, WorldCode, without_code

RANKS = 3
COORDINATOR = RANKS  # the number of its host
CUT_S = 9.0  # longer than a deadlock takes to be found, and well below HOROVOD_UNREACHABLE_TIMEOUT_SECONDS

# Rank 0 is told the number of the last step by its stdin.
SCRIPT = """
import select
hvd.init()
context = current()
rank, size = context.world.rank, context.world.size
pair = context.process_sets.number(context.process_sets.add([[0, 1]])[0], [0, 1])

def reduce(name, value, number=0):
    data = array("f", [value])
    pointer = data.buffer_info()[0]
    spec = OpSpec(0, process_set=number)
    return context.engine.submit(spec, "allreduce." + name, [(pointer, pointer, 7, (1,))]), data

def total(name, value, number=0):
    handle, data = reduce(name, value, number)
    handle.result()
    return data[0]

print("ready", flush=True)
step, ends = 0, 0.0
while True:
    if rank == 0 and select.select([sys.stdin], [], [], 0)[0]:
        sys.stdin.readline()
        ends = 1.0
    later, data = reduce("later", 1.0)  # nobody waits for it yet
    for name in ("a", "b", "c"):
        assert total(name, rank + step % 100) == size * (size - 1) / 2 + size * (step % 100)
    if rank < 2:
        assert total("of two", step % 100, pair) == 2 * (step % 100)
    over = total("over", ends)
    later.result()
    assert data[0] == size
    step += 1
    if over:
        break
    if step % 50 == 0 and rank == 0:
        print(step, flush=True)
print("ended alike", flush=True)
hvd.shutdown()
"""


# Does one operation for each line of its stdin.
ONE_BY_ONE = """
hvd.init()
print("ready", flush=True)
for line in sys.stdin:
    print(allreduce("x"), flush=True)
hvd.shutdown()
"""


# Says how large the first world is in which an operation ends, or why there is none.
START = """
print("ready", flush=True)
try:
    hvd.init()
    while True:
        try:
            print("world of", allreduce("x"), flush=True)
            break
        except HorovodInternalError:
            if "HOROVOD_MIN_SIZE" not in os.environ:
                raise
            hvd.join_again()
except (HorovodInternalError, ValueError) as error:
    print(error, flush=True)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        check_possible()
        with Network(RANKS + 1) as made:
            yield made
    except NetworkError as error:
        pytest.skip(str(error))


def started(stack: ExitStack, network: Network, script: str, size: int, job: int, **environment: str) -> list[Program]:
    """The ranks of a job, and its coordinator, each on a host. job: its number among those that run at once."""
    address = f"{network.hosts[COORDINATOR].address}:{29400 + job}"
    common = {
        "HOROVOD_COORDINATOR": address,
        "HOROVOD_SIZE": str(size),
        "HOROVOD_TRANSPORT": "tcp",
        "HOROVOD_TOKEN": "t",
        **environment,
    }
    listen = [sys.executable, "-m", "horovod.coordinator", "--listen", address, "--insecure"]
    coordinator = stack.enter_context(
        subprocess.Popen(
            [*network.hosts[COORDINATOR].prefix, *listen],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOROVOD_TOKEN": "t"},
        )
    )
    stack.callback(coordinator.kill)
    assert coordinator.stdout is not None
    assert LISTENING in coordinator.stdout.readline()
    ranks = []
    for rank in range(size):
        own = {"HOROVOD_RANK": str(rank), "HOROVOD_HOSTNAME": f"host-{rank}"}
        ranks.append(stack.enter_context(Program(UNSEEN + script, network.hosts[rank].prefix, **common, **own)))
    for program in ranks:
        assert program.line() == "ready", program.process.communicate()
    return ranks


CUTS = {
    "all from each other": ([(0, 1), (0, 2), (1, 2)], False),
    "one from the others": ([(0, 1), (0, 2)], False),
    "two others": ([(1, 2)], False),
    "what the first sends": ([(0, 1), (0, 2)], True),
    "what the first gets": ([(1, 0), (2, 0)], True),
    "what one sends to another": ([(1, 0)], True),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_job_goes_on_when_they_meet_again(network: Network, cut: str) -> None:
    """Two jobs on the same hosts: over a full mesh and over a sparse one."""
    pairs, one_way = CUTS[cut]
    partitions = Partitions(network)
    with ExitStack() as stack:
        jobs = []
        for number, full_mesh_members in enumerate("82"):
            more = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_FULL_MESH_MEMBERS": full_mesh_members}
            jobs.append(started(stack, network, SCRIPT, RANKS, number, **more))
        stack.callback(partitions.heal)

        def steps(ranks: list[Program]) -> int:
            said = ranks[0].line()
            assert said.isdigit(), (said, ranks[0].process.communicate())
            return int(said)

        for ranks in jobs:
            assert steps(ranks) == 50
        for here, there in pairs:
            partitions.cut([here], [there], one_way=one_way)
        pass_seconds(CUT_S)
        partitions.heal()
        for ranks in jobs:
            stepped = steps(ranks)  # nobody has failed
            while steps(ranks) < stepped + 100:
                pass
            ranks[0].tell()
            while (said := ranks[0].line()) != "ended alike":
                assert said.isdigit(), said
            for rank in ranks[1:]:
                assert rank.line() == "ended alike"
            for rank in ranks:
                rank.finish()


LIMIT_S = 6.0
PAUSE_S = 2.5  # the kernel asks after half of the limit
SHORTER_S = 5.0


def test_the_limit_begins_when_something_is_owed(network: Network) -> None:
    """Nothing was sent for a while before the cut: that is no silence, nobody was to answer.

    Two jobs: one owes something while the network is cut, and of the other nothing is under way.
    """
    partitions = Partitions(network)
    with ExitStack() as stack:
        limit = f"{LIMIT_S:.0f}"
        jobs = [
            started(stack, network, ONE_BY_ONE, 2, job, HOROVOD_UNREACHABLE_TIMEOUT_SECONDS=limit) for job in range(2)
        ]
        stack.callback(partitions.heal)
        owing, idle = jobs

        def tell(ranks: list[Program]) -> None:
            for rank in ranks:
                rank.tell()

        def are_done(ranks: list[Program]) -> None:
            for rank in ranks:
                assert rank.line() == "2.0", rank.process.communicate()

        for ranks in jobs:
            tell(ranks)
        for ranks in jobs:
            are_done(ranks)
        pass_seconds(PAUSE_S)
        partitions.cut([0], [1])
        tell(owing)
        pass_seconds(SHORTER_S)
        partitions.heal()
        tell(idle)
        for ranks in jobs:
            are_done(ranks)
            for rank in ranks:
                rank.finish()


@pytest.mark.parametrize("fewest", [0, 2])
def test_hosts_that_can_not_connect_to_each_other(network: Network, fewest: int) -> None:
    """fewest: of an elastic job, which goes on where enough are left; 0: the job has a fixed size. The last rank has
    connected to both of the others before they know: it may see their connections end before it is told why.
    """
    environment = {"HOROVOD_UNREACHABLE_TIMEOUT_SECONDS": "2", "HOROVOD_START_TIMEOUT": "600"}
    if fewest:
        environment |= {"HOROVOD_MIN_SIZE": str(fewest), "HOROVOD_MAX_SIZE": str(RANKS)}
    partitions = Partitions(network)
    with ExitStack() as stack:
        stack.callback(partitions.heal)
        partitions.cut([0], [1])
        ranks = started(stack, network, START, RANKS, 0, **environment)
        said = [program.line() for program in ranks]
        for program in ranks:
            program.finish()
    goes_on = [line for line in said if line.startswith("world")]
    assert goes_on == (["world of 2.0"] * 2 if fewest else []), said
    ends = [line for line in said if line not in goes_on]
    if not fewest and re.search(ends_with(OperationCode.PEER_LOST, WAS_LOST, " (Rank 2 was running "), ends[-1]):
        ends.pop()
    told = [line[line.index("Rank 1 (pid ") :] for line in ends]
    for sentence in told:  # that of rank 2 goes on with what it was running
        assert sentence.startswith(without_code(told[0]))
        assert re.search(ends_with(WorldCode.UNREACHABLE_PEER, "host-0", "host-1", "(eth0): no connection"), sentence)
        assert "host-2" not in sentence
