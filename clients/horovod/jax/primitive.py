"""One primitive of JAX for all collectives: what it computes, how XLA compiles it, and in which order calls run.

Called with arrays, it goes to the engine at once. Called with tracers (jax.jit, lax.scan, lax.cond and so on), it
becomes a custom call of XLA that csrc/xla/handler.cc handles.

The handler waits until all ranks have called it. XLA chooses the order of calls that do not depend on each other, and
may choose another one for other shapes, so two ranks could wait for each other for ever. Therefore the calls have an
*ordered effect*: JAX passes a token from one call to the next in the order of the program, also through loops and
branches, and from one compiled function of a thread to the next one. XLA keeps this order, drops no call, and does not
merge equal calls. Calls without a name are matched between ranks by this order, which is the same on all ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np
from jax._src import effects  # JAX's users of ordered effects find them nowhere else
from jax._src.core import trace_state_clean
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.interpreters.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from horovod._core import OpType
from horovod.base.errors import OperationCode, coded
from horovod.common.basics import Average, Sum
from horovod.common.ops.grouped import part_name
from horovod.common.ops.specs import position, set_number, set_size
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.jax.arrays import COLLECTIVES, DTYPE_CODES
from horovod.jax.devices import in_host_memory, is_on_gpu, placed_as
from horovod.jax.library import TARGET, register
from horovod.worker.runtime.context import current

TYPED_FFI: Final = 4  # StableHLO's number of the interface that csrc/xla/ffi.h declares


@dataclass(frozen=True)
class Call:
    """What a call is beside its tensors; the primitive's only parameter."""

    kind: OpType
    name: str | None  # by which ranks match it; None: by its order among those with the same `content`
    process_set: ProcessSet = global_process_set
    op: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    grouped: bool = False
    content: str | None = None  # of a call without a name, what its tensors are: horovod.jax.trees
    # Known of a call outside of compiled functions, else None.
    splits: tuple[int, ...] | None = None  # alltoall: rows for each member
    received: tuple[int, ...] | None = None  # alltoall: rows from each member
    rows: tuple[tuple[int, ...], ...] | None = None  # allgather: for each tensor, the rows of each member
    # Whether a compiled function goes on with what needs no result of it: of an allreduce or a broadcast.
    asynchronous: bool = False
    # Whether it is the derivative of a call in forward mode; in reverse mode JAX turns it round before it runs.
    tangent: bool = False

    @property
    def operation(self) -> str:
        """As in a name on the wire."""
        return f"grouped_{self.kind.name.lower()}" if self.grouped else self.kind.name.lower()

    def known_as(self, compiled: bool) -> str | None:
        """What ranks match it by: the name, or what ends in ".noname" (or None) for a call that has none.

        compiled: JAX may run a compiled function while the script calls something outside, so they match apart.
        """
        if self.name is not None:
            return self.name
        parts = [*(["jit"] if compiled else ()), *([] if self.content is None else [self.content])]
        return ".".join([*parts, "noname"]) if parts else None

    def of_gradient(self, **changes: Any) -> Call:
        return replace(self, name=self._with(".grad"), tangent=False, **changes)

    def _with(self, ending: str) -> str | None:
        return None if self.name is None else self.name + ending

    def running(self) -> Call:
        """This call as the engine is to run it; a call on tangents gets a name of its own.

        NotImplementedError for a call on tangents whose reduction is not linear.
        """
        if not self.tangent:
            return self
        if self.op not in (Average, Sum):
            raise NotImplementedError(
                coded(
                    OperationCode.UNDEFINED_REDUCTION,
                    f"{self.operation}: the reduction is not linear, so jax.jvp and other forward modes are not "
                    "defined for it. Use op=hvd.Average or op=hvd.Sum, or jax.grad.",
                )
            )
        return replace(self, name=self._with(".jvp"), tangent=False)


class CollectiveEffect(effects.Effect):
    def __repr__(self) -> str:
        return "a collective of Horovod, which has one process for each device"  # JAX says it of several devices


EFFECT: Final = CollectiveEffect()
for _allowed in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(CollectiveEffect)

collective_p: Final = Primitive("horovod")
collective_p.multiple_results = True


def run(call: Call, *tensors: jax.Array) -> list[jax.Array]:
    """The results of a call, and after them, for an alltoall with splits, the rows that came from each member."""
    if trace_state_clean():  # nothing is traced: what follows is what bind() would do after some 20 us
        return _now(*tensors, call=call)
    results: list[jax.Array] = collective_p.bind(*tensors, call=call)
    return results


