"""One rank as a process of its own, told what to do by JSON lines on its standard input (see processes.py).

Nothing but the engine and the data plane's handshake is in it; ids are agreed upon by giving "allreduce.t7" the id 7.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from horovod._core import OpSpec

sys.path.insert(0, str(Path(__file__).parents[1]))
from reductions import Op, digest, inputs, submit
from resources import held, leaks
from world import ALLREDUCE, DTYPES, hosts_of
from world import Member as EngineMember

from horovod import _core
from horovod.worker.runtime.host import Interface
from horovod.worker.runtime.mesh import Listeners, connect_peers
from horovod.worker.runtime.world import Endpoint, Member, World

SECRET = b"s" * 32
FORM_SECONDS = 60.0


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Process:
    def __init__(self) -> None:
        self.segment: Any = None
        self.listeners: Listeners | None = None
        self.engine: Any = None
        self.world: World
        self.sets: dict[int, list[int]] = {}  # the ranks of each process set
        self.options: dict[str, int] = {}
        self.files: list[str] = []  # of GPUs
        self.drain = threading.Thread()
        self.handle: Any = None  # of begin()
        self.array: np.ndarray

    # -- a world ---------------------------------------------------------------------------------------------------
    def offer(self, transport: str, options: dict[str, int]) -> None:
        """How peers reach this process in the next world, or the next process set."""
        self.options = options
        self.segment = None if transport == "tcp" else _core.Segment(options=options)
        self.listeners = None if transport == "shm" else Listeners([Interface("lo", ("127.0.0.1",))])
        endpoints = self.listeners.endpoints if self.listeners else []
        say(segment=self.segment.address if self.segment else "", endpoints=[[e.address, e.port] for e in endpoints])

    def form(self, rank: int, epoch: int, offers: list[dict[str, Any]], files: list[str]) -> None:
        self.files = files
        self.world = self._world_of("job", rank, epoch, offers)
        self.sets = {0: list(range(len(offers)))}
        hosts = hosts_of(len(offers)) if self.segment and self.listeners else []
        sockets = self._connect(self.world, hosts)
        self.engine = _core.Engine(
            rank=rank,
            size=len(offers),
            epoch=epoch,
            labels=[self.world.label(r) for r in range(len(offers))],
            segment=self.segment,
            segment_addresses=[o["segment"] for o in offers] if self.segment else (),
            sockets=sockets,
            hosts=hosts,
            options=self.options,
            **({"cuda_file": files[0], "nccl_file": files[1]} if files else {}),
        )
        self.segment = None
        self.drain = threading.Thread(target=self._agree, args=(self.engine,))
        self.drain.start()
        say(formed=epoch)

    @staticmethod
    def _world_of(job: str, rank: int, epoch: int, offers: list[dict[str, Any]]) -> World:
        members = tuple(
            Member(
                r, r, len(offers), 0, 1, f"m{r}", "here", "", o["pid"],
                tuple(Endpoint(a, p, "lo") for a, p in o["endpoints"]), o["segment"],
            )
            for r, o in enumerate(offers)
        )  # fmt: skip
        return World(job, epoch, rank, members, SECRET)

    def _connect(self, world: World, hosts: list[int]) -> dict[int, list[int]]:
        if self.listeners is None:
            return {}
        partners = _core.partners(world.rank, world.size, hosts=hosts, options=self.options)
        deadline = time.monotonic() + FORM_SECONDS
        sockets = connect_peers(world, self.listeners, connections=2, deadline=deadline, partners=partners)
        self.listeners.close()
        self.listeners = None
        return sockets

    def form_set(self, number: int, ranks: list[int], offers: list[dict[str, Any]]) -> None:
        """Registers a process set of `ranks`, whose members have offered; this process need not be one."""
        sockets: dict[int, list[int]] = {}
        addresses: list[str] = []
        if self.world.rank in ranks:
            place = ranks.index(self.world.rank)
            world = self._world_of(f"job, set {number}", place, self.world.epoch, offers)
            sockets = {ranks[peer]: fds for peer, fds in self._connect(world, []).items()}
            addresses = [o["segment"] for o in offers] if self.segment else []
        self.engine.add_process_set(number, ranks, segment=self.segment, segment_addresses=addresses, sockets=sockets)
        self.segment = None
        self.sets[number] = ranks
        say(formed=number)

    @staticmethod
    def _agree(engine: Any) -> None:
        while (items := engine.next_outbox(1000)) is not None:
            for kind, op in items:
                if kind == "announce":
                    engine.apply_plan(op[7], op[0], int(op[0].rsplit(".t", 1)[1]))

    def close(self) -> None:
        self.engine.close()
        self.drain.join()
        self.engine = None
        say(closed=True)

    # -- operations ------------------------------------------------------------------------------------------------
    def submit(self, array: np.ndarray, number: int, wait_follows: bool = True, process_set: int = 0) -> _core.Handle:
        pointer = array.ctypes.data
        tensor = (pointer, pointer, DTYPES["float32"], array.shape)
        name = f"allreduce.t{number}"
        return self.engine.submit(OpSpec(ALLREDUCE, process_set=process_set), name, [tensor], wait_follows=wait_follows)

    def total(self, process_set: int = 0) -> float:
        """What comes out where each rank brings its number plus one."""
        return float(sum(rank + 1 for rank in self.sets[process_set]))

    def loop(self, elements: int, steps: int, report: bool = False, process_set: int = 0) -> None:
        """Checked allreduces, until something fails or all steps are done."""
        expected = self.total(process_set)
        step = 0
        try:
            for step in range(steps):
                array = np.full(elements, self.world.rank + 1, np.float32)
                self.submit(array, 0, process_set=process_set).result()
                if not (array == expected).all():
                    say(wrong=step)
                    return
                if report:
                    say(step=step)
        except RuntimeError as error:
            say(error=str(error), step=step)
            return
        say(done=steps)

    def reduce(self, ops: list[dict[str, Any]], seed: int, turns: int, stops: list[tuple[int, int]]) -> None:
        """Runs all operations at once, `turns` times, and says the digests of what comes out.

        stops: where this process stops itself, see _stop.
        """
        member = EngineMember(self.engine, self.world.rank, self.world.size)
        reductions = [Op.from_json(op) for op in ops]
        mine = [inputs(op, self.world.rank, seed) for op in reductions]
        stopper = threading.Thread(target=self._stop, args=(stops, self.engine.counters()["batches"]))
        stopper.start()
        for _ in range(turns):
            handles = [
                submit(member, op, [array.copy() for array in arrays])
                for op, arrays in zip(reductions, mine, strict=True)
            ]
            results = [member.wait(handle) for handle in handles]
            say(bits=[[digest(array) for array in (got if isinstance(got, list) else [got])] for got in results])
        stopper.join()

    def _stop(self, stops: list[tuple[int, int]], before: int) -> None:
        """Stops this process each time that so many batches more than `before` have begun, a few steps later."""
        for batches, steps in stops:
            while self.engine.counters()["batches"] < before + batches:
                os.sched_yield()
            for _ in range(steps):
                pass
            # Sent to this thread, which thus goes no step further; one sent to the process is taken by another first.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def gpu_loop(self, elements: int, steps: int, stop: bool = False, stand_still: bool = False) -> None:
        """The same on this rank's GPU, reading the result back each time.

        stop: this process, where NCCL is to be started. stand_still: the GPU, in the second step, which is queued.
        """
        from gpu_world import Gpu, StandIns

        libraries = StandIns(self.files)
        gpu = Gpu(libraries, self.world.rank)
        if stop:
            libraries.fail("ncclCommInitRankConfig", libraries.STOP)
        expected = float(sum(range(1, self.world.size + 1)))
        step = 0
        try:
            for step in range(steps):
                if stand_still and step == 1:
                    gpu.hold()
                array = gpu.array(np.full(elements, self.world.rank + 1, np.float32))
                tensor = (array.address, array.address, DTYPES["float32"], array.shape, self.world.rank, 0)
                name = f"allreduce.t{step % 8}"
                self.engine.submit(OpSpec(ALLREDUCE), name, [tensor], wait_follows=True).result()
                if stand_still and step == 1:
                    say(stands_still=True)
                if not (array.numpy() == expected).all():
                    self.engine.check()  # the stream went on because the epoch ended
                    say(wrong=step)
                    return
                say(step=step)
        except RuntimeError as error:
            say(error=str(error), step=step)
            return
        say(done=steps)

    def once(self, elements: int, end: str, process_set: int = 0) -> None:
        """One large operation; `end` ("stop" or "exit") ends this process as soon as the data phase has begun.

        An operation that has begun on one rank is agreed on by all, so the others are in it or about to be.
        """
        expected = self.total(process_set)
        # Kept: where the background thread runs the operation it goes on behind an interrupt.
        self.array = array = np.full(elements, self.world.rank + 1, np.float32)
        try:
            handle = self.submit(array, 0, wait_follows=not end, process_set=process_set)
            while end and self.engine.counters()["batches"] == 0:
                os.sched_yield()
            if end == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if end == "exit":
                os._exit(3)
            handle.result()
        except RuntimeError as error:
            say(error=str(error))
            return
        except KeyboardInterrupt:
            say(interrupted=True)
            return
        say(done=1, right=bool((array == expected).all()))

    def begin(self, elements: int, process_set: int) -> None:
        """Submits an operation and leaves it to the background thread; then come other commands and finish()."""
        self.array = np.full(elements, self.world.rank + 1, np.float32)
        self.handle = self.submit(self.array, 0, wait_follows=False, process_set=process_set)

    def look(self) -> None:
        say(over=self.handle.done())

    def finish(self, process_set: int) -> None:
        try:
            self.handle.result()
        except RuntimeError as error:
            say(error=str(error))
            return
        say(done=1, right=bool((self.array == self.total(process_set)).all()))

    def measure(self, warm_up: int, steps: int, elements: int) -> None:
        """What this process holds before and after `steps` operations."""
        array = np.zeros(elements, np.float32)
        before: dict[str, int] = {}
        try:
            for step in range(warm_up + steps):
                if step == warm_up:
                    before = held()
                if step % 1000 == 0:
                    say(step=step)  # alive: on a machine with much else to do a step takes a hundred times as long
                self.submit(array, step % 8).result()
        except RuntimeError as error:
            say(error=str(error))
            return
        say(leaked=leaks(before))

    def run(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            getattr(self, request.pop("do"))(**request)


if __name__ == "__main__":
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
    Process().run()
