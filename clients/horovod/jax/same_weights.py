"""Comparisons of what ranks train (common/counted_weights.py) around the reduction of a step's gradients.

Outside of compiled functions they are made at once. In one there are no values when JAX traces it, so the step gets two
calls of XLA: one before the reductions, which has the weights and the state as its arguments, and one behind them
(csrc/jax/comparison.h). Both have the ordered effect of the collectives, so they run in the order of the program.

XLA may reuse the memory of what it has given to the first call once that has returned, and updates weights in place.
So the first one reads all, and keeps digests.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import numpy as np
from jax._src.core import trace_state_clean
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from horovod.common.counted_weights import CountedWeights, Thing, of_model
from horovod.common.gradients import Reduction
from horovod.common.ops.questions import when_joined
from horovod.common.optimizer_numbers import Made, Order
from horovod.common.process_sets import ProcessSet
from horovod.common.same_weights import Kind
from horovod.jax.arrays import DTYPE_CODES
from horovod.jax.library import register
from horovod.jax.primitive import EFFECT, TYPED_FFI, in_rows, number_attribute
from horovod.jax.trees import names_of

__all__ = ["compared"]

TARGET: Final = "horovod_same_weights"

_INVALID_ARGUMENT: Final = 3  # of absl::StatusCode
_UNKNOWN: Final = 2


@contextmanager
def compared(gradients: Any, held: Mapping[str, Any], reduction: Reduction, made: Made) -> Iterator[None]:
    """Around the reduction of a step's gradients: ranks compare what they hold, in the few steps in which that is due.

    held: trees. reduction, made: of one optimizer.
    ValueError, on all ranks: they differ, and the setting makes it an error. In compiled functions it is an error of
    JAX when the step runs, as for other collectives.
    """
    leaves, structure = jax.tree.flatten(gradients)
    if not leaves or not reduction.communicates():
        yield
        return
    first = names_of(gradients, structure)[0]
    if not is_traced() and not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        with made.step():
            _compare_now(f"allreduce.{made.called(first)}.same_weights", held, reduction, made)
        yield
        return
    with made.step():
        wire, order = f"allreduce.jit.{made.called(first)}.same_weights", made.order()
    with compared_in_step(wire, reduction.process_set, list(_leaves(held)), _remedy, order):
        yield


@contextmanager
def compared_of_function(gradients: Any, params: Any, reduction: Reduction) -> Iterator[None]:
    """The same around the reduction of what hvd.grad has made of a function of `params`. No optimizer is known."""
    leaves, structure = jax.tree.flatten(gradients)
    if not leaves or not reduction.communicates():
        yield
        return
    first, held, process_set = names_of(gradients, structure)[0], {"parameter": params}, reduction.process_set
    if is_traced() or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        wire = f"allreduce.jit.grad.{first}.same_weights"
        with compared_in_step(wire, process_set, list(_leaves(held)), _remedy_of_functions, None):
            yield
        return
    wire = f"allreduce.grad.{first}.same_weights"
    _compare(_counted_for_ever(wire, process_set, _remedy_of_functions, None)[1], held)
    yield


def _compare_now(wire: str, held: Mapping[str, Any], reduction: Reduction, made: Made) -> None:
    _compare(of_model(reduction, wire, lambda: CountedWeights(wire, tuple, reduction.process_set, _remedy, made)), held)


def _compare(counted: CountedWeights, held: Mapping[str, Any]) -> None:
    if counted.is_due():
        counted.things = functools.partial(_values, held)
        try:
            counted.compare()
        finally:
            counted.things = tuple


def _values(held: Mapping[str, Any]) -> Iterator[Thing]:
    for owner, name, leaf in _leaves(held):
        if getattr(leaf, "is_fully_addressable", isinstance(leaf, np.ndarray)):
            yield owner, name, np.asarray(leaf)


def _leaves(held: Mapping[str, Any]) -> Iterator[Thing]:
    for root, tree in held.items():
        for path, leaf in jax.tree.flatten_with_path(tree)[0]:
            if getattr(leaf, "dtype", None) in DTYPE_CODES:
                yield f"{root} {jax.tree_util.keystr(path)}".rstrip(), "" if root == "parameter" else "value", leaf


def _remedy(_: set[Kind]) -> str:
    return (
        "Write params = hvd.broadcast_parameters(params, root_rank=0), and hvd.broadcast_optimizer_state for the "
        "state, on all ranks before the first step and after a checkpoint was loaded."
    )


def _remedy_of_functions(kinds: set[Kind]) -> str:
    return (
        f"{_remedy(kinds)} If hvd.grad or hvd.value_and_grad is called for several models, call it in the same "
        "order on all ranks, or give their trees different keys, such as {'generator': params}: gradients of trees "
        "with equal keys are averaged as if they belonged to one model."
    )


# -- in compiled functions ---------------------------------------------------------------------------------------------
# For ever, since a compiled function may live longer than the optimizer, and hvd.grad is called anew in each step. All
# ranks count the steps of each of them.
_counted: Final[dict[str, CountedWeights]] = {}


@dataclass(frozen=True)
class _Step:
    """What the two calls of a step have in common."""

    counted: CountedWeights = field(repr=False)
    key: str  # of the count
    names: tuple[tuple[str, str], ...] = field(repr=False)


@contextmanager
def compared_in_step(
    wire: str,
    process_set: ProcessSet,
    things: Sequence[Thing],
    remedy: Callable[[set[Kind]], str],
    order: Order | None,
) -> Iterator[None]:
    """Around the reductions of a step that is traced.

    things: those that are constants of the step are left out. The other arguments are as for CountedWeights.
    """
    key, counted = _counted_for_ever(wire, process_set, remedy, order)
    traced = [thing for thing in things if isinstance(thing[2], jax.core.Tracer)]
    step = _Step(counted, key, tuple((owner, name) for owner, name, _ in traced))
    same_weights_p.bind(*(value for _, _, value in traced), step=step, hears=False)
    yield
    same_weights_p.bind(step=step, hears=True)


def _counted_for_ever(
    wire: str, process_set: ProcessSet, remedy: Callable[[set[Kind]], str], order: Order | None
) -> tuple[str, CountedWeights]:
    """The key of a comparison, and the comparison."""
    key = f"{process_set.process_set_id or 0}.{wire}"
    counted = _counted.get(key)
    if counted is None or (counted.order and counted.order.place) != (order and order.place):
        counted = _counted[key] = CountedWeights(wire, tuple, process_set, remedy, order)
    return key, counted


def is_traced() -> bool:
    return not trace_state_clean()


same_weights_p: Final = Primitive("horovod_same_weights")
same_weights_p.multiple_results = True
same_weights_p.def_impl(lambda *arrays, step, hears: [])  # a derivative of what is not compiled
same_weights_p.def_effectful_abstract_eval(lambda *arrays, step, hears: ([], {EFFECT}))


def _jvp(primals: Any, tangents: Any, **of_call: Any) -> Any:
    return same_weights_p.bind(*primals, **of_call), []


def _batched(arrays: Any, dimensions: Any, **of_call: Any) -> Any:
    return same_weights_p.bind(*arrays, **of_call), []


def _not_compared(ctx: Any, *arrays: Any, step: _Step, hears: bool) -> Any:
    """On GPUs: the arrays are not in the host's memory."""
    ctx.set_tokens_out(ctx.tokens_in)
    return []


