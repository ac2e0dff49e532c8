"""The search for the coordinator that serves agents and jobs, of which a store has one (docs/adr/0044-one-leader.md).

A client asks the coordinators that it was given in turn. One that does not serve says which one does, and the client
goes there. A client that can't connect to that one goes back and says so: the one that it asks then may take its place.
Agents and launchers search in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.base.setting import split_address

UNREACHABLE = "horovod-unreachable"  # in a call's metadata: coordinators that this client could not connect to just now
LEADER = "horovod-leader"  # in the trailing metadata of a refusal: the address of who serves; empty where not known
MAX_LEADS = 4  # how often in a row a client goes to where it is sent, before it asks the next of its own addresses


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
