"""What a framework must say of its tensors, so that everything else about an operation can be written once.

    read      reader, view      where a tensor's memory is: in C for the framework's own types, else in Python
              dtype, shape      and device, for the checks that come before
    result    allocate          a tensor for a result whose size is known before
              adopt             a tensor on memory that the engine has allocated for a result
    order     current_stream    on a GPU: tensors are ready when the work queued there by now is done, and a result is
                                there for work that is queued there later

An adapter is one object of these. It keeps no state, and all threads may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from horovod._core import Output, TensorReader

T = TypeVar("T")

# Input address, output address (0: the engine allocates the result), dtype, shape; on a GPU its number and a stream.
Span: TypeAlias = tuple[int, int, int, tuple[int, ...]] | tuple[int, int, int, tuple[int, ...], int, int]


class Indirect(Exception):  # noqa: N818  (it is always caught)
    """The engine can't read the values of a tensor where they lie, but another tensor, its stand-in, can travel for it.

    `stand_in` makes the stand-in, and a function that makes of its result what the result of the tensor is. The engine
    writes to a stand-in only in operations that are in place; then the function writes the result to the tensor, which
    it returns. by_rows: the operation takes and gives rows, so that a scalar must stay one, and be refused.
    `stand_in` raises ValueError if it is to be in place and several elements of the tensor have one place in memory.
    """

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__("a stand-in must travel for this tensor")
        self.stand_in = stand_in


class StandIn(Protocol):
    def __call__(self, *, in_place: bool = False, by_rows: bool = False) -> tuple[Any, Callable[[Any], Any]]: ...


class Framework(Protocol[T]):
    """The adapter of a framework whose tensors are `T`."""

    @property
    def reader(self) -> TensorReader:
        """How the engine reads tensors without Python; its `describe` is `view`."""

    def view(self, tensor: T) -> Span:
        """Where a tensor is that its result replaces (input and output address are the same).

        Raises ValueError, with what to do, for what the engine can't take: no tensor, another layout, an unknown dtype,
        a device that it can't reach. Raises Indirect for what a stand-in can travel for.
        """

    # The next three raise ValueError for an object that is no tensor, and refuse nothing else.
    def dtype(self, tensor: T) -> int | None:
        """The engine's dtype; None: it has no such."""

    def shape(self, tensor: T) -> tuple[int, ...]: ...

    def device(self, tensor: T) -> Hashable:
        """Equal for tensors on one device; str() of it is a name for people."""

    def allocate(self, tensor: T, *, filled: bool = False) -> T:
        """A new tensor of the same shape, dtype and device; with `filled`, of the same values. No gradient is recorded.

        Raises ValueError as `view`.
        """

    def adopt(self, output: Output | T) -> T:
        """A tensor on memory that the engine allocated, without a copy; the tensor keeps the memory alive.

        Where `reader` makes tensors of results, `output` is such a tensor already.
        """

    def current_stream(self, device: int) -> int:
        """The handle of the stream on which the framework queues this thread's work on GPU `device`."""
