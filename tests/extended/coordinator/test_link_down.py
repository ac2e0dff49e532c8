"""The link of a host goes down in the middle of an operation: both sides raise soon, and say what they can't know."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from event_words import LISTENING, UNKNOWN_WHICH_SIDE, WAS_LOST
from runtime_harness import PRELUDE
from stopped_jobs import UNSEEN

from benchmarks.namespaces import Network, NetworkError, check_possible

SCRIPT = """
hvd.init()
rank = current().world.rank
allreduce("x")  # what is agreed for the first time needs the coordinator, which a cut link takes away as well
print("ready", flush=True)
began = time.monotonic()
try:
    while True:
        allreduce("x")
        began = time.monotonic()
        if rank == 0:
            time.sleep(0.01)
except HorovodInternalError as error:
    print(time.monotonic() - began, flush=True)
    print(str(error).replace(chr(10), " "), flush=True)
os._exit(0)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        check_possible()
        with Network(2) as made:
            yield made
    except NetworkError as error:
        pytest.skip(str(error))


def test_both_sides_raise(network: Network) -> None:
    here, there = network.hosts
    common = {**os.environ, "HOROVOD_COORDINATOR": f"{here.address}:29400", "HOROVOD_SIZE": "2"}
    common |= {"HOROVOD_TRANSPORT": "tcp", "HOROVOD_TOKEN": "t"}
    processes: list[subprocess.Popen[str]] = []

    def start(prefix: tuple[str, ...], *command: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*prefix, sys.executable, *command], env={**common, **environment}, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    try:
        listen = ("-m", "horovod.coordinator", "--listen", f"{here.address}:29400", "--insecure")
        assert LISTENING in line(start(here.prefix, *listen))
        ranks = [
            start(host.prefix, "-c", PRELUDE + UNSEEN + SCRIPT, HOROVOD_RANK=str(rank), HOROVOD_HOSTNAME=f"host-{rank}")
            for rank, host in enumerate((here, there))
        ]
        assert [line(rank) for rank in ranks] == ["ready", "ready"]
        subprocess.run(["ip", "-n", there.name, "link", "set", "eth0", "down"], check=True)
        for rank, process in enumerate(ranks):
            seconds, sentence = float(line(process)), line(process)
            print(f"rank {rank} was told after {seconds:.1f} s: {sentence}")
            assert f"Rank {1 - rank}" in sentence or f"rank {1 - rank}" in sentence
            assert WAS_LOST in sentence
            assert UNKNOWN_WHICH_SIDE in sentence or "is down" in sentence
    finally:
        for process in processes:
            process.kill()
            process.communicate()
