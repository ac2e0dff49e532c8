"""Training that a test disturbs: three ranks that take steps of several kinds, and tell how long the longest one took.

The state that they end with depends on the steps alone. So a run without any disturbance that repeats the same kinds of
steps must end with the same bits.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from runtime_harness import Program

RANKS = 3
STEADY, NEW_NAMES, JOINS, PROCESS_SETS, END = range(5)
NAMES = ("steady state", "new names", "join", "process sets")

SCRIPT = """
import hashlib, json, select
STEADY, NEW_NAMES, JOINS, PROCESS_SETS, END = range(5)
hvd.init()
context = current()
rank = context.world.rank
replay = json.loads(os.environ["REPLAY"])

def reduce(name, values, number=0):
    data = array("f", values)
    pointer = data.buffer_info()[0]
    spec = OpSpec(0, process_set=number)
    context.engine.submit(spec, "allreduce." + name, [(pointer, pointer, 7, (len(data),))]).result()
    return data

def wanted(kind):
    "What rank 0 wants next."
    global told_at
    if replay is not None:
        if not replay[0][1]:
            replay.pop(0)
        replay[0][1] -= 1
        return replay[0][0]
    if select.select([sys.stdin], [], [], 0)[0]:
        kind, told_at = int(sys.stdin.readline()), step
    return kind

state, digest = array("f", [0.0] * 64), hashlib.sha256()
step, kind, told_at, longest, kinds = 0, STEADY, None, 0.0, []
print("ready", flush=True)
while True:
    gradient = [((index + 3) * (rank + 1) * (step + 1) % 101) / 7 for index in range(63)]
    gradient.append(float(wanted(kind)) if rank == 0 else 0.0)
    began = time.monotonic()
    total = reduce("gradient", gradient)
    kind = int(total[-1])
    if kind == END:
        break
    state = array("f", [0.9 * old + new for old, new in zip(state, total)])
    if kind == NEW_NAMES:
        state[0] += reduce(f"new.{step}", [float(step * rank % 13)])[0]
    elif kind == JOINS:
        for number in range(rank):
            reduce(f"tail.{number}", [1.0])
        context.engine.join()
    elif kind == PROCESS_SETS:
        number = context.process_sets.add([[0, 1]])[0]
        if rank < 2:
            engine_number = context.process_sets.number(number, (0, 1)) or context.process_sets.number(number, [0, 1])
            reduce("in_a_set", [float(step % 5)], engine_number)
        context.process_sets.remove(number)
    longest = max(longest, time.monotonic() - began)
    digest.update(state.tobytes())
    step += 1
    if not kinds or kinds[-1][0] != kind:
        kinds.append([kind, 0])
    kinds[-1][1] += 1
    if rank == 0 and told_at is not None and step - told_at >= 4:
        print(json.dumps([kind, longest]), flush=True)
        told_at, longest = None, 0.0
    if replay is None:
        time.sleep(0.02)
print(json.dumps([kinds, digest.hexdigest()]), flush=True)
hvd.shutdown()
"""


class Training:
    """`with Training(coordinators) as training:`; ended by `end`."""

    def __init__(
        self, coordinators: str | Sequence[str], replay: list[list[int]] | None = None, **environment: str
    ) -> None:
        """coordinators: what every rank is told, or each. replay: kinds of steps, and how many of each."""
        self._addresses = [coordinators] * RANKS if isinstance(coordinators, str) else list(coordinators)
        self._environment = {"HOROVOD_SIZE": str(RANKS), "REPLAY": json.dumps(replay), **environment}
        self._stack = ExitStack()
        self.programs: list[Program] = []

    def __enter__(self) -> Training:
        for rank, address in enumerate(self._addresses):
            own = {"HOROVOD_RANK": str(rank), "HOROVOD_COORDINATOR": address, **self._environment}
            self.programs.append(self._stack.enter_context(Program(SCRIPT, **own)))
        for program in self.programs:
            assert program.line() == "ready", program.process.communicate()
        return self

    def works(self, kind: int) -> float:
        """Some steps of this kind are done; the seconds that the longest step took since the last call."""
        self.tell(kind)
        return self.answer(kind)

    def tell(self, kind: int) -> None:
        stdin = self.programs[0].process.stdin
        assert stdin is not None
        stdin.write(f"{kind}\n")
        stdin.flush()

    def answer(self, kind: int) -> float:
        line = self.programs[0].line()
        assert line, self.programs[0].process.communicate()
        found, longest = json.loads(line)
        assert found == kind
        return float(longest)

    def end(self) -> tuple[list[list[int]], str]:
        """What steps there were, and what came out."""
        if self._environment["REPLAY"] == "null":
            self.tell(END)
        found = [json.loads(program.finish(150.0)) for program in self.programs]
        assert all(one == found[0] for one in found), "ranks ended with different states"
        return found[0][0], found[0][1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


def pass_seconds(seconds: float) -> None:
    """For faults that last; nothing is waited for."""
    threading.Event().wait(seconds)


def undisturbed(coordinators: str, kinds: list[list[int]], job: str) -> str:
    """What comes out of the same steps when nothing happens."""
    replay = [*[list(one) for one in kinds], [END, 1]]
    with Training(coordinators, replay, HOROVOD_JOB=job) as training:
        return training.end()[1]
