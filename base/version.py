"""Which Horovod this is, and which language its processes speak to each other."""

from __future__ import annotations

from importlib import metadata
from typing import Final

# Members, agents and coordinators say this number first; one that speaks another language is refused in words.
PROTOCOL_VERSION: Final = 3


def _version() -> str:
    try:
        return metadata.version("horovod")
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return "1.0.0.dev0"


__version__: Final = _version()
