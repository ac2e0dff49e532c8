"""What becomes of a job's target when processes end, hosts are lost and room appears. The only place that decides it.

    a process ends well                 no process is started any more
    the same, after the work was done   the same; its failure is that of the job, unless it had left before
    one fails, and failures end jobs    no process is to run
    one finds all committed work lost   no process is to run
    one fails, and is replaced          its slot gets another process: on its host, else where there is room, else later
    the same, soon after its start      after 1 s, 2 s, 4 s and so on; the others go on meanwhile
    each fails before any has joined    no process is to run: it would fail again
    the same, and its host goes         none of the host's slots is left there
    so often that it is enough          no process is to run
    its host is drained                 its slot is given up, and nobody has failed
    there is room, and slots are few    further slots, up to the most
    slots are taken back                their processes are to leave; however they end, their slots go with them
    fewer slots than the fewest         the job waits for room for as long as its patience lasts, and then ends

Pure: the time is an argument, in seconds of any clock that all coordinators of the job share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from horovod.base.errors import ClusterCode, LaunchCode, WorldCode, coded
from horovod.base.words import capitalized, joined, plural, ranks_in_words

# The target of a job: the slots that are to have a process, on which host, and which process of each is meant.
#
# A slot has a number, which it keeps for as long as the job lives, also on another host. The generation rises with
# each change of the target, so that of two targets the later one is known. The incarnation of a slot is the generation
# in which its process was asked for: another process of the slot has a greater one, and what is heard of an earlier
# process changes nothing any more.
#
# The scheduler writes the target, as `decide` says, into the record of the job; agents start what it names.


class OnFailure(Enum):
    """What a failed process means for the job."""

    END = "end"  # all others end as well
    REPLACE = "replace"  # another process takes its slot


class Phase(Enum):
    RUNS = "runs"
    FINISHES = "finishes"  # a process has ended well: those that run may end, and none is started any more
    ENDS = "ends"  # no process is to run


@dataclass(frozen=True)
class Rules:
    """What a person said of the job. fewest, most: numbers of slots."""

    fewest: int
    most: int
    on_failure: OnFailure = OnFailure.END
    most_replacements: int | None = None  # replacements in the job's whole life; None: no limit
    patience_s: float = 0.0  # for how long there may be fewer than `fewest` slots
    # Only those replacements count since the job has last gone on, and they end it only if too few processes are left
    # that have not failed.
    since_progress: bool = False
    host_goes: bool = False  # a host on which a process fails by itself is not used any more, so its other slots go too


@dataclass(frozen=True)
class Slot:
    number: int
    host: str
    incarnation: int = 1
    is_leaving: bool = False  # its process was asked to end, and the slot is given up with it
    failures: int = 0  # processes of it that failed soon after their start, in a row
    retry_at_s: float | None = None  # its process has failed, and the next one is started at this time


@dataclass(frozen=True)
class Target:
    rules: Rules
    slots: tuple[Slot, ...]  # by number
    generation: int = 1
    phase: Phase = Phase.RUNS
    replacements: int = 0  # so far
    setbacks: int = 0  # processes that have failed since the job has last gone on
    progress_epoch: int = 0  # the job's latest world when it last went on
    short_since_s: float | None = None  # since when there are fewer slots than `rules.fewest`, without leaving ones

    @cached_property
    def staying(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if not slot.is_leaving)

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to start a process that was put off."""
        return any(slot.retry_at_s is not None and now_s >= slot.retry_at_s for slot in self.slots)

    @property
    def is_short(self) -> bool:
        return len(self.staying) < self.rules.fewest

    @cached_property
    def by_number(self) -> Mapping[int, Slot]:
        return {slot.number: slot for slot in self.slots}


# Programs look for this text in errors.
RESET_LIMIT_EXCEEDED_MESSAGE = "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"


FIRST_RETRY_S = 1.0  # doubles with each further process of the slot that fails soon after its start
MOST_RETRY_S = 60.0


def limit_in_words(limit: int) -> str:
    """Without a full stop. What sets the limit has two names: that of an option, and that of an argument."""
    return f"{RESET_LIMIT_EXCEEDED_MESSAGE.format(limit)} (--reset-limit or reset_limit)"


