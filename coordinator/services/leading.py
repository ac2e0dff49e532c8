"""Which coordinator of a store serves agents and submitted jobs: one at a time, the holder of a key under a lease.

The others send agents and clients on to it. A leader that can't keep its lease stops serving before another one can
begin: it counts its lease as lost somewhat earlier than the store does. Who serves the world of a job (serving.py) need
not stop, and has no lease on its key: messages to members have a term, by which they know whom to believe, and those to
agents have none.

A leader may reach the store and be out of the agents' reach. Agents and clients that could not connect to it say so to
the next coordinator that they ask, and that one takes the key (`complaint`). What the former leader decides meanwhile
can't be written (`guard`). Where each of two coordinators is reached by a part of the agents only, they would take the
key from each other as fast as agents can ask. So a leader is replaced in this way a lease after it began at the
earliest, and one that still has agents of its own after TURN_S: both parts are then served by turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection

from google.protobuf.message import DecodeError

from horovod.base.errors import ClusterCode, code_of, coded, without_code
from horovod.coordinator.store import Entry, Guard, LeaseLostError, Store, StoreError
from horovod.coordinator.store.base import MISSING
from horovod.coordinator.store.holding import holds, take
from horovod.protos.v1 import membership_pb2

from .peers import Peers

LEADER = "cluster/leader"
LEASE_S = 4.0
RETRY_S = 0.3
ANOTHER = coded(
    ClusterCode.NOT_SERVED_HERE,
    "Another coordinator of this store serves agents and jobs, or did until a moment ago.",
)
TURN_S = 15.0
COMPLAINT_S = 10.0  # for so long after its report an agent does not count as connected to the leader

_log = logging.getLogger(__name__)


class Leading:
    """`run` for as long as this coordinator lives. `address`, for others, is to be set before."""

    def __init__(
        self,
        store: Store,
        begin: Callable[[], Awaitable[None]],
        end: Callable[[str], None],
        lease_s: float = LEASE_S,
        peers: Peers | None = None,
        turn_s: float = TURN_S,
    ) -> None:
        """begin: called when this coordinator leads from now on; end: with the sentence why it does no longer."""
        self.leads = False
        self.why_not = ANOTHER  # the sentence for those who come while this coordinator does not lead
        # Every write of the leader names this guard, so a leader that was replaced without knowing it writes nothing.
        self.guard: Guard | None = None
        self.address = ""
        self._store = store
        self._begin = begin
        self._end = end
        self._lease_s = lease_s
        self._turn_s = turn_s
        self._peers = peers or Peers()
        self._name = secrets.token_hex(8)
        self._lease: int | None = None
        self._is_beginning = True
        self._told = ""  # the last warning in the log, which is not repeated while it stays the same
        self._leader = membership_pb2.Serving()  # the leader's record as last read from the store; empty: no leader
        self._attempts = asyncio.Lock()
        self._complained: dict[str, float] = {}  # agent -> when it reported that it can't connect to the leader
        self._revision: int | None = None  # the revision of the record when it was last read; None: not read yet
        self._leads_since_s = 0.0  # when the record was last seen to have changed; 0: never since the first read

    @property
    def leader(self) -> str:
        """The leader's address, if another coordinator leads and its address is known; else ""."""
        return "" if self.leads or self._leader.replica == self._name else self._leader.address

    async def attempt(self, instead_of: str = "") -> None:
        """Makes this coordinator the leader, if no other coordinator leads.

        May be called before `run`, or beside it when its next attempt would be too late.

        instead_of: the address of a leader that is replaced all the same.
        """
        async with self._attempts:
            try:
                if not self.leads and await self._take(instead_of):
                    await self._begin()
                    self.leads = True
                    _log.info("This coordinator serves agents and jobs.")
                self._told = ""
                self.why_not = ANOTHER
            except (StoreError, asyncio.TimeoutError) as error:
                reason = without_code(error) or "the store does not answer."
                sentence = f"No coordinator can begin to serve agents and jobs: {reason}"
                self.why_not = coded(code_of(error) or ClusterCode.STORE_FAILED, sentence)
                if self.why_not != self._told:
                    self._told = self.why_not
                    _log.warning("%s", self.why_not)

    async def complaint(self, unreachable: Collection[str], agent: str = "") -> None:
        """Takes note that a process, which may be an agent, can't connect to these addresses.

        If the leader's address is among them, this coordinator may lead in its place. Returns when that is decided.
        """
        now = asyncio.get_running_loop().time()
        self._complained = {name: at_s for name, at_s in self._complained.items() if now - at_s < COMPLAINT_S}
        leader = self.leader
        if not leader or leader not in unreachable or leader == self.address:
            return
        if agent:
            self._complained[agent] = now
        since_s = self._leads_since_s
        if now - since_s < self._lease_s:
            return
        others = await self._peers.connected_agents(leader) - self._complained.keys()
        if (others and now - since_s < self._turn_s) or self._leads_since_s != since_s:
            return
        _log.warning(
            "%s can't connect to %s, which serves agents and jobs; this coordinator takes its place.",
            f"The agent of {agent}" if agent else "A client",
            leader,
        )
        await self.attempt(instead_of=leader)

    async def run(self) -> None:
        while True:
            if self.leads:
                await self._keep()
                self.lose()
            await asyncio.sleep(RETRY_S)
            await self.attempt()

    def lose(self) -> None:
        """This coordinator leads no more: its lease is lost, or a write was refused because another one leads."""
        if self.leads:
            self.leads = False
            sentence = "Another coordinator serves agents and jobs from now on."
            self._end(coded(ClusterCode.NOT_SERVED_HERE, sentence))

    async def resign(self) -> None:
        """Gives the lease up, so that another coordinator may lead at once."""
        self.leads = False
        if self._lease is not None:
            with contextlib.suppress(StoreError, asyncio.TimeoutError):
                await asyncio.wait_for(self._store.revoke(self._lease), 1.0)

    async def _take(self, instead_of: str) -> bool:
        current = await self._store.get(LEADER)
        self._saw(_parsed(current), current.revision if current is not None else MISSING)
        # In a store for one coordinator at a time, an earlier leader is dead, whatever its lease says.
        is_dead, self._is_beginning = self._is_beginning and not self._store.is_shared, False
        held = current is not None and self._leader.replica != self._name
        if held and not is_dead and not (instead_of and self._leader.address == instead_of):
            return False
        self._lease = await self._store.grant(self._lease_s)
        own = membership_pb2.Serving(replica=self._name, address=self.address)
        self.guard = await take(self._store, LEADER, own, current, self._lease)
        if self.guard is None:
            self._leader = membership_pb2.Serving()  # the next attempt reads who leads
            return False
        self._saw(own, self.guard.revision)
        return True

    def _saw(self, leader: membership_pb2.Serving, revision: int) -> None:
        self._leader = leader
        if self._revision not in (None, revision):
            self._leads_since_s = asyncio.get_running_loop().time()
        self._revision = revision

    async def _keep(self) -> None:
        """Keeps the lease alive; returns when it is lost."""
        assert self._lease is not None
        loop = asyncio.get_running_loop()
        kept_at_s = loop.time()
        is_late = False
        while self.leads and not is_late:
            began_s = loop.time()
            left_s = kept_at_s + self._lease_s * 0.75 - began_s
            # Without time left this process has been stopped, or got no processor. One attempt more tells whether that
            # was too long; meanwhile what it decides can't be written if another one leads (`guard`).
            is_late = left_s <= 0
            with contextlib.suppress(StoreError, asyncio.TimeoutError):  # tried again, as long as there is time
                try:
                    still_leads = await asyncio.wait_for(self._prolong(self._lease), max(left_s, self._lease_s / 10))
                except LeaseLostError:
                    return
                if not still_leads:
                    return
                kept_at_s, is_late = began_s, False
            if not is_late:
                await asyncio.sleep(self._lease_s / 10)

    async def _prolong(self, lease: int) -> bool:
        """False when the key was written or deleted by another client, although the lease lives."""
        await self._store.keep_alive(lease)
        return self.guard is not None and await holds(self._store, self.guard)


def _parsed(entry: Entry | None) -> membership_pb2.Serving:
    """The leader's record. Without an address if another version of this program wrote it."""
    try:
        return membership_pb2.Serving.FromString(entry.value if entry is not None else b"")
    except DecodeError:
        return membership_pb2.Serving()
