"""The classes of a public module: of each that the modules of both Keras share, one for its own Keras.

The public module first imports all names of the shared one, which is what readers and type checkers see, and then puts
its own classes in their places.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras.callbacks import Callback
else:
    Callback = object


class CallbackMixin(Callback):
    """Comes before Keras's Callback, of whichever Keras, in the bases of a public class."""

    _hvd_keras: Any


def classes_for(keras: Any, module: str, shared: ModuleType) -> dict[str, type]:
    """By name, for the globals of `module`. `_hvd_keras` of each is the Keras that it is for."""
    made = {}
    for name in shared.__all__:
        of_both = getattr(shared, name)
        bases = (of_both, keras.callbacks.Callback) if issubclass(of_both, CallbackMixin) else (of_both,)
        made[name] = type(name, bases, {"__module__": module, "__doc__": of_both.__doc__, "_hvd_keras": keras})
    return made
