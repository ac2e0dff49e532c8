"""Who of a world is gone, as the coordinator says, and what the engine and a start that still connects hear of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from horovod.base.errors import OperationCode, WorldCode, code_of, coded
from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.errors import FEWER_BATCHES, MemberLostError, WorldNeverStoodError

if TYPE_CHECKING:
    from horovod._core import Engine

# Why a member leaves a world that never stood. The code comes back with the news that it has left.
NOT_CONNECTED = coded(WorldCode.NOT_CONNECTED, "it could not connect to the other members")


class Departures:
    """Of one world. Has no lock: that of its LocalMember guards it. The engine is told by `tell`, without that lock."""

    def __init__(self) -> None:
        self.all: list[membership_pb2.MemberGone] = []  # goodbyes in the order in which they were heard of
        self._orderly: dict[int, bool] = {}  # by rank

    def hear(self, all_gone: Iterable[membership_pb2.MemberGone], epoch: int | None) -> list[membership_pb2.MemberGone]:
        """Those of this epoch that were not heard of before."""
        news = []
        for gone in all_gone:
            known = self._orderly.get(gone.rank)
            if gone.epoch != epoch or known in (False, gone.orderly):  # a loss is worse than a goodbye
                continue
            gone.sentence = _coded(gone)
            self._orderly[gone.rank] = gone.orderly
            news.append(gone)
        self.all += news
        return news

    def needed(self) -> str:
        """The sentence of one that a start still needs; "" while there is none.

        A member leaves in order only after all others are connected to it, unless it says NOT_CONNECTED.
        """
        for gone in self.all:
            if not gone.orderly or code_of(gone.sentence) is WorldCode.NOT_CONNECTED:
                return gone.sentence
        return ""

    def error(self, sentence: str) -> MemberLostError:
        """What ends the start with this sentence: where the world never stood, all may join again."""
        never_stood = any(gone.never_stood for gone in self.all)
        return WorldNeverStoodError(sentence) if never_stood else MemberLostError(sentence)


def _coded(gone: membership_pb2.MemberGone) -> str:
    """Why operations fail that need this rank."""
    sentence = gone.sentence or f"Rank {gone.rank} is gone, without a reason."
    usual = OperationCode.SHUT_DOWN if gone.orderly else OperationCode.PEER_LOST
    own = code_of(sentence)
    if gone.done and own is None:
        sentence = f"{sentence} {FEWER_BATCHES}"
    return coded(own or usual, sentence)


def tell(engine: Engine, gone: membership_pb2.MemberGone) -> None:
    with contextlib.suppress(Exception):  # the engine may be closing, and then it does not matter any more
        if gone.orderly:
            engine.peer_left(gone.rank, gone.sentence)
        else:
            engine.abort(gone.sentence)
