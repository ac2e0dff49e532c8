"""The coordinators that a session may turn to, and the connection to the one that it speaks to.

Several coordinators of one store stand for each other (docs/adr/0032-replicas.md): any of them says who serves the job,
or serves it itself. So a session tries them in turn, and follows where it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from horovod.base.protocol import KEEPALIVE_S
from horovod.base.setting import split_address, split_addresses
from horovod.protos.v1 import membership_pb2_grpc
from horovod.worker.runtime.channel import open_channel
from horovod.worker.runtime.probe import answers, headers
from horovod.worker.runtime.tls import ClientTls
from horovod.worker.runtime.token import Credential

# Where another coordinator can take over, one that does not answer is left soon: to be wrong costs one more connection.
IMPATIENT_SECONDS = 1.0
IMPATIENT_PING_SECONDS = 0.5
MAX_LEADS = 4  # how often in a row a session is sent on without waiting in between


def pings(addresses: int, keepalive_timeout_seconds: float) -> tuple[float, float]:
    """How long a ping may take and the time between two, for a client that may turn to so many addresses."""
    if addresses > 1:
        return min(keepalive_timeout_seconds, IMPATIENT_SECONDS), IMPATIENT_PING_SECONDS
    return keepalive_timeout_seconds, KEEPALIVE_S


@dataclass
class Connection:
    address: str
    channel: grpc.Channel
    credential: Credential
    tls: ClientTls | None
    relayed: tuple[tuple[str, str], ...] = ()  # metadata that tells the relay with each call; empty: there is no relay
    host: str = field(init=False)
    port: int = field(init=False)
    stub: membership_pb2_grpc.MembershipStub = field(init=False)

    def __post_init__(self) -> None:
        self.host, self.port = split_address(self.address, "coordinator")
        self.stub = membership_pb2_grpc.MembershipStub(self.channel)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For one attempt to join or attach. StartError when another user's process listens on the address."""
        return (*self.credential.metadata(), *self.relayed)


class Coordinators:
    """Used by one thread at a time."""

    def __init__(
        self,
        addresses: str,
        token: str | None,
        tls: ClientTls | None,
        keepalive_timeout_seconds: float,
        relay: str = "",
    ) -> None:
        """addresses: host:port, or several with commas between them. ValueError when one is none.
        relay: the socket of the agent that has started this process (probe.py).
        """
        self.relay = relay
        self.addresses = split_addresses(addresses, "coordinator")
        self._token = token
        self._tls = tls
        self._keepalive_timeout_seconds = keepalive_timeout_seconds
        self._place = 0
        self._leads = 0
        self._is_led = False  # a coordinator has sent the session to the current one, which has not answered yet
        self.unreachable = ""  # the one that this process was sent to in vain; the next one that is asked is to know
        self.current = self._connect(self.addresses[0])

    def are_several(self) -> bool:
        return len(self.addresses) > 1

    def turn(self) -> bool:
        """To the next one. True when all have had their turn, so that it is time to wait."""
        self._leads = 0
        if self.current.relayed and not answers(self.relay):
            self._replace(self.current.address)  # the relay is gone, not the coordinator
            return False
        if self._is_led:
            self.unreachable, self._is_led = self.current.address, False
        if not self.are_several() and self.current.address == self.addresses[0]:
            return True
        self._place = (self._place + 1) % len(self.addresses)
        self._replace(self.addresses[self._place])
        return self._place == 0

    def lead(self, address: str) -> bool:
        """To the one that serves the job. False when that is none, or it was so too often in a row."""
        self._leads += 1
        try:
            split_address(address, "coordinator")
        except ValueError:
            return False
        if self._leads > MAX_LEADS:
            return False
        if address in self.addresses:
            self._place = self.addresses.index(address)
        self._replace(address)
        self._is_led = True
        return True

    def answered(self) -> None:
        """The current one can be reached."""
        self._is_led = False

    def reached(self) -> None:
        """The current one serves the job."""
        self._leads = 0
        self.unreachable = ""

    def close(self) -> None:
        self.current.channel.close()

    def _replace(self, address: str) -> None:
        self.current.channel.close()
        self.current = self._connect(address)

    def _connect(self, address: str) -> Connection:
        timeout_seconds, ping_seconds = pings(len(self.addresses), self._keepalive_timeout_seconds)
        relay = self.relay if self.relay and answers(self.relay) else ""
        channel = open_channel(address, self._tls, timeout_seconds, ping_seconds, relay)
        relayed = headers(address, timeout_seconds, ping_seconds) if relay else ()
        return Connection(address, channel, Credential(address, self._token, self._tls is not None), self._tls, relayed)


# The search for the coordinator that serves agents and jobs, of which a store has one (docs/adr/0044-one-leader.md).
#
# A client asks the coordinators that it was given in turn. One that does not serve says which one does, and the client
# goes there. A client that can't connect to that one goes back and says so: the one that it asks then may take its
# place. Agents and launchers search in the same way.
#
# A session searches otherwise, as `Coordinators` does: what a member can't reach loses its job at once
# (docs/adr/0124-two-searches.md).

UNREACHABLE = "horovod-unreachable"  # in a call's metadata: coordinators that this client could not connect to just now
LEADER = "horovod-leader"  # in the trailing metadata of a refusal: the address of who serves; empty where not known


def leader_in(trailing: Any) -> str | None:
    """Who serves, as a call's trailing metadata has it; None where no coordinator has refused the call for that."""
    found = dict(tuple(trailing or ())).get(LEADER)  # dict() of grpcio's own type failed up to version 1.75 at least
    return None if found is None else str(found)


class Search:
    """`address` is to be asked; after each attempt `turn`."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)  # the addresses that this client was given
        self.address = self.addresses[0]
        self._place = 0  # among them
        self._leads = 0
        self._unreachable: set[str] = set()  # addresses to which the last attempt to connect failed

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What the next call is to say."""
        others = ",".join(sorted(self._unreachable - {self.address}))
        return ((UNREACHABLE, others),) if others else ()

    def served(self) -> None:
        """The current one serves this client."""
        self._unreachable.discard(self.address)
        self._leads = 0

    def turn(self, has_answered: bool, leader: str = "") -> bool:
        """To the next one, or to `leader`. True when all have had their turn, so that it is time to wait.

        has_answered: a coordinator was there, though it did not serve.
        """
        (self._unreachable.discard if has_answered else self._unreachable.add)(self.address)
        if self._leads < MAX_LEADS and leader not in (self.address, *self._unreachable) and _is_address(leader):
            self.address = leader
            self._leads += 1
            return False
        if self._leads and not has_answered:  # the coordinator that sent this client there is to know
            self.address, self._leads = self.addresses[self._place], 0
            return False
        self._place = (self._place + 1) % len(self.addresses)
        self.address, self._leads = self.addresses[self._place], 0
        if self._place == 0:
            self._unreachable &= set(self.addresses)  # others are tried again when this client is sent there
        return self._place == 0


def _is_address(text: str) -> bool:
    try:
        split_address(text, "coordinator")
    except ValueError:
        return False
    return True
