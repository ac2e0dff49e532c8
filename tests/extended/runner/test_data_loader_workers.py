"""SIGTERM while a DataLoader has workers: a rank ends as it wants to, whoever sends the signal to whom."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable

import psutil
import pytest
from event_words import LEFT_THE_JOB, REPLACED, tells
from launching import Launched, still_alive

Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]

LOADER = """
import torch
import horovod.torch as hvd
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.ones(4)

def batches():
    loaded = iter(DataLoader(Rows(), batch_size=4, num_workers=2))
    yield next(loaded)
    print("ready", flush=True)
    yield from loaded
"""

SAVES = (
    LOADER
    + """
asked = []
for signum in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, lambda number, frame: asked.append(number))
hvd.init()
after = 0
for batch in batches():
    after += bool(asked)
    if after == 20:  # more than the workers have ready
        break
print("saved", *asked, flush=True)
sys.exit(0)
"""
)

ELASTIC = (
    LOADER
    + """
hvd.init()
state = hvd.elastic.TorchState(torch.nn.Linear(4, 1), batch=0)

@hvd.elastic.run
def train(state):
    for batch in batches():
        hvd.allreduce(batch.sum(), name="sum")
        state.batch += 1
        if state.batch % 1000 == 0:
            state.commit()

train(state)
"""
)


IN_PYTHON = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"]


@pytest.mark.parametrize("wrapper", [[], ["bash", "-c", '"$@"; true', "bash"], IN_PYTHON])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_rank_saves_after_a_signal(
    launch: Launch, program: Program, signum: signal.Signals, wrapper: list[str]
) -> None:
    launched = launch("-np", "2", *wrapper, *program(SAVES))
    launched.lines(2)
    family = launched.remember_family()
    launched.signal(signum)
    code, out, err = launched.finish()
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:saved {int(signum)}" for rank in range(2)], err
    assert code == (128 + signum if signum == signal.SIGTERM else 0)
    assert "Traceback" not in err
    assert still_alive(family) == []


def _terminate(processes: list[psutil.Process]) -> None:
    """Those that were told first may have ended others meanwhile."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)


def test_elastic_ranks_leave_when_a_scheduler_signals_every_process_at_once(launch: Launch, program: Program) -> None:
    launched = launch("-np", "2", "--min-np", "1", *program(ELASTIC))
    launched.lines(2)
    family = launched.remember_family()
    _terminate([psutil.Process(launched.process.pid), *family])
    code, _, err = launched.finish()
    assert code == 128 + signal.SIGTERM
    # On a busy machine the launcher's own signal comes so late that it counts as a second one, or comes between worlds.
    ways = (
        f"{LEFT_THE_JOB} (it got SIGTERM), and ends with exit code 143.",
        "A second SIGTERM: this process ends at once",
        "SIGTERM: this process waits for the next world, and ends",
    )
    for rank in range(2):
        said = [line for line in err.splitlines() if line.startswith(f"[{rank}]<stderr>:")]
        assert any(way in line for line in said for way in ways), err
    assert still_alive(family) == []


def test_the_others_go_on_without_a_rank_whose_workers_got_the_signal_too(launch: Launch, program: Program) -> None:
    launched = launch("-np", "2", "--min-np", "1", "--reset-limit", "1", *program(ELASTIC))
    launched.lines(2)
    family = launched.remember_family()
    rank = next(one for one in family if one.parent() == psutil.Process(launched.process.pid) and one.children())
    _terminate([rank, *rank.children()])
    launched.lines(2)  # the other rank, and the process that takes its place
    launched.signal(signal.SIGTERM)
    _, _, err = launched.finish()
    assert tells(err, f"{LEFT_THE_JOB} (it got SIGTERM)")
    assert re.search(rf"exit code 143.*{REPLACED}", err)