# -- with arrays -------------------------------------------------------------------------------------------------------
@collective_p.def_impl
def _now(*given: Any, call: Call) -> list[jax.Array]:
    call = call.running()
    tensors = [one if isinstance(one, jax.Array) else jax.numpy.asarray(one) for one in given]  # NumPy's: derivatives
    return _of_gpu(call, tensors) if any(map(is_on_gpu, tensors)) else _of_host(call, tensors)


def _of_gpu(call: Call, tensors: list[jax.Array]) -> list[jax.Array]:
    """Calls whose results have known shapes are compiled, since JAX tells only compiled calls the stream that it uses.

    What gathers rows, of which ranks may have different numbers, goes through the host's memory.
    """
    if call.kind in (OpType.ALLREDUCE, OpType.BROADCAST, OpType.REDUCESCATTER):
        keeps_64_bits = any(tensor.dtype.itemsize == 8 for tensor in tensors) or bool(jax.config.jax_enable_x64)
        with jax.enable_x64(keeps_64_bits):
            return list(_compiled(call, *tensors))
    results = _of_host(call, list(map(in_host_memory, tensors)))
    return [placed_as(tensors[0], result) for result in results]


@functools.partial(jax.jit, static_argnums=0)
def _compiled(call: Call, *tensors: jax.Array) -> list[jax.Array]:
    return run(call, *tensors)


def _of_host(call: Call, tensors: list[jax.Array]) -> list[jax.Array]:
    name = call.known_as(compiled=False)
    reduced = (call.op, name, call.prescale, call.postscale, call.process_set)
    ops = COLLECTIVES
    if call.grouped:
        if call.kind is OpType.ALLREDUCE:
            return list(ops.wait(ops.start_allreduces, tensors, False, *reduced))
        if call.kind is OpType.ALLGATHER:
            return list(ops.wait(ops.start_allgathers, tensors, name, call.process_set))
        return list(ops.wait(ops.start_reducescatters, tensors, *reduced))
    (tensor,) = tensors
    if call.kind is OpType.ALLREDUCE:
        return [ops.allreduce(tensor, *reduced)]
    if call.kind is OpType.ALLGATHER:
        return [ops.allgather(tensor, name, call.process_set)]
    if call.kind is OpType.BROADCAST:
        return [ops.broadcast(tensor, call.root, name, call.process_set)]
    if call.kind is OpType.REDUCESCATTER:
        return [ops.reducescatter(tensor, *reduced)]
    output, received = ops.alltoall(tensor, call.splits, name, call.process_set)
    return [output, jax.numpy.asarray(received, "int32")] if _gives_received(call) else [output]


def _gives_received(call: Call) -> bool:
    return call.splits is not None and call.received is None


# -- with tracers ------------------------------------------------------------------------------------------------------
@collective_p.def_effectful_abstract_eval
def _shapes(*tensors: Any, call: Call) -> Any:
    current()  # an error before init, as everywhere
    if _gives_received(call):
        raise _not_compilable(call, "an alltoall with splits has a number of rows that only other ranks know")
    return [tensor.update(shape=_shape(tensor.shape, place, call)) for place, tensor in enumerate(tensors)], {EFFECT}


def _shape(shape: tuple[int, ...], place: int, call: Call) -> tuple[int, ...]:
    if call.kind in (OpType.ALLREDUCE, OpType.BROADCAST):
        return shape
    size = set_size(call.process_set)
    if not shape:
        raise ValueError(
            coded(OperationCode.NO_ROWS, f"{call.operation}: the array is a scalar, which has no rows. Reshape it.")
        )
    rows = shape[0]
    if call.kind is OpType.ALLGATHER:
        rows = rows * size if call.rows is None else sum(call.rows[place])
    elif call.kind is OpType.REDUCESCATTER:
        rows = rows // size + (member(call.process_set) < rows % size)
    elif call.received is not None:
        rows = sum(call.received)
    elif rows % size:
        raise ValueError(
            coded(
                OperationCode.WRONG_SPLITS,
                f"Alltoall: the first dimension of the tensor ({rows}) is not divisible by the number of ranks "
                f"({size}). Call it outside of jax.jit, with splits, to send unequal parts.",
            )
        )
    return (rows, *shape[1:])


def member(process_set: ProcessSet) -> int:
    """This rank's index in a process set that it is a member of. Compiled functions contain it as a constant."""
    return current().world.rank if process_set is global_process_set else position(process_set)


