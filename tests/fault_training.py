"""Training that a test disturbs: ranks that take steps of several kinds, and tell how long the longest one took.

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
from stopped_jobs import UNSEEN

RANKS = 3
STEADY, NEW_NAMES, JOINS, PROCESS_SETS, END = range(5)
NAMES = ("steady state", "new names", "join", "process sets")

_HEAD = """
import hashlib, json, select
STEADY, NEW_NAMES, JOINS, PROCESS_SETS, END = range(5)
replay = json.loads(os.environ["REPLAY"])

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
"""

# Without a framework.
_PLAIN = """
hvd.init()
context = current()
rank = context.world.rank
state = array("f", [0.0] * 64)

def reduce(name, values, number=0):
    data = array("f", values)
    pointer = data.buffer_info()[0]
    spec = OpSpec(0, process_set=number)
    context.engine.submit(spec, "allreduce." + name, [(pointer, pointer, 7, (len(data),))]).result()
    return data

def train(wish):
    global state
    gradient = [((index + 3) * (rank + 1) * (step + 1) % 101) / 7 for index in range(63)]
    total = reduce("gradient", [*gradient, float(wish)])
    if int(total[-1]) != END:
        state = array("f", [0.9 * old + new for old, new in zip(state, total)])
    return int(total[-1])

def new_name():
    state[0] += reduce(f"new.{step}", [float(step * rank % 13)])[0]

def joins():
    for number in range(rank):
        reduce(f"tail.{number}", [1.0])
    context.engine.join()

def process_sets():
    number = context.process_sets.add([[0, 1]])[0]
    if rank < 2:
        engine_number = context.process_sets.number(number, (0, 1)) or context.process_sets.number(number, [0, 1])
        reduce("in_a_set", [float(step % 5)], engine_number)
    context.process_sets.remove(number)

def result():
    return state.tobytes()
"""

# The same with PyTorch.
_TORCH = """
import torch
import horovod.torch as hvd
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(3)
rank = hvd.rank()
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())

def train(wish):
    kind = int(hvd.allreduce(torch.tensor([wish]), op=hvd.Sum, name="kind"))
    if kind != END:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :4].sin()).square().mean().backward()
        optimizer.step()
    return kind

def new_name():
    with torch.no_grad():
        model[2].bias += hvd.allreduce(torch.full((4,), float(step * rank % 13)), name=f"new.{step}") / 1000

def joins():
    for number in range(rank):
        hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"tail.{number}")
    hvd.join()

def process_sets():
    chosen = hvd.add_process_set([0])
    if rank == 0:
        hvd.allreduce(torch.ones(1), name="in_a_set", process_set=chosen)
    hvd.remove_process_set(chosen)

def result():
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
"""

_LOOP = """
step, kind, told_at, longest, kinds, digest = 0, STEADY, None, [0.0] * END, [], hashlib.sha256()
print("ready", flush=True)
while True:
    wish = wanted(kind) if rank == 0 else 0
    began = time.monotonic()
    kind = train(wish)
    if kind == END:
        break
    if kind in (NEW_NAMES, JOINS, PROCESS_SETS):
        (new_name, joins, process_sets)[kind - 1]()
    longest[kind] = max(longest[kind], time.monotonic() - began)
    digest.update(result())
    step += 1
    if not kinds or kinds[-1][0] != kind:
        kinds.append([kind, 0])
    kinds[-1][1] += 1
    if rank == 0 and told_at is not None and step - told_at >= 4:
        print(json.dumps([kind, longest]), flush=True)
        told_at, longest = None, [0.0] * END
    if replay is None:
        time.sleep(0.02)
print(json.dumps([kinds, digest.hexdigest()]), flush=True)
hvd.shutdown()
"""

SCRIPT = _HEAD + _PLAIN + _LOOP
TORCH_SCRIPT = _HEAD + _TORCH + _LOOP


class Training:
    """`with Training(coordinators) as training:`; ended by `end`."""

    def __init__(
        self,
        coordinators: str | Sequence[str],
        replay: list[list[int]] | None = None,
        prefixes: Sequence[Sequence[str]] = ((),) * RANKS,
        script: str = SCRIPT,
        **environment: str,
    ) -> None:
        """coordinators: what every rank is told, or each. replay: kinds of steps, and how many of each.
        prefixes: of the ranks' commands, for namespaces, in which they are hosts of their own; there are as many ranks.
        """
        ranks = len(prefixes)
        self._addresses = [coordinators] * ranks if isinstance(coordinators, str) else list(coordinators)
        self.script = script
        self._environment = {
            "HOROVOD_SIZE": str(ranks),
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
            "REPLAY": json.dumps(replay),
            **environment,
        }
        self.prefixes = prefixes
        self._stack = ExitStack()
        self.programs: list[Program] = []
        self._longest = [0.0] * END  # seconds, by kind, that were not asked for yet

    def __enter__(self) -> Training:
        for rank, address in enumerate(self._addresses):
            prefix = self.prefixes[rank]
            own = {"HOROVOD_RANK": str(rank), "HOROVOD_COORDINATOR": address, **self._environment}
            if prefix:
                own |= {"HOROVOD_HOSTNAME": f"host-of-{rank}", "HOROVOD_TRANSPORT": "tcp"}
            script = UNSEEN + self.script if prefix else self.script
            self.programs.append(self._stack.enter_context(Program(script, prefix, **own)))
        for program in self.programs:
            assert program.line() == "ready", program.process.communicate()
        return self

    def works(self, kind: int) -> float:
        """Some steps of this kind are done; the seconds that the longest of them took since the last call for it."""
        self.tell(kind)
        return self.answer(kind)

    def tell(self, kind: int) -> None:
        self.programs[0].tell(str(kind))

    def answer(self, kind: int) -> float:
        line = self.programs[0].line()
        assert line, self.programs[0].process.communicate()
        found, longest = json.loads(line)
        assert found == kind
        # Those of other kinds, while the test did something else, are told when these are asked for.
        self._longest = [max(pair) for pair in zip(self._longest, longest, strict=True)]
        seconds, self._longest[kind] = self._longest[kind], 0.0
        return seconds

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


def undisturbed(
    coordinators: str,
    kinds: list[list[int]],
    job: str,
    prefixes: Sequence[Sequence[str]] = ((),) * RANKS,
    script: str = SCRIPT,
) -> str:
    """What comes out of the same steps when nothing happens."""
    replay = [*[list(one) for one in kinds], [END, 1]]
    with Training(coordinators, replay, prefixes, script, HOROVOD_JOB=job) as training:
        return training.end()[1]
