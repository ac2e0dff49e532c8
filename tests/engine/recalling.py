"""A world of engines whose ids run out: the coordinator's own decisions, with as many ids as a test wants."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from world import EngineWorld

from horovod.coordinator.core.agreement.ids import MAX_IDS, USUAL_IDS
from horovod.coordinator.core.agreement.negotiation import Negotiation
from horovod.protos.v1 import negotiation_pb2 as pb
from horovod.worker.runtime.negotiator import to_message


class Coordinator:
    """Takes the place of world.Negotiator: a thread for each engine's outbox, and one that decides and answers."""

    def __init__(self, engines: list[Any], id_capacity: int, usual_ids: int) -> None:
        self._engines = engines
        self._negotiation = Negotiation(1, len(engines), id_capacity, usual_ids=usual_ids)
        self._messages: queue.SimpleQueue[tuple[int, list[Any]] | None] = queue.SimpleQueue()
        self.recalls = 0
        self.warnings: list[str] = []
        self._drains = [threading.Thread(target=self._drain, args=(rank,)) for rank in range(len(engines))]
        self._decides = threading.Thread(target=self._decide)
        for thread in (*self._drains, self._decides):
            thread.start()

    def _drain(self, rank: int) -> None:
        while (items := self._engines[rank].next_outbox(1000)) is not None:
            if items:
                self._messages.put((rank, items))

    def _decide(self) -> None:
        while (received := self._messages.get()) is not None:
            rank, items = received
            message = pb.NegotiationMessage(epoch=1)
            for kind, payload in items:
                if kind == "announce":
                    message.announce.append(to_message(payload))
                elif kind == "recalled":
                    message.recalled.add(process_set=payload[0], ids=payload[1])
            for ranks, decisions in self._negotiation.receive(rank, message, time.monotonic()):
                self.recalls += len(decisions.recalls)
                self.warnings += decisions.warnings
                for engine in (self._engines[each] for each in ranks):
                    for plan in decisions.plans:
                        engine.apply_plan(plan.process_set, plan.name, plan.id)
                    errors = [(error.process_set, error.name, error.sentence) for error in decisions.errors]
                    engine.apply_failures(errors, [(recall.process_set, recall.ids) for recall in decisions.recalls])

    def join(self) -> None:
        for thread in self._drains:
            thread.join()
        self._messages.put(None)
        self._decides.join()


class RecallingWorld(EngineWorld):
    def __init__(self, size: int, transport: str, id_capacity: int = MAX_IDS, usual_ids: int = USUAL_IDS) -> None:
        self._capacity, self._usual = id_capacity, usual_ids
        super().__init__(size, transport)

    def _negotiator(self) -> Any:
        return Coordinator(self.engines, self._capacity, self._usual)
