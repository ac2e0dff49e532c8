"""The process group of the backend: torch.distributed's calls, as operations of the engine on a set of ranks.

torch.distributed gives operations no names: the n-th operation of a kind in a group is the same on all its members. So
they are unnamed operations of the engine (ADR 4). Tensors travel as they lie in memory; one that is not contiguous
travels as a copy. Where the engine allocates a result (allgather, alltoall, reducescatter) it is copied to the tensor
that the caller gave.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Final, NoReturn, TypeAlias

import torch
import torch.distributed

from horovod._core import OpSpec, OpType, ReduceOp
from horovod.base.errors import EngineCode, OperationCode, coded
from horovod.common import basics
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.distributed.groups import Members, members_of
from horovod.torch.distributed.works import Done, Later, Limit, UnderWay, backend_error
from horovod.torch.tensors import DTYPE_CODES, READER, stand_in
from horovod.worker.runtime.context import current, is_member

dist: Final[Any] = torch.distributed  # its stubs do not say all that its C++ classes have
Work: TypeAlias = Any  # a dist.Work
Tensor: TypeAlias = torch.Tensor
_Op: Final[Any] = dist.ReduceOp

# The engine's reduction for each number of torch's. The engine lacks torch's other reductions: see _BITWISE for three
# of them, and `_reduction` for PREMUL_SUM.
_REDUCTIONS: Final = {
    int(_Op.SUM): ReduceOp.SUM,
    int(_Op.AVG): ReduceOp.AVERAGE,
    int(_Op.PRODUCT): ReduceOp.PRODUCT,
    int(_Op.MIN): ReduceOp.MIN,
    int(_Op.MAX): ReduceOp.MAX,
}
_BITWISE: Final[dict[int, Callable[[Tensor, Tensor], Tensor]]] = {
    int(_Op.BAND): torch.bitwise_and,
    int(_Op.BOR): torch.bitwise_or,
    int(_Op.BXOR): torch.bitwise_xor,
}
_PREMUL_SUM: Final = int(_Op.PREMUL_SUM)
_SCATTERED: Final = {int(_Op.SUM), int(_Op.AVG), _PREMUL_SUM}  # those that the engine's reducescatter knows
_NAMES: Final[dict[int, str]] = {kind: f"{kind.name.lower()}.dist.noname" for kind in OpType}


def make_group(options: Any, backend_options: object = None) -> HorovodGroup:
    """The factory that torch calls on each member of a new group; options: a c10d _DistributedBackendOptions."""
    del backend_options
    return HorovodGroup(options.store, members_of(options), options.timeout)


class HorovodGroup(dist.ProcessGroup):  # type: ignore[misc]
    """One group, on one of its members."""

    def __init__(self, store: Any, members: Members, timeout: timedelta) -> None:
        super().__init__(members.rank, members.size)
        self._store = store
        self._members = members
        self._later = Later()
        self._context = current()
        self._engine: Any = self._context.engine
        world = self._context.world
        self._limit = Limit(members.description, world.label(world.rank), self._engine.abort, timeout)
        self._limit.begin()
        # The place in the set of each member of the group; the set is in the order of the world's ranks.
        in_order = sorted(members.ranks)
        self._places = [in_order.index(rank) for rank in members.ranks]
        self._is_in_order = self._places == list(range(members.size))
        self._specs: dict[tuple[int, ...], OpSpec] = {}
        self._done = Done()
        _groups.add(self)

    def leave_to_parent(self) -> None:
        """In a forked child: the memory of its parent's engine is not to be touched."""
        self._engine = _ParentsEngine()

    # -- what torch asks of a group ------------------------------------------------------------------------------------
    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "horovod"

    def getGroupName(self) -> str:  # noqa: N802
        return self._members.name

    group_name = property(getGroupName)

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes. dcp.async_save, for example, wants the CPU to be among them."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> HorovodGroup:
        """This group; torch's own groups have a backend for each type of device."""
        del device
        return self

    def get_group_store(self) -> Any:
        """The key-value store of the group."""
        return self._store

    def shutdown(self) -> None:
        """Leaves the group; operations under way in it fail. The world ends with the default group that began it."""
        self._later.close()
        self._limit.close()
        if not is_member() or current() is not self._context:
            return
        if not self._members.is_world:
            self._context.process_sets.dissolve(self._members.number)
        elif self._members.began_world:
            basics.shutdown()

    def abort(self) -> None:
        self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit.timeout = timeout

    _set_default_timeout = set_timeout

    # -- reductions ----------------------------------------------------------------------------------------------------
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        number = _number(opts)
        if number in _BITWISE:
            return self._bitwise(tensors, _BITWISE[number])
        spec = self._reduction(OpType.ALLREDUCE, number, opts)
        if not getattr(opts, "asyncOp", True) and len(tensors) == 1:
            return self._run_in_place(spec, tensors[0], "all_reduce")
        return self._start_in_place(spec, tensors, "all_reduce")

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Reduces as all_reduce does. Ranks other than the root keep their own values, which torch leaves undefined."""
        tensor = tensors if isinstance(tensors, Tensor) else tensors[0]
        mine = tensor if opts.rootRank == self._members.rank else tensor.clone()
        return self.allreduce([mine], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        output, parts = (outputs, inputs) if isinstance(outputs, Tensor) else (outputs[0], inputs[0])
        if len({part.shape for part in parts}) > 1:
            return self._reduce_scatter_of_unequal(output, parts, opts)
        return self.reduce_scatter_single(output, torch.stack(list(parts)), opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        number = _number(opts)
        if output.numel() * self._members.size != source.numel():
            raise ValueError(
                coded(
                    OperationCode.INVALID,
                    f"reduce_scatter_tensor in {self._members.description}: the input has {source.numel()} elements, "
                    f"which must be those of the output, {output.numel()}, times the {self._members.size} ranks.",
                )
            )
        if number not in _SCATTERED:
            return self._reduce_scatter_by_allreduce(output, source, opts)
        rows = self._rows(source)
        spec = self._reduction(OpType.REDUCESCATTER, number, opts)

        def finish(received: list[Any]) -> None:
            _fill([output], _tensor(received[0]))

        return self._start(spec, [(rows, None)], "reduce_scatter", finish, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return _Several([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter_by_allreduce(self, output: Tensor, source: Tensor, opts: Any) -> Work:
        reduced = source.detach().reshape(self._members.size, -1).clone()
        self.allreduce([reduced], opts).wait()
        _fill([output], reduced[self._members.rank])
        return Done([output])

    def _reduce_scatter_of_unequal(self, output: Tensor, parts: Sequence[Tensor], opts: Any) -> Work:
        reduced = [part.detach().clone() for part in parts]
        self.allreduce(reduced, opts).wait()
        _fill([output], reduced[self._members.rank])
        return Done([output])

    def _bitwise(self, tensors: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Work:
        """The engine has no bitwise reductions, and few programs do: each rank combines what all have."""
        for tensor in tensors:
            everyone = [torch.empty_like(tensor) for _ in range(self._members.size)]
            self.allgather([everyone], [tensor]).wait()
            combined = everyone[0]
            for other in everyone[1:]:
                combined = combine(combined, other)
            tensor.copy_(combined)
        return Done(tensors)

    # -- one to all, all to one, all to all ----------------------------------------------------------------------------
    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        root = opts if isinstance(opts, int) else opts.rootRank
        spec = self._spec(OpType.BROADCAST, self._members.ranks[root])
        if not getattr(opts, "asyncOp", True) and len(tensors) == 1:
            return self._run_in_place(spec, tensors[0], "broadcast")
        return self._start_in_place(spec, tensors, "broadcast")

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        outputs, source = (outputs, inputs) if isinstance(inputs, Tensor) else (outputs[0], inputs[0])
        return self._allgather(outputs, source, "all_gather")

    def allgather_coalesced(self, output_lists: Any, inputs: Sequence[Tensor], opts: Any = None) -> Work:
        lists = [list(outputs) for outputs in zip(*output_lists, strict=True)] if output_lists else []
        return _Several([self.allgather(*pair, opts) for pair in zip(lists, inputs, strict=True)])

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        if output.numel() != source.numel() * self._members.size:
            raise ValueError(
                coded(
                    OperationCode.INVALID,
                    f"all_gather_into_tensor in {self._members.description}: the output has {output.numel()} elements, "
                    f"which must be those of the input, {source.numel()}, times the {self._members.size} ranks.",
                )
            )
        parts = output.reshape(self._members.size, -1)
        outputs = [output] if self._is_in_order or parts.data_ptr() != output.data_ptr() else list(parts)
        return self._allgather(outputs, source, "all_gather_into_tensor", whole=len(outputs) == 1)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return _Several([self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        source = inputs if isinstance(inputs, Tensor) else inputs[0]
        root = opts if isinstance(opts, int) else opts.rootRank
        targets = list(outputs[0] if outputs and not isinstance(outputs[0], Tensor) else outputs)
        counts = [0] * self._members.size
        counts[root] = source.numel()
        at_root = root == self._members.rank
        return self._exchange([source], counts, targets if at_root else [], "gather")

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        output = outputs if isinstance(outputs, Tensor) else outputs[0]
        root = opts if isinstance(opts, int) else opts.rootRank
        parts = list(inputs[0] if inputs and not isinstance(inputs[0], Tensor) else inputs)
        if root != self._members.rank:
            parts = []
        counts = [part.numel() for part in parts] or [0] * self._members.size
        return self._exchange(parts or [output.new_empty(0)], counts, [output], "scatter")

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        return self._exchange(list(inputs), [one.numel() for one in inputs], list(outputs), "all_to_all")

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        size = self._members.size
        width = source[:1].numel() if source.dim() else 1
        if input_splits:
            counts = [rows * width for rows in input_splits]
        elif source.numel() % size:
            raise ValueError(
                coded(
                    OperationCode.INVALID,
                    f"all_to_all_single in {self._members.description}: the input's {source.numel()} elements can't be "
                    f"split evenly over {size} ranks. Give input_split_sizes.",
                )
            )
        else:
            counts = [source.numel() // size] * size
        if sum(counts) != source.numel():
            raise ValueError(
                coded(
                    OperationCode.INVALID,
                    f"all_to_all_single in {self._members.description}: input_split_sizes {list(input_splits)} must "
                    f"sum up to the first dimension of the input, of shape {list(source.shape)}.",
                )
            )
        parts = [source] if self._is_in_order else _cut(source.reshape(-1), counts)
        targets = [output]
        if not self._is_in_order:
            deep = output[:1].numel() if output.dim() else 1
            sizes = [rows * deep for rows in output_splits] or [output.numel() // size] * size
            targets = _cut(output.view(-1), sizes)
        return self._exchange(parts, counts, targets, "all_to_all_single")

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, *_: Any) -> Work:
        spec = self._spec(OpType.BARRIER)
        if not getattr(opts, "asyncOp", True):
            return self._run(spec, (), None, "barrier")
        return self._start(spec, [], "barrier", None, [])

    # -- point to point ------------------------------------------------------------------------------------------------
    def send(self, *_: Any) -> NoReturn:
        self._refuse_point_to_point("dist.send and dist.isend")

    def recv(self, *_: Any) -> NoReturn:
        self._refuse_point_to_point("dist.recv and dist.irecv")

    recv_anysource = recv

    def _refuse_point_to_point(self, what: str) -> NoReturn:
        raise NotImplementedError(
            coded(
                OperationCode.INVALID,
                f"The backend horovod has no point-to-point operations yet ({what}, in {self._members.description}). "
                "Use collectives, or a group of another backend for them: dist.new_group(backend='gloo').",
            )
        )

    # -- to the engine -------------------------------------------------------------------------------------------------
    def _spec(self, kind: OpType, root: int = 0) -> OpSpec:
        key = (kind, root)
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = OpSpec(kind, root=root, process_set=self._members.number)
        return spec

    def _reduction(self, kind: OpType, number: int, opts: Any) -> OpSpec:
        """number: of torch's reduction."""
        if number == _PREMUL_SUM:  # what each rank has counts times a factor of its own
            factor = opts.reduceOp.factor
            factor = float(factor.item() if isinstance(factor, Tensor) else factor)
            return OpSpec(kind, op=ReduceOp.SUM, prescale=factor, process_set=self._members.number)
        key = (kind, -1, number)
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = OpSpec(kind, op=_REDUCTIONS[number], process_set=self._members.number)
        return spec

    def _run_in_place(self, spec: OpSpec, tensor: Tensor, what: str) -> Work:
        if not _travels_itself(tensor):
            return self._start_in_place(spec, [tensor], what)
        return self._run(spec, (tensor,), tensor, what)

    def _run(self, spec: OpSpec, tensors: Sequence[Tensor], keep: Tensor | None, what: str) -> Work:
        self._limit.running = monotonic(), what
        try:
            self._engine.run(spec, _NAMES[spec.type], tensors, keep, READER)
        except HorovodInternalError as error:
            raise backend_error(what, self._members.description, error) from error
        finally:
            self._limit.running = None
        return self._done

    def _start_in_place(self, spec: OpSpec, tensors: Sequence[Tensor], what: str) -> Work:
        handles, restore = [], []
        for tensor in tensors:
            travelling, back = (tensor, None) if _travels_itself(tensor) else stand_in(tensor, in_place=True)
            handles.append(self._submit(spec, [travelling], what))
            if back is not None:
                restore.append((back, travelling))

        def finish(_: list[Any]) -> None:
            for back, travelled in restore:
                back(travelled)

        return self._under_way(what, handles, finish if restore else None, tensors)

    def _start(
        self,
        spec: OpSpec,
        tensors: list[Any],
        what: str,
        finish: Callable[[list[Any]], None] | None,
        outputs: Sequence[Tensor],
        splits: Sequence[int] | None = None,
    ) -> Work:
        handle = self._submit(spec, tensors, what, splits)
        return self._under_way(what, [handle], finish, outputs)

    def _under_way(
        self, what: str, handles: Sequence[Any], finish: Callable[[list[Any]], None] | None, outputs: Sequence[Tensor]
    ) -> Work:
        work = UnderWay(what, self._members.description, handles, finish, outputs, self._later)
        self._limit.watch(work)
        return work

    def _submit(self, spec: OpSpec, tensors: list[Any], what: str, splits: Sequence[int] | None = None) -> Any:
        try:
            return self._engine.submit(spec, _NAMES[spec.type], tensors, None, READER, splits)
        except HorovodInternalError as error:
            raise backend_error(what, self._members.description, error) from error

    def _rows(self, source: Tensor) -> Tensor:
        """A contiguous tensor of a row for each member, in the order of the set."""
        rows = _flat(source).view(self._members.size, -1)
        if self._is_in_order:
            return rows
        arranged = torch.empty_like(rows)
        arranged[self._places] = rows
        return arranged

    def _allgather(self, outputs: Sequence[Tensor], source: Tensor, what: str, whole: bool = False) -> Work:
        flat = _flat(source)

        def finish(received: list[Any]) -> None:
            everything = _tensor(received[0])
            if whole:
                _fill(outputs, everything)
                return
            # Each member's part has the size of its own tensor, which the outputs tell.
            sizes = [0] * len(outputs)
            for place, output in zip(self._places, outputs, strict=True):
                sizes[place] = _numbers(output)
            parts = _cut(everything, sizes)
            for place, output in zip(self._places, outputs, strict=True):
                _fill([output], parts[place])

        return self._start(self._spec(OpType.ALLGATHER), [(flat, None)], what, finish, outputs)

    def _exchange(self, parts: list[Tensor], counts: Sequence[int], targets: list[Tensor], what: str) -> Work:
        """Sends counts[i] elements of `parts` to member i, and writes the elements that arrive to `targets`."""
        factor = 2 if parts[0].is_complex() else 1
        splits = [0] * self._members.size
        for place, count in zip(self._places, counts, strict=True):
            splits[place] = count * factor
        if not self._is_in_order and len(parts) > 1:
            by_place = dict(zip(self._places, parts, strict=True))
            parts = [by_place[place] for place in range(len(parts))]
        flat = _flat(parts[0]) if len(parts) == 1 else torch.cat([_flat(part) for part in parts])
        in_order = targets
        if not self._is_in_order and len(targets) == self._members.size:
            by_place = dict(zip(self._places, targets, strict=True))
            in_order = [by_place[place] for place in range(len(targets))]

        def finish(received: list[Any]) -> None:
            rows, _ = received[0]
            _fill(in_order, _tensor(rows))

        return self._start(self._spec(OpType.ALLTOALL), [(flat, None)], what, finish, targets, splits)


