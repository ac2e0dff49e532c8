"""Operations of several tensors that complete together: none begins before all are ready on all ranks.

One operation of the engine carries one dtype, so a group with several dtypes is several operations behind one handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from horovod._core import Handle, OpSpec
from horovod.base.errors import OperationCode, coded
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops.collectives import ALLGATHER, Collectives, named, stand_in
from horovod.common.ops.framework import Indirect
from horovod.common.ops.handles import AnyHandle, PartedHandle
from horovod.common.ops.specs import set_number, spec
from horovod.common.process_sets import ProcessSet
from horovod.worker.runtime.context import current

T = TypeVar("T")


class GroupedCollectives(Collectives[T]):
    """Collectives, and their grouped forms. The methods return handles; `wait` is for calls that wait."""

    def wait(self, start: Callable[..., AnyHandle], *arguments: Any) -> tuple[T, ...]:
        """The result of a grouped operation, for which nothing but this is called."""
        handle = start(*arguments, wait_follows=True)
        result: tuple[T, ...] = (
            handle.result(self.framework.current_stream) if isinstance(handle, PartedHandle) else handle.result()
        )
        return result

    def start_allreduces(
        self,
        tensors: Iterable[T],
        in_place: bool,
        op: int,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        wait_follows: bool = False,
    ) -> AnyHandle:
        tensors = tuple(tensors)
        self._check_one_device(tensors)
        made = [self.reduction(tensor, op, prescale, postscale, process_set) for tensor in tensors]
        try:
            self._check(tensors, "grouped_allreduce", name)
        except Indirect:
            travelling, finish = self._stand_ins(tensors, _wire("grouped_allreduce", name) if in_place else "")
            arguments = (in_place, op, name, prescale, postscale, process_set, wait_follows)
            return PartedHandle((self.start_allreduces(travelling, *arguments),), finish)
        outputs = tensors if in_place else tuple(self._allocate(tensor) for tensor in tensors)
        given: Sequence[Any] = tensors if in_place else tuple(zip(tensors, outputs, strict=True))

        def start_part(wire: str, indices: Sequence[int]) -> Handle:
            part = tuple(outputs[index] for index in indices)
            return current().engine.submit(
                made[indices[0]],
                wire,
                [given[index] for index in indices],
                (part, tensors),
                self._reader,
                None,
                lambda _: part,
                wait_follows,
            )

        return self._start_parts(tensors, _wire("grouped_allreduce", name), start_part)

    def start_allgathers(
        self, tensors: Iterable[T], name: str | None, process_set: ProcessSet, wait_follows: bool = False
    ) -> AnyHandle:
        tensors = tuple(tensors)
        self._check_one_device(tensors)
        try:
            self._check(tensors, "grouped_allgather", name)
        except Indirect:
            travelling, finish = self._stand_ins(tensors, by_rows=True)
            return PartedHandle((self.start_allgathers(travelling, name, process_set, wait_follows),), finish)
        made = [spec(ALLGATHER, set_number(process_set, "Allgather"))] * len(tensors)
        return self._start_to_adopt_all(made, tensors, _wire("grouped_allgather", name), wait_follows)

    def start_reducescatters(
        self,
        tensors: Iterable[T],
        op: int,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        wait_follows: bool = False,
    ) -> AnyHandle:
        tensors = tuple(tensors)
        self._check_one_device(tensors)
        made = [self.scattered_reduction(tensor, op, prescale, postscale, process_set) for tensor in tensors]
        try:
            self._check(tensors, "grouped_reducescatter", name)
        except Indirect:
            travelling, finish = self._stand_ins(tensors)
            arguments = (op, name, prescale, postscale, process_set, wait_follows)
            return PartedHandle((self.start_reducescatters(travelling, *arguments),), finish)
        return self._start_to_adopt_all(made, tensors, _wire("grouped_reducescatter", name), wait_follows)

    def _start_to_adopt_all(
        self, made: Sequence[OpSpec], tensors: Sequence[T], wire: str, wait_follows: bool
    ) -> AnyHandle:
        adopt = self._adopt

        def start_part(wire: str, indices: Sequence[int]) -> Handle:
            return current().engine.submit(
                made[indices[0]],
                wire,
                [(tensors[index], None) for index in indices],
                tensors,
                self._reader,
                None,
                lambda outputs: tuple(adopt(output) for output in outputs),
                wait_follows,
            )

        return self._start_parts(tensors, wire, start_part)

    def _check_one_device(self, tensors: Sequence[T]) -> None:
        """A grouped call moves all its tensors together, so they must live on one device."""
        devices = {self.framework.device(tensor) for tensor in tensors}
        if len(devices) > 1:
            found = ", ".join(sorted(str(device) for device in devices))
            raise HorovodInternalError(
                coded(OperationCode.SEVERAL_DEVICES, f"Tensors in list must be on same device. Found: {found}.")
            )

    def _check(self, tensors: Sequence[T], operation: str, name: str | None) -> None:
        """Refuses what can't travel before any part is on its way."""
        view = self._view
        try:
            for tensor in tensors:
                view(tensor)
        except ValueError as refusal:
            raise named(refusal, operation, name) from None

    def _stand_ins(
        self, tensors: Sequence[T], in_place: str = "", by_rows: bool = False
    ) -> tuple[list[T], Callable[[list[Any]], tuple[T, ...]]]:
        """What travels for each tensor, and what makes of the results, in a list of one, those of `tensors`."""
        view = self._view
        pairs: list[tuple[T, Callable[[T], T]]] = []
        for tensor in tensors:
            try:
                view(tensor)
                pairs.append((tensor, _itself))
            except Indirect as indirect:
                pairs.append(stand_in(indirect, in_place, by_rows))

        def finish(results: list[Any]) -> tuple[T, ...]:
            return tuple(end(result) for (_, end), result in zip(pairs, results[0], strict=True))

        return [travelling for travelling, _ in pairs], finish

    def _start_parts(
        self, tensors: Sequence[T], wire: str, start_part: Callable[[str, Sequence[int]], Handle]
    ) -> AnyHandle:
        """One operation for each dtype, in order of appearance, behind one handle with the results in tensors' order.

        The first part has the name itself, so that ranks which differ in dtype still meet and are told of it.
        """
        by_dtype: dict[int | None, list[int]] = {}
        dtype_of = self.framework.dtype
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(dtype_of(tensor), []).append(index)
        parts = list(by_dtype.values())
        if len(parts) == 1:
            return start_part(wire, parts[0])
        if not parts:
            current()  # an empty group has nothing to wait for, but is an error before init like any other
        handles = [start_part(part_name(wire, part, len(parts)), indices) for part, indices in enumerate(parts)]

        def in_order(results: list[Any]) -> tuple[Any, ...]:
            found = {
                index: value
                for indices, values in zip(parts, results, strict=True)
                for index, value in zip(indices, values, strict=True)
            }
            return tuple(found[index] for index in range(len(found)))

        return PartedHandle(handles, in_order)


def _itself(tensor: T) -> T:
    return tensor


def _wire(operation: str, name: str | None) -> str:
    return f"{operation}.{'noname' if name is None else name}"


def part_name(wire: str, part: int, count: int) -> str:
    if part == 0:
        return wire
    # The engine recognizes an unnamed operation, which may overlap with its like, by this ending.
    ending = ".noname" if wire.endswith(".noname") else ""
    return f"{wire.removesuffix(ending)}.{part + 1}of{count}{ending}"
