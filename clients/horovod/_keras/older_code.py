"""Hints for code and files of Keras 2 that meet Keras 3: behind the error that ends the program, and in load_model.

`horovodrun --check` (launch/check) finds the same before a script runs, and more.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, Final

from horovod.base.errors import LaunchCode, coded
from horovod.common.unreduced import when_in_a_world
from horovod.worker.runtime import errors

# The type of an error of Keras 3, words in its message, and what to write.
_HINTS: Final = (
    (TypeError, r"'experimental_run_tf_function'", "leave experimental_run_tf_function out of compile()"),
    (ValueError, r"not recognized: .*'lr'", "write learning_rate= in place of lr="),
    (AttributeError, r"has no attribute 'lr'$", "write optimizer.learning_rate in place of optimizer.lr"),
    (ImportError, r"optimizers\.legacy", "write keras.optimizers in place of keras.optimizers.legacy"),
    (
        AttributeError,
        r"has no attribute '(fit|evaluate|predict)_generator'$",
        "fit, evaluate and predict take generators",
    ),
    (AttributeError, r"keras\S*backend' has no attribute '[gs]et_session'$", "leave sessions of keras.backend out"),
    (TypeError, r"argument '(workers|use_multiprocessing|max_queue_size)'$", "give it to the keras.utils.PyDataset"),
    (ValueError, r"must end in `\.(weights\.h5|keras)`", "rename the file: NAME.keras, or NAME.weights.h5 for weights"),
)
_H5: Final = (".h5", ".hdf5")


def hint(error: BaseException) -> str:
    """The sentence behind an error that code for Keras 2 gets from Keras 3; "" of any other."""
    keras = sys.modules.get("keras")
    version = str(getattr(keras, "__version__", "2."))
    if version.startswith("2."):
        return ""
    for kind, words, remedy in _HINTS:
        if isinstance(error, kind) and re.search(words, str(error)):
            sentence = f"This is code for Keras 2, which Keras {version} does not run: {remedy}."
            return coded(LaunchCode.OLDER_SCRIPT, f"{sentence} `horovodrun --check SCRIPT` names all such lines.")
    return ""


def older_file(keras: Any, filepath: Any) -> str:
    """What to do where Keras 3 does not load a file of Keras 2; "" where it is none."""
    if str(keras.__version__).startswith("2.") or not isinstance(filepath, str | os.PathLike):
        return ""
    path = Path(filepath)
    if path.suffix in _H5 and path.exists():
        return (
            "Keras 3 can't read some losses and metrics from such files. Pass the ones that the error names, as in "
            'custom_objects={"mse": keras.losses.MeanSquaredError()}.'
        )
    if (path / "saved_model.pb").exists():
        return (
            "Keras 3 does not load a SavedModel. Load it with Keras 2 (tf_keras.models.load_model) and save it as "
            "NAME.h5."
        )
    return ""


errors.HINTS.append(hint)
when_in_a_world(errors.print_as_a_sentence)
