"""The session of a training process with its coordinators: it joins, is a member (local_member.py), and leaves.

Until the world stands, anything that fails is tried again until the deadline, at each of the coordinators in turn,
unless waiting cannot help. Each attempt is a member of its own, because a member id is used only once.

The thread that calls `join` owns the coordinators until the world stands. From then on they are the member's, and its
lock guards them. A session has no lock of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from horovod.base.errors import WorldCode, coded, coded_like, without_code
from horovod.base.telemetry import tracing
from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.channel import resolve
from horovod.worker.runtime.coordinators import Connection, Coordinators
from horovod.worker.runtime.errors import JobDoneError, StartError, StateLostError
from horovod.worker.runtime.local_member import LEAVE_SECONDS, LocalMember
from horovod.worker.runtime.membership_stream import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, MembershipStreams
from horovod.worker.runtime.probe import probe
from horovod.worker.runtime.tls import ClientTls
from horovod.worker.runtime.world import OnWorldChange, World, ignore_changes

log = logging.getLogger(__name__)

PROBE_SECONDS = 2.0


@dataclass(frozen=True)
class _NoWorld:
    """How an attempt ended. is_final: another attempt would end alike, at this coordinator at least."""

    reason: str
    is_final: bool


class Session:
    """`join` first; then the `member` serves; at last `close`. A session is not used twice."""

    def __init__(
        self,
        address: str,
        token: str | None = None,
        *,
        tls: ClientTls | None = None,
        keepalive_timeout_seconds: float = 20.0,
        reattach_grace_seconds: float = 10.0,
        relay: str = "",
        on_change: OnWorldChange = ignore_changes,
    ) -> None:
        self.coordinators = Coordinators(address, token, tls, keepalive_timeout_seconds, relay)
        self.streams = MembershipStreams(self.coordinators)
        self._grace_seconds = reattach_grace_seconds
        self._on_change = on_change
        self._attempt: LocalMember | None = None  # the latest
        self._progress: tuple[str, str] | None = None  # (what a coordinator waited for, its address)

    @property
    def address(self) -> str:
        """Of the coordinator that is spoken to, or was last."""
        return self.streams.address

    @property
    def member(self) -> LocalMember:
        """That of the world; before it stands, the latest attempt."""
        assert self._attempt is not None
        return self._attempt

    def join(self, make_request: Callable[[], membership_pb2.JoinRequest], deadline: float) -> World:
        """Waits for the world; StartError with a sentence when it does not stand by `deadline` (time.monotonic()).

        JobDoneError when an elastic job is done without this process. The time in which this process is parked does not
        count: a world runs, and will take it in. `make_request` is called for each attempt.
        """
        started = time.monotonic()
        patience = deadline - started
        delay = FIRST_RETRY_SECONDS
        warned = False
        reasons: dict[str, str] = {}  # coordinator -> its latest reason
        # Coordinator -> why it will never take this process; another one may know its token.
        refusals: dict[str, str] = {}
        while True:
            outcome = self._try(make_request(), deadline, started)
            if isinstance(outcome, World):
                return outcome
            if self.member.was_parked:
                deadline = time.monotonic() + patience
            redirect = self.member.redirect
            if redirect and self.coordinators.lead(redirect):
                continue
            reason, final = outcome.reason, outcome.is_final
            if final and not self.member.heard:
                refusals[self.address] = reason
                final = all(address in refusals for address in self.coordinators.addresses)
                reason = _together(refusals, reason) if final else reason
            if self.member.is_done:
                raise JobDoneError(reason)
            if self.member.is_state_lost:
                raise StateLostError(reason)
            if final:
                raise StartError(reason)
            reasons[self.address] = reason
            waits = self.coordinators.turn()
            left = deadline - time.monotonic()
            if left <= (delay if waits else 0.0):
                told = without_code(_together(reasons, reason))
                raise StartError(coded_like(reason, f"{told} Gave up after {time.monotonic() - started:.0f} s."))
            if not waits:
                continue
            if not warned:
                log.warning("%s Trying for another %.0f s.", without_code(reason), left)
                warned = True
            time.sleep(delay)
            delay = min(2 * delay, LAST_RETRY_SECONDS)

    def _try(self, request: membership_pb2.JoinRequest, deadline: float, started: float) -> World | _NoWorld:
        """One attempt. StartError where the deadline has come while the coordinator waits for others."""
        connection = self.coordinators.current
        metadata = (*connection.metadata(), *tracing.headers())
        self._attempt = None  # an attempt that can't begin has no stream that close() could end
        attempt = LocalMember(self.streams, request, self._grace_seconds, self._on_change)
        attempt.start(metadata)
        self._attempt = attempt
        with attempt.changed:
            patience = deadline - time.monotonic()
            while not attempt.changed.wait_for(attempt.is_decided, max(0.0, deadline - time.monotonic())):
                if not attempt.parked:
                    break
                attempt.changed.wait_for(lambda: attempt.is_decided() or not attempt.parked)
                deadline = time.monotonic() + patience
            self._progress = attempt.progress or self._progress
            if attempt.world is not None:
                connection.credential.confirm()
                self.coordinators.reached()
                world = World.from_message(attempt.world, request.member_id)
                self.streams.addresses = resolve(connection.host, connection.port)
                return world
            ended, why = attempt.ended, _NoWorld(attempt.reason, attempt.final)
        if why.is_final and not connection.credential.is_outdated():
            return why
        if not attempt.heard and (found := _probe(connection, deadline, why.reason, ended)) is not None:
            return found
        if not ended:
            raise StartError(self._too_late(request, time.monotonic() - started))
        return _NoWorld(why.reason, is_final=False)

    def _too_late(self, request: membership_pb2.JoinRequest, seconds: float) -> str:
        sentence, at = self._progress or ("", self.address)
        state = without_code(sentence).strip().rstrip(".") or "it did not say what it waits for"
        survives = request.HasField("sizes") and request.HasField("rejoin")  # a member of an elastic job's last world
        variable = "HOROVOD_ELASTIC_TIMEOUT" if survives else "HOROVOD_START_TIMEOUT"
        return coded(
            WorldCode.INCOMPLETE_WORLD,
            f"The world of job {request.job!r} was not complete after {seconds:.0f} s; the coordinator at "
            f"{at} says: {state}. Start the missing processes with the same job, size and coordinator, or "
            f"give them more time with {variable}.",
        )

    def close(self, reason: str = "", *, returns: bool = False, failed: bool = False, stays: bool = False) -> bool:
        """Leaves in order when there is a world to leave, and ends the channel. Idempotent; never raises.

        returns: this process joins again at once. failed: its program has ended with an error. stays: the stream stays
        open until `let_go` where that shows the coordinator that this process lives; whether it does is returned.
        """
        if self._attempt is not None and self._attempt.close(reason, returns=returns, failed=failed, stays=stays):
            return True
        self.let_go()
        return False

    def let_go(self) -> None:
        """Ends the channel, after `close`. Idempotent; never raises."""
        if self._attempt is None:
            self.coordinators.close()
        else:
            self._attempt.let_go()
        self.streams.grpc_threads.join(LEAVE_SECONDS)


def _together(reasons: Mapping[str, str], latest: str) -> str:
    """Those of all coordinators, each once, with the code of the latest one."""
    return coded_like(latest, " ".join(dict.fromkeys(map(without_code, reasons.values()))))


def _probe(connection: Connection, deadline: float, reason: str, ended: bool) -> _NoWorld | None:
    """What is at the address of a coordinator that has said nothing; None where that explains nothing."""
    seconds = min(PROBE_SECONDS, max(0.2, deadline - time.monotonic()))
    finding = probe(connection.host, connection.port, seconds, connection.tls)
    if ended or not finding.speaks_grpc:
        return _NoWorld(finding.sentence(connection.address), finding.hopeless)
    return _NoWorld(reason, is_final=True) if finding.hopeless else None
