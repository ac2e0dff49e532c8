"""What the leaves of a pytree are called, alike on all ranks: by their keys, as in "gradient['dense']['kernel']".

Arrays of a tree travel in the order of its leaves. Trees with other keys may have leaves of the same shapes, and a rank
would then get the gradient of something else. So what travels is known by the keys.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any, Final

import jax

__all__ = ["names_of"]

_MOST_STRUCTURES: Final = 64
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")  # of a key without a representation of its own; no two ranks agree
_known: Final[dict[Any, tuple[str, ...]]] = {}


def names_of(tree: Any, structure: Any) -> tuple[str, ...]:
    """Of the leaves of `tree`, whose `structure` JAX has found.

    To find the keys takes JAX several times as long as to find the leaves, so the names of a structure are kept.
    """
    with contextlib.suppress(TypeError, ValueError):  # a structure may have parts without a hash, or with another ==
        return _known.get(structure) or _keep(structure, _names(tree))
    return _names(tree)


def _keep(structure: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    if len(_known) >= _MOST_STRUCTURES:
        _known.clear()
    _known[structure] = names
    return names


def _names(tree: Any) -> tuple[str, ...]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return tuple(_ADDRESS.sub("", f"gradient{jax.tree_util.keystr(path)}") for path, _ in leaves)
