"""`horovodrun --spares`: processes that wait beside a world of the most members, until one of them is lost."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from event_words import tells
from test_found_hosts import follows  # noqa: F401 - a fixture

from horovod.coordinator.core.world.membership import JobOverview
from horovod.launch.console.report import Spares
from horovod.launch.elastic.request import ElasticRequest, Replacement

Run = Callable[..., CompletedProcess[str]]


def test_a_spare_process_takes_the_place_of_a_lost_one(
    horovodrun: Run,
    follows: Callable[..., list[str]],  # noqa: F811
) -> None:
    dies = "if hvd.rank() == 0: os.kill(os.getpid(), signal.SIGKILL)"
    command = follows([2, 2], [dies])
    done = horovodrun("-np", "2", "--min-np", "2", "--spares", "1", *command)
    assert done.returncode == 0, done.stderr
    took = re.findall(r"<stdout>:took 2 (\d) 2 (\d) ", done.stdout)
    assert sorted(rank for rank, _ in took) == ["0", "1"], "in a world of two, which is the most"


def seen(epoch: int, *waiting: int) -> JobOverview:
    return JobOverview("job", epoch, 2, (), len(waiting), "", {rank: rank + 0.5 for rank in waiting})


def test_it_is_told_when_a_spare_process_takes_a_place() -> None:
    spares = Spares()
    looks = [seen(0, 0, 1, 2), seen(1, 2), seen(1, 2, 3), seen(0, 1, 2, 3), seen(2, 3), seen(2, 3), seen(2)]
    told = [spares.seen(look) for look in looks]
    assert [bool(sentence) for sentence in told] == [False, False, False, False, True, False, False]
    saved = "2.5 s sooner than a new one could"
    assert tells(str(told[4]), "spare process 2", saved, "2 members")


def test_a_process_says_how_long_it_took_to_start() -> None:
    code = "from horovod.worker.runtime.witness import own_age_seconds; print(own_age_seconds())"
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The kernel counts hundredths of a second.
    assert 0 < float(done.stdout) <= time.monotonic() - began_s + 0.02


@pytest.mark.parametrize(
    ("given", "replacement"),
    [
        ({"min_num_proc": 2}, Replacement(6, (2, 2), spares=1, since_progress=True)),
        ({"min_num_proc": 1, "max_num_proc": 4}, Replacement(6, (1, 4), spares=1, since_progress=True)),
        ({"host_discovery_script": "true"}, Replacement(None, (2, 2), supplied=True, spares=1)),
    ],
)
def test_spare_processes_are_beyond_the_most(given: dict[str, object], replacement: Replacement) -> None:
    request = ElasticRequest(**given, spares=1)  # type: ignore[arg-type]
    assert request.replacement(2) == replacement
    assert replacement.most_slots == (replacement.sizes[1] or 0) + 1
    assert replacement.slots(9) == replacement.greatest(2) == replacement.most_slots
