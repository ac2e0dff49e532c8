"""Modules of Horovod's API that do not exist yet: importing one is an ImportError that says so.

The finder stands last in sys.meta_path, so it is asked only for modules that nothing else finds: once such a package
exists, it is simply imported. It is a finder and not a set of packages that raise, so that importlib.util.find_spec,
with which programs look whether something is there, does not find what cannot be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_FRAMEWORK = "{} is not supported yet. PyTorch is: import horovod.torch"
WHY = {
    "horovod.mxnet": _FRAMEWORK.format("MXNet"),
}


class AbsentModules(MetaPathFinder):
    """Raises for the names in WHY, submodules included, since Python imports the package before them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """ModuleNotFoundError with a sentence for an import of a name in WHY; None for all else, as Python expects."""
        if fullname not in WHY or sys._getframe(2).f_globals.get("__name__") == "importlib.util":
            return None  # the second frame above this one is importlib.util.find_spec, which only asks, or an import
        from horovod import __version__

        raise ModuleNotFoundError(
            f"{fullname} is not there in this version of Horovod ({__version__}): {WHY[fullname]}.", name=fullname
        )


def announce() -> None:
    """Called when `horovod` is imported."""
    if not any(type(finder).__qualname__ == AbsentModules.__qualname__ for finder in sys.meta_path):
        sys.meta_path.append(AbsentModules())
