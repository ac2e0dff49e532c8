"""What a scheduler orders about the processes of a job on one host, after they were told to start; and who obeys.

An agent gets orders as messages (AgentCommand), and hands them to the shim of the job as lines of JSON (shim.py). Where
the processes are the agent's own, it obeys at once. What an order means is written here alone.

    {"end": true}                         a rank has failed: the others get a short grace, and are stopped
    {"finish": true}                      a rank has ended well: no process is started any more
    {"leave": {"3": 1}, "grace_s": 60}    these ranks are to end, if their processes have these incarnations
    {"signal": 15, "stop": true}          the job is to end, by this signal and stronger ones; without stop: pass it on
    {"run_line": 1}                       all workers have finished the line before this one; for the shim alone
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:  # a shim does without protobuf
    from horovod.protos.v1 import agents_pb2 as pb

Order = Mapping[str, Any]

END: Final = {"end": True}
FINISH: Final = {"finish": True}


def signalled(signum: int, *, stop: bool = False) -> dict[str, Any]:
    """The order to pass this signal on; stop: to end the job, by this signal first."""
    return {"signal": signum, "stop": stop}


class Processes(Protocol):
    """Those of one job on one host: a Supervisor, or what stands for one. Each call may be repeated."""

    def end_after_failure(self) -> None: ...
    def finish(self) -> None: ...
    def leave(self, ranks: Mapping[int, int], grace_s: float) -> None: ...  # by rank: the incarnation that is meant
    def stop(self, signum: int) -> None: ...  # each further call makes the end come sooner; SIGKILL: at once
    def forward(self, signum: int) -> None: ...


def order_of(command: pb.AgentCommand) -> tuple[str, Order] | None:
    """The job and the order of this command; None where it is another kind of command."""
    kind = command.WhichOneof("command")
    if kind == "end":
        return command.end.job, END
    if kind == "finish":
        return command.finish.job, FINISH
    if kind == "leave":
        leave = command.leave
        incarnations = dict(zip(leave.ranks, leave.incarnations, strict=True))
        return leave.job, {"leave": incarnations, "grace_s": leave.grace_seconds}
    if kind == "signal":
        return command.signal.job, signalled(command.signal.signal, stop=command.signal.stop)
    if kind == "run_line":
        return command.run_line.job, {"run_line": command.run_line.line}
    return None


def ends_job(order: Order) -> bool:
    """Whether nothing of the job is to begin on this host after it."""
    return "end" in order or bool(order.get("stop"))


def obey(order: Order, processes: Processes) -> None:
    """Has the processes do what the order says. One that is for the shim alone changes nothing."""
    if "signal" in order:
        (processes.stop if order.get("stop") else processes.forward)(int(order["signal"]))
    elif "end" in order:
        processes.end_after_failure()
    elif "leave" in order:
        ranks = {int(rank): int(incarnation) for rank, incarnation in order["leave"].items()}
        processes.leave(ranks, float(order["grace_s"]))
    elif "finish" in order:
        processes.finish()
