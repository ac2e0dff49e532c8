"""Setters and getters of Spark ML parameters, made from the parameters themselves."""

from __future__ import annotations

from typing import Any, TypeVar

from pyspark.ml.param import Param

Class = TypeVar("Class", bound=type)

# Programs use these names; what the rule would make is there beside them.
_OTHER_NAMES = {
    "shuffle_buffer_size": "ShufflingBufferSize",
    "train_reader_num_workers": "TrainReaderNumWorker",
    "val_reader_num_workers": "ValReaderNumWorker",
    "inmemory_cache_all": "InMemoryCacheAll",
    "num_gpus": "NumGPUs",
}


def accessors(cls: Class) -> Class:
    """Gives a class setX, which returns the object, and getX for each parameter: num_proc has setNumProc, getNumProc.

    What the class defines itself stays as it is.
    """
    for name, param in list(vars(cls).items()):
        if isinstance(param, Param):
            names = ["".join(word[:1].upper() + word[1:] for word in name.split("_"))]
            names += [_OTHER_NAMES[name]] if name in _OTHER_NAMES else []
            for accessor in names:
                _add(cls, f"set{accessor}", _setter(name, param.doc))
                _add(cls, f"get{accessor}", _getter(name, param.doc))
    return cls


def _add(cls: type, name: str, function: Any) -> None:
    if name not in vars(cls):
        function.__name__, function.__qualname__ = name, f"{cls.__qualname__}.{name}"
        setattr(cls, name, function)


def _setter(name: str, doc: str) -> Any:
    def set_value(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set_value.__doc__ = f"Sets {name}: {doc}"
    return set_value


def _getter(name: str, doc: str) -> Any:
    def get_value(self: Any) -> Any:
        return self.getOrDefault(name)

    get_value.__doc__ = f"{name}: {doc}"
    return get_value
