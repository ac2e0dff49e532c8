"""The collectives inside of what XLA compiles (jit_compile=True): custom calls that csrc/xla/handler.cc handles.

XLA knows the shape of everything when it compiles. So tensors need a static shape, and where the number of rows of a
result depends on other ranks, all of them are taken to give the same number; if one does not, it is an error when it
runs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod._core import OpType
from horovod.base.errors import OperationCode, coded, without_code
from horovod.common.ops.specs import set_size
from horovod.tensorflow.library import DTYPES, process_set_of, xla_obstacle
from horovod.tensorflow.order.call_order import give, take
from horovod.tensorflow.order.names import Named
from horovod.worker.runtime.context import current

Rows = Callable[[int], int]


def compiling() -> bool:
    """Whether XLA compiles the graph that is being made."""
    if tf.executing_eagerly():
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def collective(
    kind: OpType,
    tensors: Sequence[tf.Tensor],
    called: Named,
    process_set_id: int,
    *,
    rows: Rows | None = None,
    reduce_op: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root_rank: int = 0,
) -> list[tf.Tensor]:
    """One call for tensors of one dtype. rows: of a result for those of its tensor, where they differ. No gradient.

    Raises NotImplementedError, with what to do, for what XLA can't compile.
    """
    if obstacle := xla_obstacle():
        raise NotImplementedError(
            coded(OperationCode.NOT_COMPILABLE, f"{called.wire}: {without_code(obstacle)} Use jit_compile=False.")
        )
    dtype = DTYPES[tensors[0].dtype]
    shapes = [_static(tensor, called) for tensor in tensors]
    results = [shape if rows is None else [rows(shape[0]), *shape[1:]] for shape in shapes]
    attributes = {
        "wire": f'"{_escaped(called.wire)}"',
        "type": f"{int(kind)} : i32",
        "dtype": f"{int(dtype.engine)} : i32",
        "element_bytes": f"{tensors[0].dtype.size} : i32",
        "process_set_id": f"{process_set_id} : i64",
        "reduce_op": f"{reduce_op} : i32",
        "prescale_factor": _exact(prescale),
        "postscale_factor": _exact(postscale),
        "root_rank": f"{root_rank} : i32",
    }
    token, *outputs = gen_xla_ops.xla_call_module(
        args=[take(), *tensors],
        version=5,
        module=_module(dtype.stablehlo, shapes, results, attributes),
        Sout=[tf.TensorShape([]), *map(tf.TensorShape, results)],
        Tout=[tf.int32, *[tensors[0].dtype] * len(tensors)],
        platforms=["CPU"],
    )
    give(token)
    return outputs


def members(process_set_id: int) -> tuple[int, int]:
    """This rank's place in a process set, and how many there are; both are compiled into the program."""
    process_set = process_set_of(process_set_id)
    place = current().world.rank if process_set_id == 0 else process_set.rank()
    assert place is not None
    return place, set_size(process_set)


def _static(tensor: tf.Tensor, called: Named) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise NotImplementedError(
            coded(
                OperationCode.NOT_COMPILABLE,
                f"{called.wire}: the shape {tensor.shape} is not known when the function is traced, which XLA needs. "
                "Give the tensor a static shape (tf.ensure_shape, drop_remainder=True for batches), or use "
                "jit_compile=False.",
            )
        )
    shape: list[int] = tensor.shape.as_list()
    return shape


def _module(dtype: str, shapes: list[list[int]], results: list[list[int]], attributes: dict[str, str]) -> str:
    """A StableHLO program that is nothing but the call; the token of the order comes before the tensors."""
    arguments = ["tensor<i32>", *(_type(dtype, shape) for shape in shapes)]
    returns = ["tensor<i32>", *(_type(dtype, shape) for shape in results)]
    given = ", ".join(f"%arg{place}: {one}" for place, one in enumerate(arguments))
    operands = ", ".join(f"%arg{place}" for place in range(len(arguments)))
    back = ", ".join(f"%0#{place}" for place in range(len(returns)))
    types = ", ".join(returns)
    config = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    return f"""
module @horovod {{
  func.func public @main({given}) -> ({types}) {{
    %0:{len(returns)} = stablehlo.custom_call @horovod({operands}) {{
      api_version = 4 : i32, has_side_effect = true, backend_config = {{{config}}}
    }} : ({", ".join(arguments)}) -> ({types})
    return {back} : {types}
  }}
}}
"""


def _type(dtype: str, shape: Sequence[int]) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{dtype}>"


def _exact(factor: float) -> str:
    return f"0x{struct.pack('>d', factor).hex()} : f64"


def _escaped(text: str) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}" for byte in text.encode())
