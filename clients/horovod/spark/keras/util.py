"""Models and optimizers of Keras as bytes: the archive that `model.save("x.keras")` makes, read by either Keras.

A checkpoint is such an archive with one more entry, which says what of the run is done. It is one file, so what it says
and what it holds belong together. The name of this module is that of earlier releases.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from horovod.base.errors import code_of
from horovod.spark.common.params import refused

_UNKNOWN: Final = re.compile(r"(?:Could not locate (?:class|function)|Unknown [\w ]+:?) '([\w>]+)'")
_RUN: Final = "horovod_run.json"
_HDF5: Final = b"\x89HDF\r\n\x1a\n"  # what such a file begins with


def keras_of(model: Any) -> str:
    """The name of the package that a model is of: keras or tf_keras. ValueError if it is no model."""
    for name in ("tf_keras", "keras"):
        keras = sys.modules.get(name)
        if keras is not None and isinstance(model, keras.models.Model):
            # With TF_USE_LEGACY_KERAS tf.keras is tf_keras; an old package named keras is the same thing.
            return name
    raise refused(f"model must be a model of Keras, not {type(model).__module__}.{type(model).__qualname__}.")


def import_keras(name: str) -> Any:
    """The package, which is imported only where it is used."""
    return importlib.import_module(name)


def to_bytes(model: Any) -> bytes:
    """The archive of a model, with optimizer and compile() arguments where it has some."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(str(path))
        return path.read_bytes()


def from_bytes(keras: Any, content: bytes, custom_objects: dict[str, Any] | None, compiled: bool) -> Any:
    """The model of an archive. compiled: with its optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(content)
        with keras.utils.custom_object_scope(custom_objects or {}), known_objects("the model"):
            return keras.models.load_model(str(path), custom_objects=custom_objects or None, compile=compiled)


@contextlib.contextmanager
def known_objects(what: str) -> Iterator[None]:
    """ValueError that names custom_objects, where Keras does not find a class or function. what: is being read."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if (found := _UNKNOWN.search(str(error))) is None:
            raise
        name = found[1]
        raise refused(
            f"{what} has {name!r} in it, which Keras does not know in the training processes. Pass "
            f"custom_objects={{{name!r}: {name}}} to the estimator, with all your classes and "
            "functions. Registering them in the driver is not enough, because ranks are other processes."
        ) from error


def check_readable(keras: Any, name: str, value: Any, custom_objects: dict[str, Any] | None) -> None:
    """ValueError if Keras could not read back a loss or metrics: the model is saved with them when it is trained."""
    try:
        with keras.utils.custom_object_scope(custom_objects or {}), known_objects(name):
            keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(value))
    except (TypeError, ValueError) as error:
        if code_of(error) is not None:
            raise
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise refused(
            f"{name} can't be saved with the model and read again: {reason}. Pass functions and classes that have "
            "names, no lambdas, and those of your own as custom_objects={name: object} too."
        ) from error


def to_hdf5(content: bytes, model: Any, custom_objects: dict[str, Any] | None) -> bytes:
    """A saved model as an HDF5 file, which Keras before 3 wrote, and either Keras reads. `model` tells which Keras.

    That of Keras 3 lacks what compile() was given: Keras 3 writes it so that load_model() fails.

    Raises:
        ValueError: content that is neither an archive of Keras nor an HDF5 file already.
    """
    if content.startswith(_HDF5):
        return content
    if not zipfile.is_zipfile(io.BytesIO(content)):
        raise refused("the checkpoint is no file of a Keras model (.keras, or HDF5).")
    package = keras_of(model)
    compiled = package == "tf_keras"
    saved = from_bytes(import_keras(package), content, custom_objects, compiled)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*HDF5")  # Keras calls the format legacy
        path = Path(folder, "model.h5")
        saved.save(str(path), include_optimizer=compiled)
        return path.read_bytes()


def _by_all_names(keras: Any, custom_objects: dict[str, Any] | None) -> dict[str, Any]:
    """Files name a registered class by its package as well. Asked where it is registered: pickles leave that behind."""
    given = custom_objects or {}
    return {**given, **{keras.saving.get_registered_name(one): one for one in given.values()}}


def with_run(content: bytes, run: dict[str, Any]) -> bytes:
    """The archive with what is known of the run."""
    archive = io.BytesIO(content)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(_RUN, json.dumps(run))
    return archive.getvalue()


def run_of(content: bytes) -> dict[str, Any]:
    """The entry that with_run has added; {} if there is none."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return json.loads(file.read(_RUN)) if _RUN in file.namelist() else {}


@dataclass
class SavedModel:
    """A model as it is pickled."""

    package: str
    content: bytes
    custom_objects: dict[str, Any] | None

    @classmethod
    def of(cls, model: Any, custom_objects: dict[str, Any] | None) -> SavedModel:
        package = keras_of(model)
        return cls(package, to_bytes(model), _by_all_names(import_keras(package), custom_objects))

    def load(self) -> Any:
        return from_bytes(import_keras(self.package), self.content, self.custom_objects, compiled=False)


@dataclass
class SavedOptimizer:
    """An optimizer as it is pickled, without its state. The package is that of the model."""

    package: str
    config: Any
    custom_objects: dict[str, Any] | None

    @classmethod
    def of(cls, package: str, optimizer: Any, custom_objects: dict[str, Any] | None) -> SavedOptimizer:
        keras = import_keras(package)
        optimizer = keras.optimizers.get(optimizer)  # of its name
        return cls(package, keras.optimizers.serialize(optimizer), _by_all_names(keras, custom_objects))

    def load(self) -> Any:
        keras = import_keras(self.package)
        with keras.utils.custom_object_scope(self.custom_objects or {}), known_objects("the optimizer"):
            return keras.optimizers.deserialize(self.config)
