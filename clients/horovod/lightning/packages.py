"""The two names under which Lightning is there: `lightning` and `pytorch_lightning`.

They are one code, but each has classes of its own, and the Trainer of one refuses a strategy of the other. So classes
here are written without their bases. They get those of the package that the script has imported when an object of them
is made.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from horovod.base.errors import TrainingCode, coded

# For each package: the module that has the Trainer, and the module of Fabric, on which the Trainer rests.
_PARTS = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
NAMES = tuple(_PARTS)
_made: dict[tuple[type, type], Any] = {}


def used(name: str | None) -> str:
    """`name`, or the one that is imported; where none is yet, the one that is installed.

    ValueError: another name, or both are imported, so that nobody knows whose Trainer it will be.
    """
    if name is not None:
        if name not in NAMES:
            sentence = f"package must be one of {', '.join(map(repr, NAMES))}, not {name!r}."
            raise ValueError(coded(TrainingCode.INVALID_ARGUMENT, sentence))
        return name
    imported = [name for name, (trainer, _) in _PARTS.items() if trainer in sys.modules]
    if len(imported) > 1:
        raise ValueError(
            coded(
                TrainingCode.INVALID_ARGUMENT,
                "Both lightning and pytorch_lightning are imported here, and a Trainer of one takes no strategy of the "
                "other. Say whose Trainer it is: HorovodStrategy(package='lightning').",
            )
        )
    return (imported or [name for name in NAMES if importlib.util.find_spec(name)])[0]


def part(package: str, below: str, name: str) -> Any:
    """An attribute of a module of the package: part("lightning", "strategies", "Strategy")."""
    trainer, fabric = _PARTS[package]
    above, _, rest = below.partition(".")
    return getattr(importlib.import_module(f"{fabric}.{rest}" if above == "fabric" else f"{trainer}.{below}"), name)


def completed(cls: Any, package: str, below: str, base: str) -> Any:
    """A subclass of `cls` and of the package's class `base`, which is in its module `below`; always the same one."""
    of_package = part(package, below, base)
    key = cls, of_package
    if key not in _made:
        _made[key] = type(of_package)(
            cls.__name__, (cls, of_package), {"__module__": cls.__module__, "package": package}
        )
    return _made[key]
