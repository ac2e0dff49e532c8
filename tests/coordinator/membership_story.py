"""Stories of a coordinator's membership, without clock and socket."""

from collections.abc import Callable, Sequence
from typing import Any

from coordinator_builders import attach_request, request

from horovod.base.proofs import attach_proof
from horovod.coordinator.core.world.effects import (
    Close,
    Effect,
    Form,
    Gone,
    LookLater,
    Send,
    TellLater,
    WorldEnded,
)
from horovod.coordinator.core.world.life import Sight
from horovod.coordinator.core.world.membership import Membership
from horovod.coordinator.core.world.waiting import Formation
from horovod.protos.v1 import membership_pb2 as pb

SECRET = b"s" * 32


class Story:
    """A Membership whose worlds form at once, what every member was told, and a clock that the test moves."""

    def __init__(
        self, grace_s: float = 10.0, agent_s: Callable[[str, int], float] = lambda job, rank: 0.0, **rules: Any
    ) -> None:
        """rules: further arguments of Membership."""
        self.membership = Membership(grace_s, agent_s, **rules)
        self.now_s = 0.0
        self.told: dict[str, list[pb.MembershipEvent]] = {}
        self.closed: list[str] = []
        self.ended: list[tuple[str, int]] = []
        self.gone: list[tuple[int, int]] = []
        self.formations: list[Formation] = []
        self.later: list[tuple[float, str]] = []  # when whose progress is to be told
        self.looks: list[tuple[float, str]] = []  # when to look who is overdue
        self.epoch = 0
        self.hold = False  # leave formations to the test

    def join(self, member_id: str, **fields: object) -> str:
        """`rejoin`: the old member id of the process, which it proves."""
        if isinstance(old := fields.get("rejoin"), str):
            world = self.world(old)
            fields["rejoin"] = (world, [member.member_id for member in world.members].index(old))
        refusal, effects = self.membership.join(request(member_id, **fields), self.now_s)  # type: ignore[arg-type]
        self.take(effects)
        return refusal

    def take(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(member_id, event):
                    self.told.setdefault(member_id, []).append(event)
                    if event.HasField("world"):
                        self.membership.received(member_id, event.world.epoch)
                case Close(member_id):
                    self.closed.append(member_id)
                case Form(formation):
                    self.formations.append(formation)
                    if not self.hold:
                        self.form()
                case TellLater(job, delay_s):
                    assert delay_s > 0
                    self.later.append((self.now_s + delay_s, job))
                case LookLater(job, delay_s):
                    self.looks.append((self.now_s + delay_s, job))
                case Gone(_, told):
                    self.gone.append((told.epoch, told.rank))
                case WorldEnded(job, epoch):
                    self.ended.append((job, epoch))

    def form(self) -> None:
        self.epoch += 1
        self.take(self.membership.formed(self.formations[-1], self.epoch, SECRET, self.now_s))

    def pass_time(self, seconds: float, *vouched: str, **seen: Any) -> None:
        """With a tick at the end, and progress when it is due. seen: what the coordinator sees then (Sight)."""
        self.now_s += seconds
        while due := [one for one in self.later if one[0] <= self.now_s]:
            self.later.remove(due[0])
            self.take(self.membership.tell_progress(due[0][1], self.now_s))
        for job in self.membership.jobs():
            self.take(self.membership.tick(job, self.now_s, Sight(frozenset(vouched), **seen)))

    def leave(self, member_id: str, reason: str = "", *, returns: bool = False, failed: bool = False) -> None:
        self.take(self.membership.leave(member_id, reason, self.now_s, returns=returns, failed=failed))

    def lose(self, member_id: str, cause: str = "it was killed") -> None:
        self.take(self.membership.lost(member_id, cause, self.now_s))

    def disconnect(self, member_id: str) -> None:
        self.take(self.membership.disconnected(member_id, self.now_s))

    def attach(self, member_id: str, secret: bytes = SECRET, **changes: object) -> pb.Refused | None:
        """The member comes back; the refusal, or None."""
        world = self.world(member_id)
        attach = attach_request(request(member_id), world)
        for field, value in changes.items():
            setattr(attach, field, value)
        refused, effects = self.membership.attach(attach, b"nonce", attach_proof(secret, attach, b"nonce"), self.now_s)
        self.take(effects)
        return refused

    def world(self, member_id: str) -> pb.World:
        worlds = [event.world for event in self.told.get(member_id, []) if event.HasField("world")]
        assert len(worlds) == 1, f"{member_id} got {len(worlds)} worlds"
        return worlds[0]

    def has_world(self, member_id: str) -> bool:
        return any(event.HasField("world") for event in self.told.get(member_id, []))

    def progress(self, member_id: str) -> list[str]:
        return [event.progress.sentence for event in self.told.get(member_id, []) if event.HasField("progress")]

    def goodbyes(self, member_id: str) -> list[pb.MemberGone]:
        return [event.gone for event in self.told.get(member_id, []) if event.HasField("gone")]
