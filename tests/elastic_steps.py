"""An elastic training that writes down what it does, without a framework; committed_work.py reads it.

    python elastic_steps.py FOLDER JSON

FOLDER: where each process has a log of its own, and `events`, a FIFO to which it writes the same lines. JSON: how many
steps there are (`total`), after how many it commits (`every`), how long each takes (`step_s`), and how long a process
takes to begin and to end (`start_s`, `end_s`).

The test disturbs it by signals: SIGUSR1 makes a process raise an error in its next step, SIGUSR2 makes it crash after
its work is done. A file `FOLDER/fails-*` makes one replacement fail before hvd.init().
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from committed_work import weight

from horovod._core import OpSpec
from horovod.common import basics as hvd
from horovod.common.elastic import HostUpdateResult, State, run_fn
from horovod.worker.runtime.context import current


class Log:
    """What is written is in the kernel when write() returns, so it survives a SIGKILL of the process."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / f"{os.getpid()}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._events = os.open(folder / "events", os.O_WRONLY | os.O_NONBLOCK)

    def write(self, what: str, **facts: Any) -> None:
        record = {"at": time.monotonic_ns(), "who": os.getpid(), "what": what, **facts}
        line = (json.dumps(record) + "\n").encode()
        os.write(self._file, line)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the log is the truth; this only wakes the test up
            os.write(self._events, line)


def total(number: int) -> int:
    """The sum over all ranks."""
    data = array("f", [float(number)])
    pointer = data.buffer_info()[0]
    current().engine.submit(OpSpec(0), "allreduce.total", [(pointer, pointer, 7, (1,))]).result()
    return int(data[0])


def first_says(news: Any, root_rank: int = 0) -> Any:
    return bool(total(int(news[0] and hvd.rank() == 0))), HostUpdateResult.added


class Steps(State):
    """How many steps were taken, and what they have made of a value."""

    def __init__(self, log: Log) -> None:
        super().__init__(first_says, hvd.rank)
        self.log = log
        self.step = self.value = 0
        self._saved = 0, 0
        self._place: dict[str, int] = {}

    def save(self) -> None:
        self._saved = self.step, self.value
        self.say("saves")

    def restore(self) -> None:
        self.step, self.value = self._saved

    def sync(self) -> None:
        """As a state of the user's own: from rank 0."""
        mine = (0, 0) if hvd.rank() else (self.step, self.value)
        self.step, self.value = total(mine[0]), total(mine[1])
        self._saved = self.step, self.value
        self.say("begins")

    def say(self, what: str) -> None:
        if what != "returns":  # the world may have ended by then
            world = current().world
            self._place = {"world": world.epoch, "rank": world.rank, "size": world.size}
        self.log.write(what, **self._place, step=self.step, value=self.value)


def main(folder: Path, plan: dict[str, Any]) -> None:
    log = Log(folder)
    log.write("starts", incarnation=int(os.environ.get("HOROVOD_INCARNATION", "0")))
    told: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: told.append(number))
    if os.environ.get("HOROVOD_INCARNATION") != "1":
        for token in folder.glob("fails-*"):
            with contextlib.suppress(FileNotFoundError):  # another process has taken it
                token.unlink()
                log.write("fails", where="before hvd.init()")
                raise SystemExit(1)
    time.sleep(plan["start_s"])  # the imports of a framework

    def train(state: Steps) -> None:
        while state.step < plan["total"]:
            time.sleep(plan["step_s"])  # the computation of a step
            if signal.SIGUSR1 in told:
                log.write("fails", where="in a step")
                raise RuntimeError("an error of the script, as planned")
            number = weight(state.step + 1)
            state.value += total(number) // hvd.size()
            state.step += 1
            if state.step % plan["every"] == 0 or state.step == plan["total"]:
                state.commit()
            elif state.step % 3 == 0:
                state.check_host_updates()

    hvd.init()
    state = Steps(log)
    run_fn(train, hvd.join_again)(state)
    state.say("returns")
    time.sleep(plan["end_s"])
    if signal.SIGUSR2 in told:
        log.write("fails", where="after its work is done")
        os.kill(os.getpid(), signal.SIGSEGV)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
