"""What becomes of a job's target when processes end, hosts are lost and room appears. The only place that decides it.

    a process ends well                 no process is started any more
    one fails, and failures end jobs    no process is to run
    one fails, and is replaced          its slot gets another process: on its host, else where there is room, else later
    the same, and its host goes         none of the host's slots is left there
    so often that it is enough          no process is to run
    its host is drained                 its slot is given up, and nobody has failed
    there is room, and slots are few    further slots, up to the most
    slots are taken back                their processes are to leave; however they end, their slots go with them
    fewer slots than the fewest         the job waits for room for as long as its patience lasts, and then ends

Pure: the time is an argument, in seconds of any clock that all coordinators of the job share.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from horovod.base.errors import ClusterCode, LaunchCode, coded
from horovod.base.words import capitalized, joined, plural, ranks_in_words

from .target import OnFailure, Phase, Slot, Target

# Programs look for this text in errors.
RESET_LIMIT_EXCEEDED_MESSAGE = "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"


@dataclass(frozen=True)
class Exit:
    """A process that was started for the target is no more."""

    slot: int
    incarnation: int
    failed: bool  # anything but exit code 0
    how: str = ""  # completes "slot 1 on host a ", without a full stop
    host_lost: bool = False  # nothing can be started on its host
    drained: bool = False  # it was told to leave its host, on which nothing is to be started
    follows: bool = False  # it gave up because a process on another host had failed just before


@dataclass(frozen=True)
class Observed:
    exits: Sequence[Exit] = ()  # in the order in which they came; those of earlier incarnations change nothing
    room: Mapping[str, int] = field(default_factory=dict)  # host -> further processes that it could have; best first
    taken_back: Collection[int] = ()  # slots that others are to have
    stopped: bool = False  # a person asked for its end


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
    failed = [one for one in ends.values() if one.failed and not one.drained]
    if failed and target.rules.on_failure is OnFailure.END:
        return _failed(target, f"{_in_words(failed[0], target)}, so the job ends.")
    done = [one for one in ends.values() if not one.failed]
    if failed and (target.phase is Phase.FINISHES or done):
        return _failed(target, f"{_in_words(failed[0], target)}, and others have ended well, so the job ends.")
    if target.phase is Phase.FINISHES or done:
        return _finishing(target, ends, done)
    count = target.replacements + len(failed)
    if target.rules.most_replacements is not None and count > target.rules.most_replacements:
        limit = RESET_LIMIT_EXCEEDED_MESSAGE.format(target.rules.most_replacements)
        return _ended(target, coded(LaunchCode.RESET_LIMIT, f"{_in_words(failed[0], target)}. {limit}."))
    return _filled(now_s, target, count, failed, drained, observed)


def _is_of(one: Exit, target: Target) -> bool:
    slot = target.by_number.get(one.slot)
    return slot is not None and slot.incarnation == one.incarnation


def _in_words(one: Exit, target: Target) -> str:
    return f"Slot {one.slot} on host {target.by_number[one.slot].host} {one.how or 'failed'}"


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
        sentence = f"{_in_words(replace(done[0], how='ended well'), target)}, so no process is started any more."
    return replace(target, slots=left, phase=Phase.FINISHES, generation=target.generation + 1), sentence


def _filled(
    now_s: float,
    was: Target,
    replacements: int,
    failed: Sequence[Exit],
    drained: Sequence[Exit],
    observed: Observed,
) -> tuple[Target, str]:
    """Replaces what failed, gives up what was drained, adds slots where there is room, and marks those that are taken
    back.

    replacements: in all, with these.
    """
    target = replace(was, replacements=replacements)
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
    for one in failed:
        old = hosts[one.slot]
        host = _with_room(room) if old in lost else old  # there it has the place of the process that has ended
        if host is None:
            sentences.append(f"{_in_words(one, target)}, and there is no room for another process.")
            continue
        if host != old:
            room[host] -= 1
        slots[one.slot] = Slot(one.slot, host, generation)
        where = "" if host == old else f" on host {host}"
        sentences.append(f"{_in_words(one, target)}; another process takes its place{where}.")
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
        slots |= {number: replace(slots[number], is_leaving=True) for number in back}
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


def _with_room(room: Mapping[str, int]) -> str | None:
    return next((host for host, count in room.items() if count > 0), None)