class _ParentsEngine:
    """In place of the engine in a forked child, which has its parent's groups but is no rank."""

    def __getattr__(self, name: str) -> NoReturn:
        current()  # raises ValueError, which says so, unless the child is in a world of its own
        sentence = f"This group belongs to the process from which this one (pid {os.getpid()}) was forked."
        raise ValueError(coded(EngineCode.FORKED_CHILD, sentence))


_groups: weakref.WeakSet[HorovodGroup] = weakref.WeakSet()


def _after_fork() -> None:
    for group in _groups:
        group.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


class _Several(dist.Work):  # type: ignore[misc]
    """Some operations that one call has started."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait() if timeout is None else work.wait(timeout) for work in self._works)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda all_of_them: [tensor for one in all_of_them.value() for tensor in one.value()]
        )


def _number(opts: Any) -> int:
    """Of the reduction that a call asks for."""
    op = getattr(opts, "reduceOp", opts)
    return int(_Op.SUM) if op is None else int(op.op) if isinstance(op, _Op) else int(op)


def _travels_itself(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPE_CODES and tensor.is_contiguous() and not tensor.is_neg()


def _flat(tensor: Tensor) -> Tensor:
    """The values in one dimension, as they travel: of a complex tensor the pairs of numbers."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _numbers(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _tensor(received: Any) -> Tensor:
    from horovod.torch.tensors import TorchFramework

    one = received[0] if isinstance(received, (list, tuple)) else received
    return TorchFramework.adopt(one).view(-1)


def _cut(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = itertools.accumulate(sizes)
    return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _fill(targets: Sequence[Tensor], flat: Tensor) -> None:
    """Copies the values of `flat` to the targets, one after the other."""
    with torch.no_grad():
        begin = 0
        for target in targets:
            count = _numbers(target)
            values = flat[begin : begin + count]
            begin += count
            if target.is_complex():
                values = torch.view_as_complex(values.view(-1, 2))
            target.copy_(values.view(target.shape))