def _not_compilable(call: Call, why: str) -> NotImplementedError:
    return NotImplementedError(
        coded(
            OperationCode.NOT_COMPILABLE,
            f"{call.operation}: {why}, and XLA needs to know all shapes when it compiles. Call it outside of jax.jit.",
        )
    )


def _lowered(ctx: Any, *tensors: Any, call: Call) -> Any:
    call = call.running()
    if any(len(set(rows)) > 1 for rows in call.rows or ()):
        raise _not_compilable(call, "the ranks gather different numbers of rows")
    if call.splits is not None:
        raise _not_compilable(call, "an alltoall with splits has a number of rows that only other ranks know")
    register()
    set_number(call.process_set, call.operation.capitalize())
    by_dtype: dict[Any, list[int]] = {}
    for place, aval in enumerate(ctx.avals_in):
        by_dtype.setdefault(aval.dtype, []).append(place)
    wire = f"{call.operation}.{call.known_as(compiled=True)}"
    token = ctx.tokens_in.get(EFFECT)
    results: list[Any] = [None] * len(tensors)
    for part, places in enumerate(by_dtype.values()):
        token, *outputs = _custom_call(
            ctx, token, [tensors[place] for place in places], places, part_name(wire, part, len(by_dtype)), call
        )
        for place, output in zip(places, outputs, strict=True):
            results[place] = output
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({EFFECT: token})))
    return results


def _custom_call(ctx: Any, token: Any, tensors: list[Any], places: list[int], wire: str, call: Call) -> Any:
    first = ctx.avals_in[places[0]]
    process_set_id = call.process_set.process_set_id
    attributes = {
        "wire": ir.StringAttr.get(wire),
        "type": number_attribute(int(call.kind)),
        "dtype": number_attribute(DTYPE_CODES[first.dtype]),
        "element_bytes": number_attribute(first.dtype.itemsize),
        "process_set_id": number_attribute(process_set_id or 0, 64),
        "reduce_op": number_attribute(int(call.op)),
        "prescale_factor": ir.FloatAttr.get_f64(call.prescale),
        "postscale_factor": ir.FloatAttr.get_f64(call.postscale),
        "root_rank": number_attribute(call.root),
        "asynchronous": number_attribute(int(call.asynchronous)),
    }
    results = [_type(ctx.avals_out[place]) for place in places]
    in_place = range(1, 1 + len(tensors)) if call.kind in (OpType.ALLREDUCE, OpType.BROADCAST) else ()
    return stablehlo.CustomCallOp.build_generic(
        results=[token.type, *results],
        operands=[token, *tensors],
        attributes={
            "call_target_name": ir.StringAttr.get(TARGET),
            "has_side_effect": ir.BoolAttr.get(True),
            "backend_config": ir.DictAttr.get(attributes),
            "api_version": number_attribute(TYPED_FFI),
            "output_operand_aliases": ir.ArrayAttr.get([_in_place(place) for place in in_place]),
            "operand_layouts": in_rows([ctx.avals_in[place] for place in places]),
            "result_layouts": in_rows([ctx.avals_out[place] for place in places]),
        },
    ).results


def _in_place(place: int) -> Any:
    """Says that the result at this place has the memory of the operand there. XLA copies operands that others need."""
    return stablehlo.OutputOperandAlias.get(output_tuple_indices=[place], operand_index=place, operand_tuple_indices=[])


def _type(aval: Any) -> Any:
    return ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))


def in_rows(avals: list[Any]) -> Any:
    """The layouts of the token and of tensors: dimensions from the one whose elements are next to each other."""
    orders = [[], *(range(len(aval.shape))[::-1] for aval in avals)]
    return ir.ArrayAttr.get(
        [ir.DenseIntElementsAttr.get(np.array(order, np.int64), type=ir.IndexType.get()) for order in orders]
    )


def number_attribute(value: int, bits: int = 32) -> Any:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(bits), value)


def _refused(ctx: Any, *tensors: Any, call: Call) -> Any:
    raise NotImplementedError(
        coded(
            OperationCode.UNSUPPORTED_DEVICE,
            f"{call.operation}: this version works only in functions compiled for CPUs or for CUDA. Compile the "
            'function for a CPU: with jax.default_device(jax.devices("cpu")[0]).',
        )
    )


mlir.register_lowering(collective_p, _refused)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(collective_p, _lowered, platform=_platform)
