"""Subsets of the world that run operations of their own: how all ranks agree on one, connect it, and take it away.

Adding and removing are collectives of the whole world, over its own data plane:

    exchange   every rank says which sets it means, and where its own part of them can be reached
    judge      all ranks look at the same answers, so all come to the same result
    connect    members map each other's segments or connect sockets; the coordinator is told
    settle     every rank says whether that worked; if it did not for one of them, all undo it

A set has two numbers. Its id is public: the smallest that is free, used again after a removal. The engine and the
coordinator know it by a number that never comes back in an epoch, so nothing that is under way can be taken for
something of a later set.

`form` makes a set by its members alone, whatever the other ranks do. They exchange their words over a channel that the
caller has, and sign them, as it may be one on which others can write. Such sets have no id, and numbers of their own.

The sets that a world begins with (`initial_sets`) have the same ids in all worlds of a job, as traced functions of
TensorFlow keep them. In a world that has grown smaller, some of these ids may stand for no set.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hmac
import itertools
import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from horovod.base.errors import EngineCode, WorldCode, code_of, coded
from horovod.base.settings import Settings
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.offers import choose_hierarchy, engine_options, make_listeners
from horovod.worker.runtime.world import Endpoint, World

if TYPE_CHECKING:
    from horovod._core import Engine, Segment
    from horovod.worker.runtime.mesh import Listeners
    from horovod.worker.runtime.negotiator import Negotiator

log = logging.getLogger(__name__)

GLOBAL: Final = 0  # id and number of the set of all ranks

# Numbers of sets that their members form alone are above this one, and each is the next of the rank that chose it.
_FIRST_OF_MEMBERS: Final = 1 << 20
_LENGTH: Final = struct.Struct("<Q")
_SIGNATURE_BYTES: Final = 32  # of HMAC-SHA256
_WIRE_NAME: Final = "horovod.process_sets"
_ADVICE: Final = (
    "Call hvd.add_process_set() and hvd.remove_process_set() with the same ranks and in the same order on every rank."
)
_SAME_VERSION: Final = "Start all ranks with the same version of Horovod."


@dataclass(frozen=True)
class _Entry:
    number: int
    ranks: list[int]


class ProcessSets:
    """The process sets of one world. Thread-safe, but all ranks must add and remove sets in the same order."""

    def __init__(self, settings: Settings, world: World, engine: Engine, negotiator: Negotiator | None) -> None:
        self._settings = settings
        self._world = world
        self._engine = engine
        self._negotiator = negotiator
        self._by_id = {GLOBAL: _Entry(GLOBAL, list(range(world.size)))}
        self._next_number = 1
        self._formed = itertools.count()  # how many numbers this rank has chosen for `form`
        self.initial: list[InitialSet] = []
        self._one_at_a_time = threading.Lock()

    def number(self, set_id: int | None, ranks: Sequence[int] | None) -> int | None:
        """The engine's number of a set; None when there is none of this id with these ranks."""
        entry = self._by_id.get(set_id) if set_id is not None else None
        return entry.number if entry is not None and entry.ranks == ranks else None

    def begin_with(self, asked: Sequence[Sequence[int]]) -> None:
        """Forms the sets of a new world, as `initial` tells them then. Raises what `add` does."""
        self.initial = initial_sets(asked, self._world.size)
        ranks_by_id = {one.set_id: one.ranks for one in self.initial if one.set_id is not None}
        if self._world.rank == 0 and (differences := differences_of(asked, self.initial)):
            log.info("Process sets in this world of %d ranks: %s.", self._world.size, "; ".join(differences))
        if ranks_by_id:
            self.add(list(ranks_by_id.values()), list(ranks_by_id))

    # -- the two collectives -----------------------------------------------------------------------------------------
    def add(self, sets: Sequence[Sequence[int]], with_ids: Sequence[int] = ()) -> list[int]:
        """Forms sets of these (ascending) ranks and returns their ids. All ranks of the world call it with the same.

        with_ids: free ids for the sets, instead of the smallest ones.

        ValueError, on every rank, when the ranks do not agree, a set makes no sense or exists already, or cannot be
        connected. The internal error when the epoch ends meanwhile.
        """
        with self._one_at_a_time, contextlib.ExitStack() as made:
            parts: list[_Part] = []
            trouble = ""
            if not (problem := problem_of(sets, self._world.size, [entry.ranks for entry in self._by_id.values()])):
                try:
                    for ranks in sets:
                        parts.append(made.enter_context(self._part(list(ranks))))
                except Exception as error:
                    trouble = str(error)
            offers = [part.offer for part in parts]
            said = self._exchange({"do": "adds", "sets": list(map(list, sets)), "offers": offers, "trouble": trouble})
            self._judge(said)
            if problem:
                raise ValueError(problem)
            self._raise_trouble(dict(enumerate(said)))
            if any(len(answer["offers"]) != len(sets) for answer in said):
                raise _other_version("A rank offers another number of process sets than it adds.")
            numbers = list(range(self._next_number, self._next_number + len(sets)))
            self._next_number += len(sets)
            done = False
            try:
                try:
                    for index, (part, number) in enumerate(zip(parts, numbers, strict=True)):
                        of_this = {rank: answer["offers"][index] for rank, answer in enumerate(said)}
                        self._connect(part, number, of_this)
                except Exception as error:
                    trouble = str(error)
                self._raise_trouble(dict(enumerate(self._exchange({"trouble": trouble}))))
                done = True
            finally:
                if not done:
                    for number in numbers:
                        self._forget(number)
            kept = {set_id for set_id, one in enumerate(self.initial, 1) if one.set_id is None}  # for a later world
            free = (one for one in itertools.count(1) if one not in self._by_id and one not in kept)
            ids = []
            for part, number, set_id in zip(parts, numbers, with_ids or free, strict=False):
                self._by_id[set_id] = _Entry(number, part.ranks)
                ids.append(set_id)
            return ids

    def remove(self, set_id: int, unawaited: Callable[[int], int] = lambda _: 0) -> None:
        """Takes a set away. All ranks of the world call it with the same.

        unawaited: how many operations run in the set of this number that may fail because nobody waits for them.

        ValueError, on every rank, when the ranks do not agree or operations still run in the set.
        """
        with self._one_at_a_time:
            entry = self._by_id[set_id]
            pending = max(0, self._engine.pending(entry.number) - unawaited(entry.number))
            said = self._exchange({"do": "removes", "sets": [entry.ranks], "pending": pending})
            self._judge(said)
            busy = [f"rank {rank} has {answer['pending']}" for rank, answer in enumerate(said) if answer["pending"]]
            if busy:
                raise ValueError(
                    coded(
                        WorldCode.PROCESS_SET_IN_USE,
                        f"The process set of ranks {entry.ranks} cannot be removed while operations run in it: "
                        f"{_joined(busy)}. Synchronize their handles on all ranks first.",
                    )
                )
            del self._by_id[set_id]
            self._forget(entry.number)

    # -- by the members alone ----------------------------------------------------------------------------------------
    def form(self, name: str, ranks: Sequence[int], exchange: Callable[[str, bytes], Sequence[bytes]]) -> int:
        """Forms a set of these (ascending) ranks, all of which call it, and returns its number in the engine.

        name: the same on all members, and of no other set of this world.
        exchange: takes the name of a step and what this rank says in it, and returns what all members say, in the order
        of `ranks`.

        StartError, on every member, when one of them can't connect. What `exchange` raises. The internal error when the
        epoch ends meanwhile.
        """
        ranks = list(ranks)
        with contextlib.ExitStack() as made:
            part, trouble = _Part(ranks), ""
            try:
                part = made.enter_context(self._part(ranks))
            except Exception as error:
                trouble = str(error)
            number = -1
            if self._world.rank == ranks[0]:
                number = _FIRST_OF_MEMBERS + next(self._formed) * self._world.size + ranks[0]
            say = functools.partial(self._tell_members, name, ranks, exchange)
            said = say("offer", {"sets": [ranks], "offers": [part.offer], "trouble": trouble, "pending": number})
            if any(answer["sets"] != [ranks] for answer in said.values()):
                raise StartError(coded(WorldCode.PROCESS_SETS_DISAGREE, f"Members do not agree that they are {ranks}."))
            self._raise_trouble(said)
            number = int(said[ranks[0]]["pending"])
            done = False
            try:
                try:
                    self._connect(part, number, {rank: answer["offers"][0] for rank, answer in said.items()})
                except Exception as error:
                    trouble = str(error)
                self._raise_trouble(say("settle", {"trouble": trouble}))
                done = True
            finally:
                if not done:
                    self._forget(number)
            return number

    def dissolve(self, number: int) -> None:
        """Takes this rank out of a set that `form` made; operations that still run in it fail."""
        try:
            self._engine.check()
        except Exception:  # the epoch is over, and the other members are to hear why, not that the set is gone
            self._engine.remove_process_set(number)
        else:
            self._forget(number)

    def _tell_members(
        self,
        name: str,
        ranks: list[int],
        exchange: Callable[[str, bytes], Sequence[bytes]],
        step: str,
        saying: dict[str, Any],
    ) -> dict[int, dict[str, Any]]:
        """What every member says, by rank."""
        payload = json.dumps(saying).encode()
        words = exchange(step, self._signed(name, step, self._world.rank, payload))
        payloads = b""
        for rank, word in zip(ranks, words, strict=True):
            said = word[_SIGNATURE_BYTES:]
            if not hmac.compare_digest(word, self._signed(name, step, rank, said)):
                raise _other_version(
                    f"A message about a process set in the name of {self._world.label(rank)} does not carry its "
                    "signature."
                )
            payloads += _LENGTH.pack(len(said)) + said
        return dict(zip(ranks, read_answers(memoryview(payloads), len(ranks), saying.keys()), strict=True))

    def _signed(self, name: str, step: str, rank: int, payload: bytes) -> bytes:
        """With a key that the ranks of this world alone know."""
        what = json.dumps(["process set", name, step, rank]).encode()
        return hmac.digest(self._world.secret, what + payload, "sha256") + payload

    # -- exchange and judge --------------------------------------------------------------------------------------------
    def _exchange(self, saying: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says, in rank order."""
        payload = json.dumps(saying).encode()
        from horovod._core import DType, OpSpec, OpType

        framed = bytearray(_LENGTH.pack(len(payload)) + payload)
        address = ctypes.addressof(ctypes.c_char.from_buffer(framed))
        tensor = (address, 0, DType.UINT8, (len(framed),))
        outputs = self._engine.run(OpSpec(OpType.ALLGATHER), _WIRE_NAME, [tensor], framed)
        assert isinstance(outputs, list)
        return read_answers(memoryview(outputs[0]), self._world.size, saying.keys())

    def _judge(self, said: list[dict[str, Any]]) -> None:
        who: dict[str, list[int]] = {}
        for rank, answer in enumerate(said):
            what = f"{answer['do']} {_joined([str(ranks) for ranks in answer['sets']])}"
            who.setdefault(what, []).append(rank)
        if len(who) > 1:
            told = "; ".join(f"{_ranks(ranks)} {what}" for what, ranks in who.items())
            sentence = f"The ranks do not agree on their process sets: {told}. {_ADVICE}"
            raise ValueError(coded(WorldCode.PROCESS_SETS_DISAGREE, sentence))

    def _raise_trouble(self, said: Mapping[int, dict[str, Any]]) -> None:
        """said: by rank."""
        for rank, answer in said.items():
            if trouble := answer["trouble"]:
                raise StartError(
                    coded(
                        code_of(trouble) or EngineCode.INTERNAL,
                        f"A process set cannot be formed, because it failed on {self._world.label(rank)}: {trouble}",
                    )
                )

    # -- connect -------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _part(self, ranks: list[int]) -> Iterator[_Part]:
        """What this rank contributes to a set; the listeners last as long as the context."""
        part = _Part(ranks)
        if self._world.rank in ranks and len(ranks) > 1:
            subset = self._world.subset(ranks)
            # All members know the same of each other, so they choose alike.
            together = self._settings.transport != "tcp" and subset.why_not_shared_memory() is None
            part.hosts = [] if together else choose_hierarchy(self._settings, subset)
            if together or (part.hosts and part.hosts.count(part.hosts[subset.rank]) > 1):
                from horovod._core import Segment

                part.segment = Segment(options=engine_options(self._settings))
                part.offer["segment"] = part.segment.address
            if not together:
                part.listeners = make_listeners(self._settings, optional=False)
                assert part.listeners is not None
                endpoints = [[one.address, one.port, one.interface] for one in part.listeners.endpoints]
                part.offer["endpoints"] = endpoints
        try:
            yield part
        finally:
            if part.listeners is not None:
                part.listeners.close()

    def _connect(self, part: _Part, number: int, offers: Mapping[int, dict[str, Any]]) -> None:
        """offers: of the members for this set, by rank."""
        ranks = part.ranks
        if self._negotiator is not None:
            self._negotiator.add_process_set(number, ranks)
        addresses = [offers[rank].get("segment", "") for rank in ranks] if part.segment is not None else []
        if part.listeners is not None:
            from horovod._core import partners
            from horovod.worker.runtime.mesh import connect_peers

            subset = self._world.subset(
                ranks,
                secret=hmac.digest(self._world.secret, f"horovod process set {number}".encode(), "sha256"),
                endpoints={rank: _endpoints(offers[rank]) for rank in ranks},
            )
            wire_keys: dict[int, bytes] = {}
            sockets = connect_peers(
                subset,
                part.listeners,
                connections=self._settings.connections_per_peer,
                deadline=time.monotonic() + self._settings.start_timeout_seconds,
                partners=partners(
                    subset.rank,
                    subset.size,
                    hosts=part.hosts,
                    placement=subset.placement(),
                    options=engine_options(self._settings),
                ),
                check=self._engine.check,
                wire_keys=wire_keys,
            )
            self._engine.add_process_set(
                number,
                ranks,
                segment=part.segment,
                segment_addresses=addresses,
                sockets={ranks[peer]: fds for peer, fds in sockets.items()},
                wire_keys=wire_keys,
                hosts=part.hosts,
            )
        else:
            self._engine.add_process_set(number, ranks, segment=part.segment, segment_addresses=addresses)

    def _forget(self, number: int) -> None:
        self._engine.remove_process_set(number)
        if self._negotiator is not None:
            self._negotiator.remove_process_set(number)


class _Part:
    """This rank's part of a set that is being formed; empty on ranks that need no connection."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.segment: Segment | None = None
        self.listeners: Listeners | None = None
        self.hosts: list[int] = []  # place -> host, equal for members that share memory although the set needs TCP
        self.offer: dict[str, Any] = {}


@dataclass(frozen=True)
class InitialSet:
    """A set that a world begins with: those of its ranks that the world has, and its id if they form a set there."""

    ranks: list[int]
    set_id: int | None


def initial_sets(asked: Sequence[Sequence[int]], size: int) -> list[InitialSet]:
    """What becomes of the sets that a job asks for in a world of `size`, which may have fewer ranks than they. Pure.

    A set consists of those of its ranks that the world has. They form no set of their own where none is left, where
    they are all ranks of the world, and where another set has the same; of such sets, the first that has all its ranks
    stays, or else the first. Ids follow from the order of `asked`: a set has the same id in each world that has it.
    """
    left = [[rank for rank in ranks if rank < size] for ranks in asked]
    seen: list[list[int]] = [[], list(range(size))]
    ids: dict[int, int] = {}
    complete_first = sorted(range(len(asked)), key=lambda place: len(left[place]) < len(asked[place]))
    for place in complete_first:
        if left[place] not in seen:
            seen.append(left[place])
            ids[place] = place + 1
    return [InitialSet(ranks, ids.get(place)) for place, ranks in enumerate(left)]


def differences_of(asked: Sequence[Sequence[int]], initial: Sequence[InitialSet]) -> list[str]:
    """In words, which sets are not as they were asked for."""
    words = []
    for ranks, one in zip(map(list, asked), initial, strict=True):
        if one.set_id is None:
            why = f"its ranks {one.ranks} are all there are or another set" if one.ranks else "it has none of them"
            words.append(f"{ranks} is not registered, because {why}")
        elif one.ranks != ranks:
            words.append(f"{ranks} has only {one.ranks}")
    return words


def problem_of(sets: Sequence[Sequence[int]], size: int, known: Sequence[Sequence[int]]) -> str:
    """Why these sets cannot be added to a world of `size` that has the sets `known`, or "". Pure."""
    seen = [list(ranks) for ranks in known]
    for ranks in map(list, sets):
        if not ranks:
            return coded(WorldCode.INVALID_PROCESS_SET, "A process set needs at least one rank, but it was given none.")
        if len(set(ranks)) != len(ranks):
            return coded(
                WorldCode.INVALID_PROCESS_SET, f"A process set has each rank once, but it was given the ranks {ranks}."
            )
        if min(ranks) < 0 or max(ranks) >= size:
            return coded(
                WorldCode.INVALID_PROCESS_SET,
                f"A process set was given the ranks {ranks}, but the ranks of this world are 0 to {size - 1}. "
                "Choose among those, or start more processes.",
            )
        if ranks in seen:
            which = "the global process set has" if len(ranks) == size else "another process set has"
            return coded(
                WorldCode.DUPLICATE_PROCESS_SET,
                f"Attempted to add a duplicate process set: {which} the same ranks {ranks} already.",
            )
        seen.append(ranks)
    return ""


def read_answers(everything: memoryview, size: int, expected: Collection[str]) -> list[dict[str, Any]]:
    """What each of `size` ranks said, in rank order, with the fields that it must have: JSON, its length before it.

    StartError when it is anything else. All ranks look at the same bytes, so all get the same answer. Pure.
    """
    answers: list[dict[str, Any]] = []
    while everything:
        said: object = None
        if len(everything) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(everything)
            text, everything = everything[_LENGTH.size :][:length], everything[_LENGTH.size :][length:]
            if len(text) == length:
                with contextlib.suppress(ValueError, RecursionError):
                    said = json.loads(bytes(text))
        if not isinstance(said, dict) or not _is_answer(said, expected):
            raise _other_version(
                f"The message about process sets of rank {len(answers)}, or of a lower rank, is invalid."
            )
        answers.append(said)
    if len(answers) != size:
        raise _other_version(f"{len(answers)} of {size} ranks spoke about process sets.")
    return answers


def _other_version(sentence: str) -> StartError:
    return StartError(coded(WorldCode.OTHER_VERSION, f"{sentence} {_SAME_VERSION}"))


def _is_answer(said: dict[str, Any], expected: Collection[str]) -> bool:
    """Of a rank that may add while another one removes: then `do` tells which, and the rest is not looked at."""
    if said.get("do", "") not in ("", "adds", "removes"):
        return False
    if "do" in expected and "do" in said:
        expected = ("sets", "offers", "trouble") if said["do"] == "adds" else ("sets", "pending")
    return all(name in said for name in expected) and (
        _is_list_of(said.get("sets", []), lambda ranks: _is_list_of(ranks, _is_number))
        and _is_list_of(said.get("offers", []), _is_offer)
        and isinstance(said.get("trouble", ""), str)
        and _is_number(said.get("pending", 0))
    )


def _is_offer(offer: object) -> bool:
    return (
        isinstance(offer, dict)
        and isinstance(offer.get("segment", ""), str)
        and _is_list_of(
            offer.get("endpoints", []),
            lambda one: (
                isinstance(one, list) and [type(part) for part in one] == [str, int, str] and Endpoint(*one).is_usable()
            ),
        )
    )


def _is_list_of(what: object, is_one: Callable[[object], bool]) -> bool:
    return isinstance(what, list) and all(map(is_one, what))


def _is_number(what: object) -> bool:
    return type(what) is int  # type() and not isinstance(), because True is an int


def _endpoints(offer: dict[str, Any]) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(*one) for one in offer.get("endpoints", []))


def _joined(items: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1] if items else "nothing"]))


def _ranks(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks[:16]] + ([f"{len(ranks) - 16} more"] if len(ranks) > 16 else [])
    return f"rank{'s' if len(ranks) > 1 else ''} {_joined(shown)}"
