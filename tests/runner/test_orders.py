"""An order means the same to the processes of an agent and to those of a shim, which gets it as a line of JSON."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping

import pytest

from horovod.protos.v1 import agents_pb2 as pb
from horovod.worker.agent.orders import ends_job, obey, order_of, signalled


class Recorded:
    """Processes that write down what they are told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def end_after_failure(self) -> None:
        self.told.append("end")

    def finish(self) -> None:
        self.told.append("finish")

    def leave(self, ranks: Mapping[int, int], grace_s: float) -> None:
        self.told.append((dict(ranks), grace_s))

    def stop(self, signum: int) -> None:
        self.told.append(("stop", signum))

    def forward(self, signum: int) -> None:
        self.told.append(("forward", signum))


@pytest.mark.parametrize("by_shim", [False, True])
@pytest.mark.parametrize(
    ("command", "told", "ends"),
    [
        (pb.AgentCommand(end=pb.EndShare(job="j")), ["end"], True),
        (pb.AgentCommand(finish=pb.FinishShare(job="j")), ["finish"], False),
        (
            pb.AgentCommand(leave=pb.LeaveSlots(job="j", ranks=[3, 10], incarnations=[1, 2], grace_seconds=7.5)),
            [({3: 1, 10: 2}, 7.5)],
            False,
        ),
        (
            pb.AgentCommand(signal=pb.SignalShare(job="j", signal=signal.SIGKILL, stop=True)),
            [("stop", signal.SIGKILL)],
            True,
        ),
        (pb.AgentCommand(signal=pb.SignalShare(job="j", signal=10)), [("forward", 10)], False),
        (pb.AgentCommand(run_line=pb.RunLine(job="j", line=2)), [], False),
    ],
)
def test_orders(command: pb.AgentCommand, told: list[object], ends: bool, by_shim: bool) -> None:
    found = order_of(command)
    assert found is not None
    job, order = found
    order = json.loads(json.dumps(order)) if by_shim else order
    processes = Recorded()
    obey(order, processes)
    assert (job, processes.told, ends_job(order)) == ("j", told, ends)


def test_other_commands_are_no_orders() -> None:
    assert order_of(pb.AgentCommand(start=pb.StartShare(job="j"))) is None
    assert order_of(pb.AgentCommand(read=pb.ReadLog(job="j"))) is None


def test_a_signal_ends_a_job_only_where_that_is_said() -> None:
    processes = Recorded()
    obey(signalled(signal.SIGCONT), processes)
    obey(signalled(signal.SIGINT, stop=True), processes)
    assert processes.told == [("forward", signal.SIGCONT), ("stop", signal.SIGINT)]