@dataclass(frozen=True)
class Exit:
    """A process that was started for the target is no more."""

    slot: int
    incarnation: int
    failed: bool  # anything but exit code 0
    how: str = ""  # completes "slot 1 on host a ", without a full stop
    host_lost: bool = False  # its host is lost, so nothing can be started there
    drained: bool = False  # its agent told it to leave the host, on which nothing is to be started
    follows: bool = False  # it gave up because a process on another host had failed just before
    early: bool = False  # it ended soon after it was started
    by_itself: bool = False  # it ended with an exit code, and not by a signal
    work_done: bool = False  # the work of the job was done when it ended
    unneeded: bool = False  # the job's work was done without this process, so its failure does not count
    state_lost: bool = False  # the process found that all that the job had committed is lost


@dataclass(frozen=True)
class Observed:
    exits: Sequence[Exit] = ()  # in the order in which they came; those of earlier incarnations change nothing
    room: Mapping[str, int] = field(default_factory=dict)  # host -> further processes that it could have; best first
    taken_back: Collection[int] = ()  # slots that other jobs are to have
    stopped: bool = False  # a person asked for the end of the job
    well: Collection[int] = ()  # slots whose processes have run for a while
    joined: bool = True  # a process of the job has joined it; also where that is not known
    epoch: int | None = None  # of the job's latest world; 0: it had none; None: not known


def decide(now_s: float, target: Target, observed: Observed) -> tuple[Target, str]:
    """The new target, which is `target` itself where nothing changes, and the sentence that says why it changed."""
    if target.phase is Phase.ENDS:
        return target, ""
    if observed.stopped:
        return _ended(target, "It was stopped.")
    ends = {one.slot: one for one in observed.exits if _is_of(one, target)}
    gone = {number for number in ends if target.by_number[number].is_leaving}
    if gone:
        target, sentence = _without(target, gone)
        target, more = decide(now_s, target, observed)
        return target, f"{sentence} {more}".strip()
    drained = [one for one in ends.values() if one.drained]
    failed = [one for one in ends.values() if one.failed and not one.drained and not one.unneeded]
    if failed and target.rules.on_failure is OnFailure.END:
        return _failed(target, f"{_in_words(failed[0], target)}, so the job ends.")
    if (lost := next((one for one in failed if one.state_lost), None)) is not None:
        why = f"{_in_words(lost, target)}: all that the job had committed is lost, so it ends.{_before(lost, observed)}"
        return _ended(target, coded(WorldCode.STATE_LOST, why))
    done = [one for one in ends.values() if not one.failed or one.unneeded or one.work_done]
    # Failures after the work was done are judged when the job ends.
    failed = [one for one in failed if not one.work_done]
    # The others failed earlier, and their slots wait for another process.
    news = [one for one in failed if target.by_number[one.slot].retry_at_s is None]
    if news and (target.phase is Phase.FINISHES or done):
        return _failed(target, f"{_in_words(news[0], target)}, and others have ended well, so the job ends.")
    if target.phase is Phase.FINISHES or done:
        return _finishing(target, ends, done)
    if news and _would_fail_again(target, news, observed):
        words = f"{_in_words(news[0], target)} before hvd.init(), as each process of the job has"
        return _ended(target, coded(LaunchCode.FAILED_AT_START, f"{words}: another attempt would fail as well."))
    counted = _counted(target, news, observed)
    if news and (limit := _limit_in_words(counted, ends, observed)):
        return _ended(target, coded(LaunchCode.RESET_LIMIT, f"{_in_words(news[0], target)}. {limit}"))
    return _filled(now_s, target, counted, failed, drained, observed)


def _is_of(one: Exit, target: Target) -> bool:
    slot = target.by_number.get(one.slot)
    return slot is not None and slot.incarnation == one.incarnation


def _in_words(one: Exit, target: Target) -> str:
    return f"Slot {one.slot} on host {target.by_number[one.slot].host} {one.how or 'failed'}"


