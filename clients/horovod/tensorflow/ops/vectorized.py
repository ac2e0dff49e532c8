"""The collectives in tf.vectorized_map and tape.jacobian, which make one operation of the same one of all iterations.

Without a rule TensorFlow would make a loop of copies, which have one name. Here the tensors of all iterations travel in
one operation: element by element there is no difference, and where rows are sent, the iterations become a dimension of
the rows. TensorFlow runs the operation that it has traced, too, for the first iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf
from tensorflow.python.ops.parallel_for.pfor import RegisterPFor, wrap

from horovod.base.errors import OperationCode, coded
from horovod.common.basics import Adasum
from horovod.tensorflow.library import OPS
from horovod.tensorflow.ops.calls import run
from horovod.tensorflow.order.names import vectorized

_REDUCTION: Final = ("reduce_op", "prescale_factor", "postscale_factor")
_OF_SET: Final = ("process_set_id",)


class _Rule(NamedTuple):
    run: Callable[..., Any]
    attributes: tuple[str, ...] = ()
    sends_rows: bool = False


_ONE: Final = {
    "HorovodAllreduce": _Rule(OPS.horovod_allreduce, _REDUCTION),
    "HorovodAllgather": _Rule(OPS.horovod_allgather, sends_rows=True),
    "HorovodBroadcast": _Rule(OPS.horovod_broadcast, ("root_rank",)),
    "HorovodReducescatter": _Rule(OPS.horovod_reducescatter, _REDUCTION, sends_rows=True),
}
_GROUPED: Final = {
    "HorovodGroupedAllreduce": _Rule(OPS.horovod_grouped_allreduce, _REDUCTION),
    "HorovodGroupedAllgather": _Rule(OPS.horovod_grouped_allgather, sends_rows=True),
    "HorovodGroupedBroadcast": _Rule(OPS.horovod_grouped_broadcast, ("root_rank",)),
    "HorovodGroupedReducescatter": _Rule(OPS.horovod_grouped_reducescatter, _REDUCTION, sends_rows=True),
}
_QUESTIONS: Final = {
    "HorovodLocalRank": _Rule(OPS.horovod_local_rank),
    "HorovodLocalSize": _Rule(OPS.horovod_local_size),
    "HorovodProcessSetIncluded": _Rule(OPS.horovod_process_set_included, _OF_SET),
    "HorovodRank": _Rule(OPS.horovod_rank),
    "HorovodSize": _Rule(OPS.horovod_size, _OF_SET),
}


def _one(iterations: Any) -> Any:
    rule = _ONE[iterations.op.type]
    result = _run(rule, iterations, tensor=_given(rule, iterations, 0))
    return _results(rule, iterations, [result])[0]


def _grouped(iterations: Any) -> list[Any]:
    rule = _GROUPED[iterations.op.type]
    tensors = [_given(rule, iterations, place) for place in range(len(iterations.op.outputs))]
    return _results(rule, iterations, _run(rule, iterations, tensors=tensors))


def _alltoall(iterations: Any) -> list[Any]:
    rule = _Rule(OPS.horovod_alltoall, sends_rows=True)
    if iterations.input(1).is_stacked:
        raise ValueError(
            coded(
                OperationCode.NOT_COMPILABLE,
                "hvd.alltoall in tf.vectorized_map needs the same splits in all iterations. Use tf.map_fn.",
            )
        )
    rows, splits = _run(rule, iterations, tensor=_given(rule, iterations, 0), splits=iterations.unstacked_input(1))
    return [*_results(rule, iterations, [rows]), wrap(splits, False)]


def _question(iterations: Any) -> Any:
    rule = _QUESTIONS[iterations.op.type]
    return wrap(rule.run(**{name: iterations.get_attr(name) for name in rule.attributes}), False)


def _same_weights(iterations: Any) -> Any:
    comparison, call = iterations.get_attr("comparison"), iterations.unstacked_input(0)
    return wrap(OPS.horovod_same_weights(call=call, comparison=comparison), False)


def _given(rule: _Rule, iterations: Any, place: int) -> tf.Tensor:
    given = iterations.input(place)
    return _exchanged(given.t) if rule.sends_rows and given.is_stacked else given.t


def _results(rule: _Rule, iterations: Any, results: Sequence[tf.Tensor]) -> list[Any]:
    stacked = [iterations.input(place).is_stacked for place in range(len(results))]
    return [
        wrap(_exchanged(result) if rule.sends_rows and was else result, was)
        for result, was in zip(results, stacked, strict=True)
    ]


def _exchanged(tensor: tf.Tensor) -> tf.Tensor:
    """With the iterations and the rows, its first two dimensions, in each other's place."""
    rest = tf.range(2, tf.rank(tensor))
    return tf.transpose(tensor, tf.concat([[1, 0], rest], 0))


def _run(rule: _Rule, iterations: Any, **tensors: Any) -> Any:
    attributes = {name: iterations.get_attr(name) for name in rule.attributes}
    if attributes.get("reduce_op") == Adasum:
        raise ValueError(
            coded(
                OperationCode.NOT_COMPILABLE,
                "op=hvd.Adasum is not the same for several tensors together, as tf.vectorized_map and tape.jacobian "
                "need. Use tf.map_fn, or tape.jacobian(..., experimental_use_pfor=False).",
            )
        )
    number = iterations.unstacked_input(len(iterations.op.inputs) - 1)
    called = vectorized(iterations.op)
    return run(rule.run, called, iterations.get_attr("process_set_id"), call_number=number, **tensors, **attributes)


for _operations, _convert in ((_ONE, _one), (_GROUPED, _grouped), (_QUESTIONS, _question)):
    for _operation in _operations:
        RegisterPFor(_operation)(_convert)
RegisterPFor("HorovodAlltoall")(_alltoall)
RegisterPFor("HorovodSameWeights")(_same_weights)
