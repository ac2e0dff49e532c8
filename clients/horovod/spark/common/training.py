"""What ranks of all frameworks are told of a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod.spark.common.batches import Source
from horovod.spark.common.shapes import Shape

# Numbers in a row of a prediction, and whether they may have a fraction.
Prediction = tuple[int, bool]


@dataclass(kw_only=True)
class CommonTraining:
    """Frameworks add their own fields; it is pickled. Names are those of the estimator's parameters."""

    train: Source
    val: Source | None
    feature_columns: Sequence[str]
    label_columns: Sequence[str]
    weight_column: str | None
    label_shapes: Sequence[Shape] | None
    loss_weights: Any
    metrics: Sequence[Any]
    callbacks: Sequence[Any]
    epochs: int
    gradient_compression: Any
    data_module: type
    use_gpu: bool
    verbose: int
    store: Any