def _before(lost: Exit, observed: Observed) -> str:
    """How the process has failed that was there last before this one found the state lost: what a person must look at.
    The exit code of the job tells that the state is lost, however many processes held it.
    """
    earlier = [
        one for one in observed.exits if one.failed and not one.state_lost and one.incarnation < lost.incarnation
    ]
    return f" Before that, slot {earlier[-1].slot} {earlier[-1].how or 'failed'}." if earlier else ""


def _would_fail_again(target: Target, news: Sequence[Exit], observed: Observed) -> bool:
    """Whether each slot had a process that failed by itself at its start: the program or its files are to blame."""
    if observed.joined or target.rules.host_goes or not all(one.early and one.by_itself for one in news):
        return False
    now = {one.slot for one in news}
    return all(slot.number in now or slot.failures for slot in target.slots)


def _counted(target: Target, news: Sequence[Exit], observed: Observed) -> Target:
    """With these failures counted. The job has gone on since the last ones if a world has formed and one of the
    processes had run for a while.
    """
    setbacks, epoch = target.setbacks, target.progress_epoch
    if any(not one.early for one in news) and (observed.epoch is None or observed.epoch > epoch):
        setbacks, epoch = 0, observed.epoch or 0
    count = len(news)
    return replace(target, replacements=target.replacements + count, setbacks=setbacks + count, progress_epoch=epoch)


def _limit_in_words(target: Target, ended: Collection[int], observed: Observed) -> str:
    """The sentence of a job whose processes have failed too often, with those that are counted; "" of others."""
    rules, limit = target.rules, target.rules.most_replacements
    if limit is None or (target.setbacks if rules.since_progress else target.replacements) <= limit:
        return ""
    if not rules.since_progress:
        return f"{limit_in_words(limit)}."
    healthy = [slot for slot in target.staying if not slot.failures or slot.number in observed.well]
    if sum(slot.number not in ended for slot in healthy) >= rules.fewest:
        return ""  # the other processes go on
    return f"{limit_in_words(limit)} without progress."


def _ended(target: Target, sentence: str) -> tuple[Target, str]:
    ended = replace(target, slots=(), phase=Phase.ENDS, generation=target.generation + 1, short_since_s=None)
    return ended, sentence


def _without(target: Target, gone: Collection[int]) -> tuple[Target, str]:
    """Without slots whose processes were to leave, and have ended."""
    left = tuple(slot for slot in target.slots if slot.number not in gone)
    return replace(target, slots=left, generation=target.generation + 1), f"{_slots_in_words(gone, target)} given back."


def _slots_in_words(numbers: Collection[int], target: Target) -> str:
    """`Slots 2 and 3 on host a are`."""
    words = [
        f"{ranks_in_words(sorted(one for one in numbers if target.by_number[one].host == host), 'slot')} on host {host}"
        for host in dict.fromkeys(slot.host for slot in target.slots if slot.number in numbers)
    ]
    return capitalized(f"{joined(words)} {'is' if len(numbers) == 1 else 'are'}")


def _failed(target: Target, sentence: str) -> tuple[Target, str]:
    return _ended(target, coded(LaunchCode.RANK_FAILED, sentence))


def _finishing(target: Target, ends: Mapping[int, Exit], done: Sequence[Exit]) -> tuple[Target, str]:
    if not ends:
        return target, ""
    left = tuple(slot for slot in target.slots if slot.number not in ends)
    sentence = ""
    if done and target.phase is Phase.RUNS:
        how = done[0].how if done[0].failed else "ended well"
        after = " after the work was done" if done[0].failed else ""
        sentence = f"{_in_words(replace(done[0], how=how), target)}{after}, so no process is started any more."
    return replace(target, slots=left, phase=Phase.FINISHES, generation=target.generation + 1), sentence


