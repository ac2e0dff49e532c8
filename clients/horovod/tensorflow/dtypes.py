"""TensorFlow's dtypes, as the engine and StableHLO call them. Their numbers in C++ are in csrc/tensorflow/tf_api.cc."""

from __future__ import annotations

from typing import Final, NamedTuple

import tensorflow as tf

from horovod._core import DType


class Known(NamedTuple):
    engine: DType
    stablehlo: str


DTYPES: Final[dict[tf.DType, Known]] = {
    tf.bool: Known(DType.BOOL, "i1"),
    tf.int8: Known(DType.INT8, "i8"),
    tf.int16: Known(DType.INT16, "i16"),
    tf.int32: Known(DType.INT32, "i32"),
    tf.int64: Known(DType.INT64, "i64"),
    tf.uint8: Known(DType.UINT8, "ui8"),
    tf.uint16: Known(DType.UINT16, "ui16"),
    tf.uint32: Known(DType.UINT32, "ui32"),
    tf.uint64: Known(DType.UINT64, "ui64"),
    tf.half: Known(DType.FLOAT16, "f16"),
    tf.bfloat16: Known(DType.BFLOAT16, "bf16"),
    tf.float32: Known(DType.FLOAT32, "f32"),
    tf.float64: Known(DType.FLOAT64, "f64"),
}

_FLOATS_OF_8_BITS: Final = getattr(tf.dtypes, "experimental", None)  # there since TensorFlow 2.12
if _FLOATS_OF_8_BITS is not None:
    DTYPES[_FLOATS_OF_8_BITS.float8_e4m3fn] = Known(DType.FLOAT8_E4M3FN, "f8E4M3FN")
    DTYPES[_FLOATS_OF_8_BITS.float8_e5m2] = Known(DType.FLOAT8_E5M2, "f8E5M2")
