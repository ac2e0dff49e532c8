"""`horovod.run` with ranks on other hosts: an agent on each (launch.py) starts the ranks.

The function and the results travel over the coordinator that this process opens (coordinator/services/exchange.py).
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from horovod.base.errors import LaunchCode, code_of, coded
from horovod.base.settings import resolve
from horovod.coordinator.services.exchange import Exchange
from horovod.launch import task
from horovod.launch.asked import AskedFunction, InThread, Stoppable
from horovod.launch.cluster.client import exported
from horovod.launch.cluster.submission import user_name
from horovod.launch.elastic.request import elastic_variables, write_policy
from horovod.launch.hosts.agents import RemoteShell, shown_name, working_directory
from horovod.launch.hosts.launch import run_on_hosts
from horovod.protos.v1 import jobs_pb2
from horovod.rendezvous.hosts import HostSlots, remote
from horovod.worker.agent.output import Console

# This Python, or whatever is called python3 on a host that has none of this name.
_FIND_PYTHON = 'command -v "$0" > /dev/null 2>&1 && exec "$0" "$@"; exec python3 "$@"'


class FunctionOnHosts:
    """One call. `run` it once."""

    def __init__(self, asked: AskedFunction, shell: RemoteShell) -> None:
        self._asked = asked
        self._shell = shell
        self._exchange = Exchange(task.packed(*asked.call), replaced=asked.replacement is not None)
        self._hosts = [HostSlots(name, list(asked.names).count(name)) for name in dict.fromkeys(asked.names)]
        self._names = [shown_name(name) for name in asked.names]
        self._record = jobs_pb2.JobRecord()

    def run(self, in_thread: InThread) -> list[Any]:
        """The results by rank. RuntimeError with a line for each host that could not be used, or with the failure that
        came first.
        """
        in_thread(self._run)
        return self._results()

    def _run(self, console: Console, on_start: Callable[[Stoppable], None]) -> None:
        asked = self._asked
        if remote(self._names):
            self._shell.check()
        rank = ["-c", task.PROGRAM, task.BY_COORDINATOR]
        command = [asked.python, *rank] if asked.python else ["sh", "-c", _FIND_PYTHON, sys.executable, *rank]
        spec = jobs_pb2.JobSpec(
            name="horovod.run",
            command=command,
            environment=exported(asked.environ),
            directory=working_directory(),
            processes=asked.processes if asked.replacement is not None else len(self._names),
            user=user_name(),
            attended=True,
        )
        if asked.replacement is not None:
            write_policy(spec, asked.replacement, asked.environ)
            spec.environment.update(elastic_variables(asked.replacement))
        for host in self._hosts:
            spec.hosts.add(name=shown_name(host.name), slots=host.slots)
        self._record = run_on_hosts(
            spec,
            self._hosts,
            resolve(asked.environ),
            asked.environ,
            self._shell,
            asked.python or sys.executable,
            console,
            on_start,
            note=console.note if asked.verbose else None,
            exchange=self._exchange,
            supply=asked.supply,
        )

    def _results(self) -> list[Any]:
        """Of an elastic job those of the last world."""
        arrived = {rank: task.Result(*pickle.loads(content)) for rank, content in self._exchange.results.items()}  # noqa: S301
        if self._asked.replacement is not None:
            return self._of_last_world(arrived)
        if self._record.state != jobs_pb2.JOB_STATE_SUCCEEDED:
            # The clocks of hosts differ, so the first of the exceptions is the one that arrived first.
            raised = next((rank for rank, result in arrived.items() if result.error is not None), None)
            if raised is None or _was_killed(self._record):
                sentence = self._record.sentence or "The job was ended."
                raise RuntimeError(coded(code_of(sentence) or LaunchCode.RANK_FAILED, sentence))
            raise RuntimeError(task.raised(raised, self._names[raised], arrived[raised]))
        if silent := [rank for rank in range(len(self._names)) if rank not in arrived]:
            raise RuntimeError(task.no_result(silent[0], self._names[silent[0]]))
        return [task.value_of(rank, arrived[rank]) for rank in range(len(self._names))]

    def _of_last_world(self, arrived: Mapping[int, task.Result]) -> list[Any]:
        """arrived: by slot, in the order of arrival."""
        if self._record.state != jobs_pb2.JOB_STATE_SUCCEEDED:
            sentence = self._record.sentence or "The job was ended."
            why = coded(code_of(sentence) or LaunchCode.RANK_FAILED, sentence)
            last = next((result for result in reversed([*arrived.values()]) if result.error is not None), None)
            if last is not None:
                why = f"{why}\n\nThe last exception of a rank:\n{last.traceback}[{code_of(why)}]"
            raise RuntimeError(why)
        return task.of_last_world(arrived)


def _was_killed(record: jobs_pb2.JobRecord) -> bool:
    """A rank was ended by a signal that the launcher did not send, or is lost: the others raised because of it."""
    return any((one.code < 0 and not one.stopped) or one.lost for one in record.outcomes)
