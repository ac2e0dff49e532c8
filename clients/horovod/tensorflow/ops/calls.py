"""What all collectives share: tensors of whatever a user gives, process sets, groups by dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.base.errors import OperationCode, TrainingCode, coded
from horovod.common.ops.specs import check_reduction
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.library import DTYPES
from horovod.tensorflow.order.names import Named


def dense(tensor: Any, operation: str, name: str | None) -> tf.Tensor:
    """A tensor that can be sent, or InvalidArgumentError."""
    made = tf.convert_to_tensor(tensor)
    if made.dtype not in DTYPES:
        remedy = " Send tf.math.real(tensor) and tf.math.imag(tensor)." if made.dtype.is_complex else ""
        given = "" if name is None else f" It was given as '{operation}.{name}'."
        raise invalid(
            coded(OperationCode.UNSUPPORTED_DTYPE, f"Tensor type {made.dtype.name} is not supported.{remedy}{given}")
        )
    return made


def invalid(sentence: str) -> tf.errors.InvalidArgumentError:
    return tf.errors.InvalidArgumentError(None, None, sentence)


class UnknownProcessSetError(tf.errors.InvalidArgumentError, ValueError):
    """As the other frameworks say it, and as TensorFlow does."""


def id_of(process_set: ProcessSet, operation: str) -> int:
    """The number by which a node names a process set. Whether this rank is a member is seen when the node runs."""
    if process_set is global_process_set:
        return 0
    if not isinstance(process_set, ProcessSet):
        raise ValueError(
            coded(
                TrainingCode.INVALID_ARGUMENT,
                f"process_set must be an hvd.ProcessSet, not {type(process_set).__name__}.",
            )
        )
    if process_set.process_set_id is None:
        raise UnknownProcessSetError(
            None,
            None,
            coded(
                OperationCode.NO_SUCH_SET,
                f"{operation}: {process_set} is not registered. Pass it to hvd.init(process_sets=[...]) or to "
                "hvd.add_process_set() on every rank first.",
            ),
        )
    return process_set.process_set_id


def check_op(op: int, tensor: tf.Tensor, process_set: ProcessSet, operation: str) -> None:
    """Refuses a reduction that does not exist, or not for tensors of this dtype in `process_set`."""
    check_reduction(op, DTYPES[tensor.dtype].engine, process_set, operation)


def run(
    operation: Callable[..., Any],
    named: Named,
    process_set_id: int,
    call_number: tf.Tensor | None = None,
    **given: Any,
) -> Any:
    """Calls the function for an operation of TensorFlow: eagerly, or for a node."""
    return operation(
        **given,
        call=named.call_number() if call_number is None else call_number,
        tensor_name=named.wire,
        process_set_id=process_set_id,
        wait=named.wait,
        name=named.node,
    )


def for_inputs(operation: Any, *gradients: Any) -> list[Any]:
    """The gradients of a node's tensors, with none for its other inputs."""
    return [*gradients, *[None] * (len(operation.inputs) - len(gradients))]


def by_dtype(
    tensors: Sequence[tf.Tensor], named: Named, start_part: Callable[[Named, list[tf.Tensor]], Sequence[tf.Tensor]]
) -> list[tf.Tensor]:
    """One operation for each dtype, in order of appearance; results in the tensors' order.

    The first part has the name itself, so that ranks which differ in dtype still meet and are told of it.
    """
    places: dict[tf.DType, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    results: dict[int, tf.Tensor] = {}
    for part, indices in enumerate(places.values()):
        outputs = start_part(part_name(named, part, len(places)), [tensors[index] for index in indices])
        results |= zip(indices, outputs, strict=True)
    return [results[place] for place in range(len(tensors))]


def part_name(named: Named, part: int, count: int) -> Named:
    if part == 0:
        return named
    # The engine recognizes an unnamed operation by this ending.
    ending = ".noname" if named.wire.endswith(".noname") else ""
    wire = f"{named.wire.removesuffix(ending)}.{part + 1}of{count}{ending}"
    return named._replace(wire=wire, node=None if named.node is None else f"{named.node}_{part + 1}of{count}")
