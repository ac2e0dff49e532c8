"""Ranks that are processes, so that they can be killed and stopped: the parent's side of member_process.py.

Every wait for an answer has a deadline; what a rank says is in a queue that a thread fills.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 60.0


class RankProcess:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("member_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def next(self) -> dict[str, Any] | None:
        """What the process says next; None when it has ended. Fails when nothing comes for long."""
        try:
            return self._said.get(timeout=DEADLINE_SECONDS)
        except queue.Empty:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self.process.send_signal(signal.SIGABRT)  # faulthandler tells on stderr where its threads are
                self.process.wait(10)
            raise AssertionError(f"pid {self.pid} has said nothing for {DEADLINE_SECONDS:.0f} s") from None

    def answer(self, *keys: str) -> Any:
        """The first value under one of `keys`; other lines are skipped."""
        while (said := self.next()) is not None:
            for key in keys:
                if key in said:
                    return said[key]
            assert "step" in said, said
        raise AssertionError(f"pid {self.pid} ended with {self.process.wait()} instead of saying {keys}")

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


class Processes:
    """Context manager: keeps the processes of a test and ends them."""

    def __init__(self) -> None:
        self._all: list[RankProcess] = []
        self._epoch = 0

    def start(self, count: int) -> list[RankProcess]:
        made = [RankProcess() for _ in range(count)]
        self._all += made
        return made

    def form(self, ranks: Sequence[RankProcess], transport: str, files: Sequence[str] = (), **options: int) -> None:
        """A new world of these processes, in this order; `files`: the libraries of GPUs."""
        self._epoch += 1
        offers = self._offers(ranks, transport, options)
        for number, rank in enumerate(ranks):
            rank.tell("form", rank=number, epoch=self._epoch, offers=offers, files=list(files))
        for rank in ranks:
            assert rank.answer("formed") == self._epoch

    def add_set(
        self, number: int, ranks: Sequence[RankProcess], members: Sequence[int], transport: str, **options: int
    ) -> None:
        """Registers a process set of `members` (ascending) in the world of `ranks`."""
        offers = self._offers([ranks[member] for member in members], transport, options)
        for rank in ranks:
            rank.tell("form_set", number=number, ranks=list(members), offers=offers)
        for rank in ranks:
            assert rank.answer("formed") == number

    @staticmethod
    def _offers(ranks: Sequence[RankProcess], transport: str, options: dict[str, int]) -> list[dict[str, Any]]:
        for rank in ranks:
            rank.tell("offer", transport=transport, options=options)
        offers = []
        for rank in ranks:
            said = rank.next()
            assert said is not None, f"pid {rank.pid} ended with {rank.process.wait()}"
            offers.append({"pid": rank.pid, **said})
        return offers

    def close(self, ranks: Sequence[RankProcess]) -> None:
        for rank in ranks:
            rank.tell("close")
        for rank in ranks:
            assert rank.answer("closed")

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._all:
            rank.end()
