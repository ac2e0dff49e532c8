"""`horovod.run` with ranks on other hosts: an agent on each (launch.py) starts the ranks.

The function and the results travel over the coordinator that this process opens (coordinator/services/exchange.py).
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.base.errors import LaunchCode, code_of, coded
from horovod.base.settings import resolve
from horovod.coordinator.services.exchange import Exchange
from horovod.launch import task
from horovod.launch.cluster.client import exported
from horovod.launch.cluster.submission import user_name
from horovod.launch.elastic.request import Replacement, Supply, elastic_variables, write_policy
from horovod.launch.hosts.agents import RemoteShell, shown_name, working_directory
from horovod.launch.hosts.launch import run_on_hosts
from horovod.protos.v1 import jobs_pb2
from horovod.rendezvous.hosts import HostSlots, remote
from horovod.worker.agent.output import Console

# This Python, or whatever is called python3 on a host that has none of this name.
_FIND_PYTHON = 'command -v "$0" > /dev/null 2>&1 && exec "$0" "$@"; exec python3 "$@"'


@dataclass(frozen=True)
class Elastic:
    """How a job goes on whose size changes. processes: how many it begins with. supply: what finds its hosts."""

    processes: int
    replacement: Replacement
    supply: Supply | None = None


class FunctionOnHosts:
    """One call. `run` waits for its end, in a thread that may have an event loop; `results` says what came of it."""

    def __init__(
        self,
        call: tuple[Any, tuple[Any, ...], dict[str, Any]],
        names: Sequence[str],
        python: str | None,
        elastic: Elastic | None = None,
    ) -> None:
        """names: the host of every rank that there may be; of none where hosts are found. python: the interpreter
        there; None: the one that runs now. elastic: None for a job of a fixed size that ends with its first failure.
        """
        self._elastic = elastic
        self._exchange = Exchange(task.packed(*call), replaced=elastic is not None)
        self._hosts = [HostSlots(name, list(names).count(name)) for name in dict.fromkeys(names)]
        self._names = [shown_name(name) for name in names]
        self._python = python
        self._record = jobs_pb2.JobRecord()

    def run(
        self,
        environ: Mapping[str, str],
        shell: RemoteShell,
        console: Console,
        on_start: Callable[[Any], None],
        note: Callable[[str], None] | None,
    ) -> None:
        """RuntimeError with a line for each host that could not be used."""
        if remote(self._names):
            shell.check()
        rank = ["-c", task.PROGRAM, task.BY_COORDINATOR]
        command = [self._python, *rank] if self._python else ["sh", "-c", _FIND_PYTHON, sys.executable, *rank]
        spec = jobs_pb2.JobSpec(
            name="horovod.run",
            command=command,
            environment=exported(environ),
            directory=working_directory(),
            processes=self._elastic.processes if self._elastic else len(self._names),
            user=user_name(),
            attended=True,
        )
        supply = None
        if self._elastic is not None:
            write_policy(spec, self._elastic.replacement, environ)
            spec.environment.update(elastic_variables(self._elastic.replacement))
            supply = self._elastic.supply
        for host in self._hosts:
            spec.hosts.add(name=shown_name(host.name), slots=host.slots)
        settings, python = resolve(environ), self._python or sys.executable
        self._record = run_on_hosts(
            spec,
            self._hosts,
            settings,
            environ,
            shell,
            python,
            console,
            on_start,
            note=note,
            exchange=self._exchange,
            supply=supply,
        )

    def results(self) -> list[Any]:
        """The results by rank, of an elastic job those of the last world; RuntimeError with the failure that came
        first.
        """
        arrived = {rank: task.Result(*pickle.loads(content)) for rank, content in self._exchange.results.items()}  # noqa: S301
        if self._elastic is not None:
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
