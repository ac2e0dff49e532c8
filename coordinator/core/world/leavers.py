"""Members that have said that they will leave their world for good, and what all its members are told of it.

A member of an elastic job whose host is about to be taken away says so in time. The members are told, and leave the
world together at their next commit, so that no step of anybody fails. Those that stay join again; the next world forms
without the others, whose goodbye says that they do not return. A member that has to go before the commit is lost like
any other.

Many members may say it at once, as when a host with all its ranks is drained. What is told is the latest state, and at
a bounded rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from horovod.base.words import capitalized, plural, shortened
from horovod.protos.v1 import membership_pb2 as pb

from .effects import Effect, LookLater, Send
from .present import Present
from .sizes import sizes_of_world
from .waiting import MOST_TOLD_PER_S, TELL_EVERY_S


@dataclass
class Leavers:
    """Of one world."""

    told: pb.MembershipEvent | None = None  # what members were told last about those who leave
    _reasons: dict[int, str] = field(default_factory=dict)  # rank -> why it leaves, in the order in which they said it
    _is_news: bool = False
    _told_at_s: float | None = None
    _due_at_s: float | None = None  # the time for which a LookLater was returned; None: none is due

    def add(self, one: Present, reason: str) -> None:
        """This member of the world will leave. The first reason counts."""
        if one.rank not in self._reasons:
            self._reasons[one.rank] = reason
            self._is_news = True

    def tell(
        self, world: pb.World, present: Mapping[str, Present], waiting: int, now_s: float, has_commits: bool = False
    ) -> list[Effect]:
        """Tells the members that are present what they have not been told: now, or later if that was just before.

        waiting: processes that wait for a place beside the world. has_commits: the job has committed something.
        """
        if not self._is_news:
            return []
        if self._told_at_s is not None:
            due_at_s = self._told_at_s + max(TELL_EVERY_S, len(present) / MOST_TOLD_PER_S)
            if now_s < due_at_s:
                is_asked, self._due_at_s = self._due_at_s == due_at_s, due_at_s
                return [] if is_asked else [LookLater(world.job, due_at_s - now_s)]
        self._is_news, self._told_at_s = False, now_s
        sentence = self._in_words(world, present, waiting, has_commits)
        leavers = pb.Leavers(epoch=world.epoch, ranks=sorted(self._reasons), sentence=sentence)
        self.told = pb.MembershipEvent(leavers=leavers)
        return [Send(member_id, self.told) for member_id in present]

    def _in_words(self, world: pb.World, present: Mapping[str, Present], waiting: int, has_commits: bool) -> str:
        going = [one for one in present.values() if one.rank in self._reasons]
        verb = "leaves" if len(going) == 1 else "leave"
        reason = next(iter(self._reasons.values())) or "it said so"
        who = capitalized(shortened([str(one) for one in going], 4))
        sentence = f"{who} {verb} job {world.job!r} at the next commit ({reason})."
        stay, sizes = len(present) - len(going), sizes_of_world(world)
        if stay == 0:
            begin = f" {plural(waiting, 'process')} that {'waits' if waiting == 1 else 'wait'} can begin it anew."
            lost = " What they have committed is lost." if has_commits else begin if waiting else ""
            return f"{sentence} No member stays, so the job ends for all of them.{lost}"
        if stay + waiting < sizes.fewest:
            return f"{sentence} Of at least {plural(sizes.fewest, 'member')} {stay} will be left, and wait for others."
        return f"{sentence} The job goes on with {plural(min(stay + waiting, sizes.most), 'member')}."
