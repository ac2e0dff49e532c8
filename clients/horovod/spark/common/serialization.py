"""Estimators and models as Spark ML saves them: a line of JSON with all parameters.

Values that JSON knows are plain there. Others (models, functions, optimizers) are pickled, in base64: loading such a
file runs code, so load only what you trust, as with any model. Stores and backends belong to a cluster, and are not
saved.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import cloudpickle
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

_PICKLED: Final = "horovod.pickled"
_NOT_SAVED: Final = ("store", "backend")


class ParamsWriter(DefaultParamsWriter):
    """Writes an object of Params to a folder."""

    def saveImpl(self, path: str) -> None:  # noqa: N802
        """Called by save(path)."""
        instance: Any = self.instance
        given = {param.name: value for param, value in instance._paramMap.items()}
        copy = instance.copy()
        # The defaults that saveMetadata writes must be JSON too; none of ours needs to be kept.
        copy._defaultParamMap = {}
        saved = instance._to_save({name: value for name, value in given.items() if name not in _NOT_SAVED})
        encoded = {name: instance._encoded(name, value) for name, value in saved.items()}
        DefaultParamsWriter.saveMetadata(copy, path, self.sparkSession, paramMap=encoded)


class ParamsReader(MLReader[Any]):
    """Reads what ParamsWriter has written."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """The object, of the class whose read() was called."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        instance = self._cls()
        instance._resetUid(metadata["uid"])
        saved = {name: instance._decoded(name, value) for name, value in metadata["paramMap"].items()}
        return instance._set(**instance._from_saved(saved))


class Saved(Params, MLReadable[Any], MLWritable):
    """Gives save(), load(), write() and read() to a class of Params whose constructor needs no argument."""

    def write(self) -> MLWriter:
        """A writer: `.overwrite().save(path)`."""
        return ParamsWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """A reader: `.load(path)`."""
        return ParamsReader(cls)

    def _to_save(self, values: dict[str, Any]) -> dict[str, Any]:
        """The parameters to write for these. A subclass joins those that must be pickled together, as a model and its
        optimizer.
        """
        return values

    def _from_saved(self, values: dict[str, Any]) -> dict[str, Any]:
        """The reverse of _to_save."""
        return values

    def _encoded(self, name: str, value: Any) -> Any:
        """A value as JSON; subclasses write models in the format of their framework."""
        return encode(value)

    def _decoded(self, name: str, value: Any) -> Any:
        return decode(value)


def encode(value: Any) -> Any:
    """The value as it is, if JSON gives back an equal one of the same types; else pickled."""
    try:
        text = json.dumps(value, allow_nan=False)
        if _same(json.loads(text), value):
            return value
    except (TypeError, ValueError, RecursionError):
        pass
    return {_PICKLED: base64.b64encode(cloudpickle.dumps(value)).decode()}


def decode(value: Any) -> Any:
    """The value that was encoded."""
    if isinstance(value, dict) and set(value) == {_PICKLED}:
        return cloudpickle.loads(base64.b64decode(value[_PICKLED]))
    return value


def _same(read: Any, value: Any) -> bool:
    if type(read) is not type(value):
        return False
    if isinstance(value, list):
        return len(read) == len(value) and all(map(_same, read, value))
    if isinstance(value, dict):
        return (
            _PICKLED not in value and read.keys() == value.keys() and all(_same(read[key], value[key]) for key in value)
        )
    return bool(read == value)
