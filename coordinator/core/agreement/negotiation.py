"""First-time agreement on the operations of one world.

Every rank of a process set announces an operation by name. When all have, `agreement` compares what they said: either
everyone gets the same error sentence, or the operation gets a small id under which it runs on the data plane ever
after.

* Announcing again what is not decided yet changes nothing, so a member may send everything again after its stream
  broke.
* Announcing something that already has an id is answered with that id. (A rank whose answer was lost with its stream
  asks alone; a fresh round would wait for the others for ever.)
* A name with another content is negotiated anew and gets an id of its own; the old id stays valid.
* When the ids run out, a quarter of them, the least recently assigned, is recalled; operations wait meanwhile. Some are
  recalled before that, so that names that never repeat do not take memory for ever (ids.py).
* Ranks that have joined (join.py) count as having announced every allreduce of the global set; they are told what it
  is. Anything else fails there until the round is over.
* Ranks agree on process sets among themselves and each of them says so here, idempotently. A set exists from the first
  rank that added it to the first that removed it. Of the latest that were removed it is known who did it: operations of
  them fail with that, also if a rank adds the set or starts the operation later.
* A coordinator that takes a running world over learns from the ranks what its predecessor knew (takeover.py).

Pure: `steps` maps a rank's message and the time to messages for ranks. Equal answers for many ranks are one object.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from horovod.base.errors import OperationCode, coded
from horovod.base.words import printable, ranks_in_words
from horovod.protos.v1 import negotiation_pb2 as pb
from horovod.protos.v1 import types_pb2

from . import blocked
from .agreement import disagreement
from .blocked import BlockedReports
from .budget import MAX_BLOCKED, MAX_MEMBER_BYTES, MAX_WORLD_BYTES, Answers, Budget, TooMuchError, check_entries
from .deadlock import USUAL_TIMES, DeadlockDetector, DeadlockTimes
from .decisions import MAX_SENTENCE, Batch, Failures
from .ids import MAX_IDS, USUAL_IDS, IdTable, is_unknown
from .join import Joining
from .operations import Signature, defect, is_unnamed, looked_at, user_name
from .process_set import Agreed, PendingOperations, ProcessSet, set_bytes
from .stall import Stall, find_stalls
from .standing import Standings, counts_in_words, with_counts
from .takeover import ContradictionError, Takeover, read

MAX_PENDING = 1 << 16  # operations of one world that wait for a rank or for an id
MAX_PROCESS_SETS = 1 << 12  # process sets that one world may have at a time
MAX_REMOVED = 1 << 8  # removed process sets of which it is known who removed them
MAX_NAME_SHOWN = 200  # characters
STEP = 256  # operations of one message that are taken in at a time: some 5 ms, in which no other member is served

_UNREPEATED = (
    "Operations have thousands of different names that do not repeat: {names}, ... All ranks agree on each new name "
    "before its operation runs, which takes about a millisecond, and keep it in memory for a while. Give an operation "
    "that runs in each step one name that repeats, without the number of the step."
)


def _of_removed(who: str, name: str) -> str:
    """The error of the operation `name` in a removed process set. who: says which rank has removed which set."""
    sentence = coded(OperationCode.NO_SUCH_SET, f"{who}, so {name[:MAX_NAME_SHOWN]} can't complete in it.")
    return printable(sentence, MAX_SENTENCE)


class Negotiation:
    """The negotiation of one world."""

    def __init__(
        self,
        epoch: int,
        size: int,
        id_capacity: int = MAX_IDS,
        member_bytes: int = MAX_MEMBER_BYTES,
        world_bytes: int = MAX_WORLD_BYTES,
        deadlock: DeadlockTimes | None = USUAL_TIMES,
        term: int = 0,
        takes_over: bool = False,
        usual_ids: int = USUAL_IDS,
    ) -> None:
        """takes_over: another coordinator had this world until now, in an earlier term. deadlock: None: ranks that wait
        for each other are not looked for."""
        self.epoch = epoch
        self._takeover = Takeover(size) if takes_over else None
        self.budget = Budget(epoch, member_bytes, world_bytes)
        self._size = size
        self._id_capacity = id_capacity
        self._usual_ids = usual_ids
        self._sets: dict[int, ProcessSet] = {}
        self._removed: dict[int, str] = {}  # number -> who removed it; the oldest entry goes first
        self._gone: set[int] = set()
        self._joining = Joining(size)
        self._serial = 0  # the number of the latest decisions
        self._standings = Standings(self.budget)
        self._deadlocks = DeadlockDetector(self._standings, deadlock) if deadlock is not None else None
        self._failures = Failures(term)
        self.add_process_set(0, range(size))

    def add_process_set(self, number: int, ranks: Iterable[int], registrant: int = 0) -> None:
        """Raises TooMuchError."""
        members = frozenset(ranks)
        if number:
            self.budget.charge(registrant, set_bytes(members), f"process set {number}")
        self._sets[number] = ProcessSet(
            number,
            tuple(sorted(members)),
            members,
            IdTable(self._id_capacity, self.budget, self._usual_ids),
            PendingOperations(self.budget),
            BlockedReports(self.budget),
            registrant,
            whole=self._takeover is None,
        )

    def _remove_process_set(self, rank: int, process_set: ProcessSet, batch: Batch) -> None:
        """Forgets a set that `rank` has removed; members that still wait for an operation of it are told."""
        number = process_set.number
        del self._sets[number]
        who = f"Rank {rank} has removed the process set of {ranks_in_words(process_set.ranks)}"
        if len(self._removed) >= MAX_REMOVED:
            del self._removed[next(iter(self._removed))]
        self._removed[number] = who
        for name, ranks in process_set.waiting().items():
            batch.to(ranks).errors.add(process_set=number, name=name, sentence=_of_removed(who, name))
        process_set.clear(self.budget)
        self._failures.forget_set(number)

    def receive(self, rank: int, message: pb.NegotiationMessage, now_s: float, resumed: bool = False) -> Answers:
        """`steps` without a pause. Raises TooMuchError, which holds the decisions until then, or ContradictionError."""
        answers: Answers = []
        try:
            for some in self.steps(rank, message, now_s, resumed):
                answers += some
        except TooMuchError as error:
            error.answers = answers + error.answers
            raise
        return answers

    def steps(
        self, rank: int, message: pb.NegotiationMessage, now_s: float, resumed: bool = False
    ) -> Iterator[Answers]:
        """The decisions that `message` of `rank` leads to, in steps of bounded work. Other messages may come between
        two steps; so what the message says of the rank itself, the hello above all, is taken in with the last one.

        resumed: the first message on a new stream of a rank that had one before. It holds everything that the rank
        still waits for; answers that got lost are given again.

        Raises TooMuchError, which holds what the step has led to until then, or ContradictionError.
        """
        check_entries(rank, message)
        waiting = sum(len(one.pending) + len(one.agreed) for one in self._sets.values())
        if waiting + len(message.announce) > MAX_PENDING:
            raise TooMuchError(
                f"Rank {rank} announces {len(message.announce)} operations, but {waiting} wait for some rank in world "
                f"{self.epoch} already; the limit is {MAX_PENDING}. Other ranks must start them, too."
            )
        if message.HasField("hello"):
            self._standings.new_stream(rank)
        last = max(0, (len(message.announce) - 1) // STEP * STEP)  # where the last step begins
        for begin in range(0, last + 1, STEP):
            batch = Batch(self.epoch)
            try:
                if begin == 0:
                    for change in message.process_sets:
                        self._change_process_set(rank, change, batch)
                announced = message.announce[begin : begin + STEP]
                if begin < last:
                    self._announce_all(rank, announced, now_s, resumed, batch)
                else:
                    self._take_in(rank, message, announced, now_s, resumed, batch)
            except TooMuchError as error:
                error.answers = self._answers(batch)
                raise
            yield self._answers(batch)

    def _answers(self, batch: Batch) -> Answers:
        answers = batch.answers()
        for ranks, decisions in answers:
            self._serial += 1
            decisions.serial = self._serial
            self._standings.told(ranks, self._serial)
        return answers

    def _take_in(
        self,
        rank: int,
        message: pb.NegotiationMessage,
        announced: Sequence[types_pb2.Operation],
        now_s: float,
        resumed: bool,
        batch: Batch,
    ) -> None:
        """All that the message says but its process sets, and of its operations the last ones, `announced`."""
        if self._takeover is not None:
            self._hear(self._takeover, rank, message)
        if resumed:
            missed = self._joining.missed(message.join.round if message.HasField("join") else None)
            if missed:
                batch.to((rank,)).joins.append(missed)
            self._recall_missed(rank, message.hello, batch)
            latest = max((error.number for error in message.hello.failed), default=0)
            batch.to((rank,)).errors.extend(self._failures.under_ids(rank, later_than=latest))
        for answer in message.recalled:
            process_set = self._sets.get(answer.process_set)
            if process_set is not None:
                process_set.ids.answered(rank, answer.ids)
                self._give_ids(process_set, batch)
            if self._takeover is not None:
                self._takeover.freed(rank, answer.process_set, answer.ids)
        if resumed:  # after its answers: an id that they have freed may mean something else in the same decisions
            self._repeat_recalls(rank, batch)
        self._announce_all(rank, announced, now_s, resumed, batch)
        if message.HasField("join") and self._sets[0].whole and (state := self._joining.receive(rank, message.join)):
            self._join_changed(state, now_s, batch)
        if self._takeover is not None:
            self._become_whole(self._takeover, now_s, batch)
        if message.HasField("blocked_report"):
            self._standings.report(rank, message.blocked_report, now_s)
        if message.blocked:
            self._blocked(rank, message, now_s, batch)
        if message.HasField("blocked_report") and self._deadlocks is not None and self._takeover is None:
            self._end_deadlock(self._deadlocks, now_s, batch)

    def forget(self, rank: int, now_s: float = 0.0) -> Answers:
        """`rank` is gone. What the others wait for with it is failed by the data plane, not here."""
        batch = Batch(self.epoch)
        self._gone.add(rank)
        self._standings.forget(rank)
        self._failures.forget_rank(rank)
        for process_set in self._sets.values():
            process_set.pending.forget_rank(rank)
            process_set.reports.forget_rank(rank)
            process_set.ids.answered(rank, process_set.ids.outstanding(rank))
            self._give_ids(process_set, batch)
        if self._takeover is not None:
            self.budget.release(rank, self._takeover.forget(rank))
            self._become_whole(self._takeover, now_s, batch)
        return self._answers(batch)

    def restart_limits(self, now_s: float) -> None:
        """The coordinator was stopped for a while (services/ticks.py): limits of seconds begin anew."""
        for process_set in self._sets.values():
            process_set.reports.restart(now_s)

    def stalls(self, now_s: float, after_s: float) -> list[Stall]:
        """Operations that some rank has waited for longer than `after_s` while others did not start them."""
        return find_stalls(self._sets, self._gone, self._joining, self._standings, now_s, after_s)

    # -- taking over ---------------------------------------------------------------------------------------------------

    def _hear(self, takeover: Takeover, rank: int, message: pb.NegotiationMessage) -> None:
        """Records which decisions of the earlier coordinator the rank knows, and which of them it has carried out."""
        join = message.join if message.HasField("join") else None
        if not takeover.awaits(rank):
            if join is not None:
                takeover.joined(rank, join)
            return
        told = read(message.hello, join, self._id_capacity)
        self.budget.charge(rank, told.bytes, "the record of an earlier coordinator")
        takeover.tell(rank, told)

    def _become_whole(self, takeover: Takeover, now_s: float, batch: Batch) -> None:
        """Lets the process sets go on of which every member has said hello."""
        for process_set in list(self._sets.values()):
            if not process_set.whole and not takeover.is_missing_any(process_set.members - self._gone):
                process_set.whole = True
                self._go_on(takeover, process_set, now_s, batch)
        if takeover.is_over():
            for rank, count in takeover.bytes().items():
                self.budget.release(rank, count)
            self._takeover = None

    def _go_on(self, takeover: Takeover, process_set: ProcessSet, now_s: float, batch: Batch) -> None:
        members = process_set.members - self._gone
        ids = takeover.ids(process_set.number, members)
        for one in ids.kept:
            process_set.ids.adopt(one)
        for one, ranks in ids.recalled.items():
            process_set.ids.adopt_recalled(one, ranks)
        for rank in sorted(members):
            if mine := process_set.ids.outstanding(rank):
                batch.to((rank,)).recalls.add(process_set=process_set.number, ids=mine)
        for rank, error in takeover.missed_errors(process_set.number, members):
            if process_set.pending.forget(rank, error.name) or error.under_id:
                batch.to((rank,)).errors.append(error)
        if process_set.number == 0:
            self._go_on_joining(takeover, process_set, members, now_s, batch)
        for name in list(process_set.pending):
            announced = process_set.pending.get(name, {})
            if announced and all(rank in announced for rank in self._joining.working(process_set)):
                self._decide(process_set, name, now_s, batch)

    def _go_on_joining(
        self, takeover: Takeover, process_set: ProcessSet, members: Collection[int], now_s: float, batch: Batch
    ) -> None:
        self._joining.restore(*takeover.rounds_over(members))
        if (behind := takeover.behind(members)) and self._joining.last_over:
            batch.to(behind).joins.append(self._joining.last_over)
            self._recall_unnamed(process_set, batch)
        state: pb.JoinState | None = None
        for rank, join in takeover.joins(members):
            state = self._joining.receive(rank, join) or state
        if state is not None:
            self._join_changed(state, now_s, batch)

    # -- process sets ------------------------------------------------------------------------------------------------

    def _change_process_set(self, rank: int, change: pb.ProcessSetChange, batch: Batch) -> None:
        number = change.process_set
        ranks = tuple(change.ranks)
        if number <= 0 or not ranks or list(ranks) != sorted(set(ranks)) or ranks[-1] >= self._size:
            raise ContradictionError(
                f"Rank {rank} speaks of process set {number} with the ranks {list(ranks[:64])}, which can't be a set "
                f"of a world of {self._size}; expected ascending ranks below that."
            )
        known = self._sets.get(number)
        if known is not None and known.ranks != ranks:
            raise ContradictionError(
                f"Rank {rank} says that process set {number} has {ranks_in_words(ranks)}, but other ranks said that "
                f"it has {ranks_in_words(known.ranks)}; all ranks must register the same sets in the same order."
            )
        if change.removed:
            if known is not None:
                self._remove_process_set(rank, known, batch)
        elif known is None and number not in self._removed:  # numbers never come back
            if len(self._sets) > MAX_PROCESS_SETS:
                raise TooMuchError(f"World {self.epoch} has more than {MAX_PROCESS_SETS} process sets.")
            self.add_process_set(number, ranks, rank)

    # -- announcements -----------------------------------------------------------------------------------------------

    def _announce_all(
        self, rank: int, ops: Iterable[types_pb2.Operation], now_s: float, resumed: bool, batch: Batch
    ) -> None:
        for op in ops:
            process_set = self._usable(rank, op, batch)
            if process_set is not None:
                self._announce(process_set, rank, op, now_s, resumed, batch)

    def _usable(self, rank: int, op: types_pb2.Operation, batch: Batch) -> ProcessSet | None:
        """The process set of `op`, or None after telling the rank what is wrong with it."""
        process_set = self._sets.get(op.process_set)
        if process_set is None and op.process_set in self._removed:
            sentence = _of_removed(self._removed[op.process_set], op.name)
        elif process_set is None:
            sentence = coded(
                OperationCode.NO_SUCH_SET,
                f"Process set {op.process_set} of {op.name[:200]} is not registered in world {self.epoch}.",
            )
        elif rank not in process_set.members:
            sentence = coded(
                OperationCode.NOT_IN_SET,
                f"Rank {rank} is not a member of the provided process set: {op.name[:200]} runs in process set "
                f"{op.process_set}, which has {ranks_in_words(process_set.ranks)}.",
            )
        else:
            sentence = looked_at(op)[0]
        if sentence:
            batch.to((rank,)).errors.add(
                process_set=op.process_set, name=op.name, sentence=printable(sentence, MAX_SENTENCE)
            )
            return None
        return process_set

    def _announce(
        self, process_set: ProcessSet, rank: int, op: types_pb2.Operation, now_s: float, resumed: bool, batch: Batch
    ) -> None:
        its_signature = looked_at(op)[1]
        key = (op.name, its_signature)
        last = self._failures.pop(rank, process_set.number, op.name)
        if last and resumed and last[0] == its_signature:
            batch.to((rank,)).errors.add(process_set=process_set.number, name=op.name, sentence=last[1])
            return
        if not process_set.whole:
            process_set.pending.put(rank, op, its_signature, now_s)
            return
        joined = self._joining.joined(process_set)
        if joined and (sentence := self._joining.refusal(op)):
            self._fail(process_set, op.name, sentence, {rank: its_signature}, batch)
            return
        announced = process_set.pending.get(op.name)
        if announced is None:
            live = process_set.ids.live(key)
            if live is not None:
                batch.to((rank,)).plans.add(process_set=process_set.number, name=op.name, id=live)
                return
            if key in process_set.agreed:
                return
        elif rank in announced and announced[rank].signature == its_signature:
            return
        process_set.pending.put(rank, op, its_signature, now_s)
        announced = process_set.pending[op.name]
        process_set.reports.forget(rank, op.name)
        complete = len(announced) == len(process_set.ranks)
        if complete or (joined and all(one in announced for one in self._joining.working(process_set))):
            self._decide(process_set, op.name, now_s, batch)

    def _decide(self, process_set: ProcessSet, name: str, now_s: float, batch: Batch) -> None:
        announced = process_set.pending.pop(name)
        process_set.reports.answered(name, now_s)
        ops = {rank: one.op for rank, one in announced.items()}
        if len({one.signature for one in announced.values()}) == 1:
            # Equal signatures pass every comparison; what is left holds for each operation alone.
            first = min(ops)
            sentence = disagreement({first: ops[first]}, process_set.ranks) and disagreement(ops, process_set.ranks)
        else:
            sentence = disagreement(ops, process_set.ranks)
        if sentence:
            counts = counts_in_words(
                [(process_set.number, name)],
                lambda _: announced,
                lambda rank: self._standings.of(rank, now_s),
                all_announced=True,
            )
            sentence = with_counts(sentence, counts)
            self._fail(process_set, name, sentence, {rank: one.signature for rank, one in announced.items()}, batch)
            return
        payer, one = max(announced.items(), key=lambda item: item[1].bytes)
        agreed = Agreed(one.op, payer, one.bytes)
        self.budget.keep(payer, agreed.bytes)
        process_set.agreed[name, one.signature] = agreed
        self._give_ids(process_set, batch)

    def _fail(
        self,
        process_set: ProcessSet,
        name: str,
        sentence: str,
        signatures: dict[int, Signature],
        batch: Batch,
        under_id: bool = False,
    ) -> None:
        """signatures: what ranks announced. under_id: as in OperationError; the caller then calls `_recall_named`."""
        error = pb.OperationError(process_set=process_set.number, name=name, sentence=sentence, under_id=under_id)
        batch.to(process_set.ranks).errors.append(self._failures.told(process_set.ranks, error, signatures))

    # -- ids ---------------------------------------------------------------------------------------------------------

    def _give_ids(self, process_set: ProcessSet, batch: Batch) -> None:
        """Ids for agreed operations, oldest first; starts a recall when there are none."""
        while process_set.agreed:
            key, agreed = next(iter(process_set.agreed.items()))
            number = process_set.ids.live(key)
            if number is None:
                number = process_set.ids.assign(key, agreed.payer)
            if number is None:
                recalled = process_set.ids.recall(process_set.ranks)
                if recalled:
                    batch.to(process_set.ranks).recalls.add(process_set=process_set.number, ids=recalled)
                return
            del process_set.agreed[key]
            self.budget.release(agreed.payer, agreed.bytes)
            batch.to(self._joining.working(process_set)).plans.add(
                process_set=process_set.number, name=key[0], id=number
            )
            for rank in self._joining.joined(process_set):
                batch.to((rank,)).plans.add(process_set=process_set.number, name=key[0], id=number, operation=agreed.op)

        if recalled := process_set.ids.recall_unrepeated(process_set.ranks):
            batch.to(process_set.ranks).recalls.add(process_set=process_set.number, ids=recalled)
        if process_set.ids.unrepeated:
            names = ", ".join(user_name(name)[:MAX_NAME_SHOWN] for name in process_set.ids.unrepeated)
            process_set.ids.unrepeated = []
            batch.to((process_set.ranks[0],)).warnings.append(printable(_UNREPEATED.format(names=names), MAX_SENTENCE))

    def _repeat_recalls(self, rank: int, batch: Batch) -> None:
        for process_set in self._sets.values():
            if ids := process_set.ids.outstanding(rank):
                batch.to((rank,)).recalls.add(process_set=process_set.number, ids=ids)

    # -- ranks that have joined ----------------------------------------------------------------------------------------

    def _join_changed(self, state: pb.JoinState, now_s: float, batch: Batch) -> None:
        process_set = self._sets[0]
        batch.to(process_set.ranks).joins.append(state)
        if state.phase == pb.JOIN_PHASE_OVER:
            # The ranks number their unnamed operations anew, and a joined rank did not count the operations of the
            # others. So nothing that was named by the old numbers may remain.
            self._failures.forget_set(0)
            self._recall_unnamed(process_set, batch)
            return
        for name in list(process_set.pending):
            announced = process_set.pending[name]
            one = next(iter(announced.values()))
            if sentence := self._joining.refusal(one.op):
                process_set.pending.pop(name)
                signatures = {rank: each.signature for rank, each in announced.items()}
                self._fail(process_set, name, sentence, signatures, batch)
            elif all(rank in announced for rank in self._joining.working(process_set)):
                self._decide(process_set, name, now_s, batch)

    def _recall_missed(self, rank: int, hello: pb.Hello, batch: Batch) -> None:
        """A joined rank announces nothing, and may have lost with its stream what the others agreed on.

        The ids that it does not know are recalled, so that the others announce these operations again.
        """
        process_set = self._sets[0]
        if rank in self._joining.joined(process_set):
            known = {one for ids in hello.known if ids.process_set == 0 for one in ids.ids}
            if missed := process_set.ids.recall_but(known, process_set.ranks):
                batch.to(process_set.ranks).recalls.add(process_set=0, ids=missed)

    def _recall_unnamed(self, process_set: ProcessSet, batch: Batch) -> None:
        """Recalls unnamed operations, and those of an earlier coordinator, which may be unnamed too."""
        unnamed = process_set.ids.recall_all(process_set.ranks, lambda key: is_unknown(key) or is_unnamed(key[0]))
        if unnamed:
            batch.to(process_set.ranks).recalls.add(process_set=0, ids=unnamed)

    # -- ranks that wait for different things --------------------------------------------------------------------------

    def _blocked(self, rank: int, message: pb.NegotiationMessage, now_s: float, batch: Batch) -> None:
        touched: dict[tuple[int, str], None] = {}
        seconds, numbers = message.blocked_seconds, message.blocked_numbers
        for index in range(max(0, len(message.blocked) - MAX_BLOCKED), len(message.blocked)):
            op = message.blocked[index]
            process_set = self._sets.get(op.process_set)
            if process_set is not None and rank in process_set.members and not defect(op):
                waited_s = seconds[index] if index < len(seconds) else 0.0
                submission = numbers[index] if index < len(numbers) else 0
                process_set.reports.add(rank, op, now_s, waited_s, submission)
                touched[op.process_set, user_name(op.name)] = None
        for number, user in touched:
            process_set = self._sets[number]
            if not process_set.whole:
                continue
            found = blocked.find(
                number,
                user,
                self._joining.working(process_set),
                process_set.reports,
                self._standings,
                now_s,
                deadlocks=self._deadlocks is not None,
            )
            for name in found.names if found else ():
                assert found is not None
                signatures = {member: one.signature for member, one in process_set.pending.pop(name).items()}
                for member in process_set.ranks:
                    if report := process_set.reports.of(user).get(member, {}).get(name):
                        signatures.setdefault(member, report.signature)
                process_set.reports.answered(name, now_s)
                self._fail(process_set, name, found.sentence, signatures, batch, under_id=True)
            if found:
                self._recall_named(process_set, found.names, batch)

    def _recall_named(self, process_set: ProcessSet, names: Collection[str], batch: Batch) -> None:
        """Recalls the ids under which ranks may have started operations that have just failed. Under such an id a rank
        that goes on would complete what another rank waits for: that one would get a result and no error.
        """
        if ids := process_set.ids.recall_named(names, process_set.ranks):
            batch.to(process_set.ranks).recalls.add(process_set=process_set.number, ids=ids)

    def _end_deadlock(self, deadlocks: DeadlockDetector, now_s: float, batch: Batch) -> None:
        """Ends a deadlock, but not while this coordinator takes over: then it is not known which ranks have joined."""

        def members(number: int) -> tuple[int, ...]:
            process_set = self._sets.get(number)
            return self._joining.working(process_set) if process_set is not None else ()

        found = deadlocks.find(members, now_s)
        if found is None:
            return
        batch.at_once()
        names: dict[int, set[str]] = {}
        for number, name in found.operations:
            names.setdefault(number, set()).add(name)
            process_set = self._sets[number]
            announced = process_set.pending.pop(name)
            process_set.reports.answered(name, now_s)
            signatures = {rank: one.signature for rank, one in announced.items()}
            self._fail(process_set, name, found.sentence, signatures, batch, under_id=True)
        for number, ended in names.items():
            self._recall_named(self._sets[number], ended, batch)
