"""How the processes of a group of torch.distributed become a set of ranks of Horovod.

torch makes a group on its members alone, each with a key-value store that they share. The default
group is the whole world, which the processes form now unless they are in one. Another group is a set that its members
form by themselves (worker/runtime/process_sets.py); what they have to tell each other goes through the store.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from horovod.base.errors import WorldCode, coded
from horovod.base.settings import resolve
from horovod.common import basics
from horovod.rendezvous.clusters import Task
from horovod.rendezvous.join import known_as
from horovod.worker.runtime.context import current, is_member
from horovod.worker.runtime.world import World

_KEY: Final = "horovod"


@dataclass(frozen=True)
class Members:
    """The members of a group, in the order of the group."""

    name: str
    description: str  # for messages
    number: int  # of the set in the engine
    ranks: tuple[int, ...]  # of each member, in the world
    rank: int  # of this process, in the group
    is_world: bool  # whether it is the default group
    began_world: bool  # whether the world began for it, and is to end with it

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class _World:
    """What the default group has found: the rank in Horovod's world of each rank of torch's."""

    world: World
    ranks: tuple[int, ...]


# Written by the thread that makes the default group.
_known: _World | None = None
_began = False  # whether "horovod://" has called hvd.init() for the default group that comes next


def members_of(options: Any) -> Members:
    """Forms the set of a new group, on each of its members; options: a c10d _DistributedBackendOptions."""
    ranks = list(options.global_ranks_in_group)
    return _some(options, ranks) if ranks else _default(options)


def _default(options: Any) -> Members:
    global _began, _known
    rank, size, store = options.group_rank, options.group_size, options.store
    began, _began = _began or not is_member(), False
    if not is_member():
        _begin_world(store, rank, size)
    world = current().world
    said = exchange(store, "ranks", rank, size, f"{world.rank} {world.size}".encode())
    pairs = [tuple(map(int, word.split())) for word in said]
    ranks = tuple(pair[0] for pair in pairs)
    if sorted(ranks) != list(range(size)) or world.size != size:
        raise ValueError(
            coded(
                WorldCode.PROCESS_SETS_DISAGREE,
                f"dist.init_process_group('horovod') was given {size} processes, but those are the ranks "
                f"{sorted(set(ranks))} of a world of {world.size} in Horovod. Let the default group be all processes "
                "of that world, or do not call hvd.init() before dist.init_process_group.",
            )
        )
    _known = _World(world, ranks)
    return Members(options.group_id, "the default group", 0, ranks, rank, is_world=True, began_world=began)


def _some(options: Any, global_ranks: Sequence[int]) -> Members:
    context = current()
    if _known is None or _known.world is not context.world:
        raise ValueError(
            coded(
                WorldCode.PROCESS_SETS_DISAGREE,
                "The world has changed since dist.init_process_group('horovod'). Call dist.destroy_process_group() and "
                "dist.init_process_group('horovod') again before new groups.",
            )
        )
    ranks = tuple(_known.ranks[rank] for rank in global_ranks)
    in_order = sorted(ranks)
    store, mine, size = options.store, options.group_rank, options.group_size

    def tell(step: str, word: bytes) -> list[bytes]:
        said = dict(zip(ranks, exchange(store, step, mine, size, word), strict=True))
        return [said[rank] for rank in in_order]

    number = context.process_sets.form(options.group_id, in_order, tell)
    shown = ", ".join(map(str, global_ranks[:16])) + (", ..." if size > 16 else "")
    return Members(
        options.group_id, f"the group of ranks {shown}", number, ranks, mine, is_world=False, began_world=False
    )


def world_began() -> None:
    """The world is to end with the default group that comes next."""
    global _began
    _began = True


def exchange(store: Any, step: str, rank: int, size: int, word: bytes) -> list[bytes]:
    """What all members say in a step, in their order; waits for them as long as the store does."""
    if size == 1:
        return [word]
    store.set(f"{_KEY}/{step}/{rank}", word)
    keys = [f"{_KEY}/{step}/{other}" for other in range(size)]
    return list(store.multi_get(keys) if store.has_extended_api() else map(store.get, keys))


def _begin_world(store: Any, rank: int, size: int) -> None:
    """hvd.init(), by what the members of the default group know of each other."""
    settings = resolve()
    if settings.coordinator is not None:  # a launcher of ours, or the user, says how
        basics.init(rank=_unless(settings.rank, rank), size=_unless(settings.size, size))
        return
    if size == 1:
        basics.init()
        return
    address = os.environ.get("MASTER_ADDR") or socket.gethostname()
    # Rank 0's random text names this start of the group, because one store may serve several starts.
    said = exchange(store, "begin", rank, size, f"{secrets.token_hex(16)} {place_of_process()} {address}".encode())
    places = [word.split()[1] for word in said]
    task = Task(
        launcher="torch.distributed",
        rank=rank,
        size=size,
        one_host=len(set(places)) == 1,
        run=(said[0].decode(),),
        first_host=said[0].split()[2].decode(),
        variable_option="export them on each host",
        meeting_advice="set HOROVOD_TOKEN on each host to the same text, such as what `openssl rand -hex 32` prints",
    )
    with known_as(task):
        basics.init()


def _unless(given: int | None, value: int) -> int | None:
    """value, or None where a setting says it already."""
    return value if given is None else None


def place_of_process() -> str:
    """The same for processes that reach each other over the loopback interface and see the same files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join(
        [boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "mnt")), str(os.getuid())]
    )