def _lowered(ctx: Any, *arrays: Any, step: _Step, hears: bool) -> Any:
    _register()
    read = _Read(step, tuple((aval.shape, np.dtype(aval.dtype)) for aval in ctx.avals_in))
    what = read.digest()
    _read[what] = read
    token = ctx.tokens_in.get(EFFECT)
    attributes = {
        "name": ir.StringAttr.get(step.key),
        "what": number_attribute(what, 64),
        "hears": number_attribute(int(hears)),
    }
    call = stablehlo.CustomCallOp.build_generic(
        results=[token.type],
        operands=[token, *arrays],
        attributes={
            "call_target_name": ir.StringAttr.get(TARGET),
            "has_side_effect": ir.BoolAttr.get(True),
            "backend_config": ir.DictAttr.get(attributes),
            "api_version": number_attribute(TYPED_FFI),
            "operand_layouts": in_rows(ctx.avals_in),
            "result_layouts": in_rows([]),
        },
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({EFFECT: call.results[0]})))
    return []


ad.primitive_jvps[same_weights_p] = _jvp
batching.primitive_batchers[same_weights_p] = _batched
mlir.register_lowering(same_weights_p, _not_compared)
mlir.register_lowering(same_weights_p, _lowered, platform="cpu")


# -- when the step runs ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Read:
    """How the arguments of a call are read."""

    step: _Step
    kinds: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]  # shape and dtype of each

    def digest(self) -> int:
        """The same in each process, so that a compiled function may come from JAX's cache on disk."""
        told = repr((self.step.key, self.step.names, [(shape, dtype.name) for shape, dtype in self.kinds]))
        return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "big") >> 1

    def things(self, addresses: Any) -> Iterator[Thing]:
        for place, ((owner, name), (shape, dtype)) in enumerate(zip(self.step.names, self.kinds, strict=True)):
            count = int(np.prod(shape))
            memory: Any = b""
            if count:
                memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(addresses[place])
            yield owner, name, np.frombuffer(memory, dtype).reshape(shape)


_read: Final[dict[int, _Read]] = {}  # by what the call says


_SENTENCE_BYTES: Final = 4096


class _Said(ctypes.Structure):
    """csrc/jax/comparison.h has the same."""

    _fields_ = (
        ("compares", ctypes.c_int64),
        ("idle", ctypes.c_int64),
        ("code", ctypes.c_int64),
        ("sentence", ctypes.c_char * _SENTENCE_BYTES),
    )

    def refuse(self, error: BaseException) -> None:
        self.code = _INVALID_ARGUMENT if isinstance(error, ValueError) else _UNKNOWN
        self.sentence = (str(error) or type(error).__name__).replace("\0", " ").encode()[: _SENTENCE_BYTES - 1]


_Answer: Final = ctypes.POINTER(_Said)


@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), _Answer)
def _say(what: int, skipped: int, addresses: Any, answer: Any) -> None:
    said = answer.contents
    try:
        read = _read[what]
        counted = read.step.counted
        said.compares = counted.is_due(skipped=skipped)
        said.idle = counted.idle()
        if said.compares:
            counted.things = functools.partial(read.things, addresses)
            try:
                counted.say()
            finally:
                counted.things = tuple
    except BaseException as error:  # nothing may be raised into XLA's thread
        said.refuse(error)


@ctypes.CFUNCTYPE(None, ctypes.c_int64, _Answer)
def _hear(what: int, answer: Any) -> None:
    try:
        _read[what].step.counted.hear()
    except BaseException as error:  # as above
        answer.contents.refuse(error)


@functools.cache
def _register() -> None:
    library = register()
    library.horovod_jax_compare_with(_say, _hear)
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.horovod_jax_same_weights), platform="cpu")
    when_joined(library.horovod_jax_count_anew)
