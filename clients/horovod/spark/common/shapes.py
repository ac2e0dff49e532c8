"""Whether columns fit the shapes that a model takes and gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.base.errors import DataCode
from horovod.spark.common.params import refused

Shape = Sequence[int | None]


def check_shape_compatibility(
    metadata: Mapping[str, Mapping[str, Any]],
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Sequence[Shape] | None = None,
    output_shapes: Sequence[Shape] | None = None,
    label_shapes: Sequence[Shape] | None = None,
) -> None:
    """ValueError unless each column has as many numbers as its shape; the dimension of the batch counts as one.

    label_shapes, where given, say what labels look like, and not the shapes of the model's outputs.
    """
    _check(metadata, feature_columns, input_shapes, "feature", "input")
    _check(metadata, label_columns, label_shapes or output_shapes, "label", "label" if label_shapes else "output")


def _check(
    metadata: Mapping[str, Mapping[str, Any]],
    columns: Sequence[str],
    shapes: Sequence[Shape] | None,
    what: str,
    of: str,
) -> None:
    if shapes is None:
        return
    if len(shapes) != len(columns):
        raise refused(
            f"there are {len(columns)} {what} columns {list(columns)} for {len(shapes)} {of} shapes {list(shapes)}.",
            DataCode.DIFFERENT_SHAPES,
        )
    for column, shape in zip(columns, shapes, strict=True):
        size = metadata[column]["shape"]
        if size is not None and numbers_in(shape) != size:
            hint = " Where a label looks unlike an output, pass label_shapes." if of == "output" else ""
            raise refused(
                f"the {what} column {column!r} has {size} numbers in each row, and the {of} shape {tuple(shape)} "
                f"has {numbers_in(shape)}.{hint}",
                DataCode.DIFFERENT_SHAPES,
            )


def numbers_in(shape: Shape) -> int:
    """How many numbers a row has; None and -1 are the batch.

    >>> numbers_in([-1, 28, 28])
    784
    """
    return math.prod(abs(dimension) for dimension in shape if dimension is not None)


def of_row(shape: Shape) -> tuple[int, ...]:
    """The dimensions of one row: those behind that of the batch, if it is named.

    >>> of_row([-1, 28, 28]), of_row([1, 28, 28])
    ((28, 28), (1, 28, 28))
    """
    first, *others = shape
    dimensions = others if first is None or first < 0 else shape
    return tuple(abs(dimension) for dimension in dimensions if dimension is not None)