def _filled(
    now_s: float,
    was: Target,
    target: Target,
    failed: Sequence[Exit],
    drained: Sequence[Exit],
    observed: Observed,
) -> tuple[Target, str]:
    """Replaces what failed, gives up what was drained, adds slots where there is room, and marks those that are taken
    back.

    target: `was` with these failures counted.
    """
    rules, generation = target.rules, target.generation + 1
    hosts = {slot.number: slot.host for slot in target.slots}
    # Where one is lost with its host, nothing can be started, though others may have failed there before.
    lost = {hosts[one.slot] for one in failed if one.host_lost or (rules.host_goes and not one.follows)}
    ended = {one.slot for one in (*failed, *drained)}
    ended |= {slot.number for slot in target.slots if rules.host_goes and slot.host in lost}
    slots = {slot.number: slot for slot in target.slots if slot.number not in ended}
    left = Counter(hosts[one.slot] for one in drained)
    room = {host: count for host, count in observed.room.items() if host not in lost and host not in left}
    sentences = [
        f"Host {host} was drained, and {plural(count, 'process')} left the job." for host, count in left.items()
    ]
    again: list[int] = []  # slots whose process was put off, and is started now
    for one in failed:
        old = hosts[one.slot]
        slot = target.by_number[one.slot]
        is_news = slot.retry_at_s is None
        failures = slot.failures if not is_news else slot.failures + 1 if one.early else 0
        retry_at_s = slot.retry_at_s if not is_news else _retry_at_s(now_s, one, failures, observed)
        if old not in lost and retry_at_s is not None and now_s < retry_at_s:
            slots[one.slot] = replace(slot, failures=failures, retry_at_s=retry_at_s)
            if is_news:
                delay_s = retry_at_s - now_s
                sentences.append(f"{_in_words(one, target)}; another process takes its place in {delay_s:g} s.")
            continue
        # On its new host the process takes the place of the one that has ended.
        host = _with_room(room) if old in lost else old
        if host is None:
            sentences.append(f"{_in_words(one, target)}, and there is no room for another process.")
            continue
        if host != old:
            room[host] -= 1
        slots[one.slot] = Slot(one.slot, host, generation, failures=failures)
        where = "" if host == old else f" on host {host}"
        if is_news:
            sentences.append(f"{_in_words(one, target)}; another process takes its place{where}.")
        else:
            again.append(one.slot)
    if again:
        sentences.append(f"{_slots_in_words(again, replace(target, slots=tuple(slots.values())))} started again.")
    before = len(slots)
    for number in (number for number in range(rules.most) if number not in slots):
        if (host := _with_room(room)) is None:
            break
        room[host] -= 1
        slots[number] = Slot(number, host, generation)
    if added := len(slots) - before:
        sentences.append(f"There is room for {plural(added, 'further process')}.")
    back = [number for number in observed.taken_back if number in slots and not slots[number].is_leaving]
    if back:
        sentences.append(f"{_slots_in_words(back, replace(target, slots=tuple(slots.values())))} to be given back.")
        waiting = [number for number in back if slots[number].retry_at_s is not None]
        slots |= {number: replace(slots[number], is_leaving=True) for number in back}
        slots = {number: slot for number, slot in slots.items() if number not in waiting}
    since_s = None
    if (count := sum(not slot.is_leaving for slot in slots.values())) < rules.fewest:
        since_s = now_s if target.short_since_s is None else target.short_since_s
        if now_s - since_s >= rules.patience_s:
            sentences.append(f"Of at least {plural(rules.fewest, 'process')} there are {count}: the job ends.")
            return _ended(target, coded(ClusterCode.TOO_FEW_PROCESSES, " ".join(sentences)))
    new = tuple(slots[number] for number in sorted(slots))
    if new != target.slots:
        target = replace(target, slots=new, generation=generation)
    filled = replace(target, short_since_s=since_s)
    return (was if filled == was else filled), " ".join(sentences)


def _retry_at_s(now_s: float, one: Exit, failures: int, observed: Observed) -> float | None:
    """When another process takes its place; None: at once. failures: in a row, with this one.

    The first is replaced at once, since a process may be killed by accident. But while no process has joined, the
    others are likely to fail by themselves as well, after which none is started any more.
    """
    if not failures or (failures == 1 and (observed.joined or not one.by_itself)):
        return None
    times = failures - 1 if not observed.joined and one.by_itself else failures - 2
    return now_s + min(MOST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(times, 64))


def _with_room(room: Mapping[str, int]) -> str | None:
    return next((host for host, count in room.items() if count > 0), None)
