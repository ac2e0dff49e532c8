"""Pytrees in place of arrays: what their leaves are called, and how they travel.

Arrays of a tree travel in the order of its leaves. Trees with other keys may have leaves of the same shapes, and a rank
would then get the gradient of something else. So what travels is known by the keys, alike on all ranks, as in
"gradient['dense']['kernel']".
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax

from horovod.common.gradients import name_of_group
from horovod.jax.arrays import DTYPE_CODES, as_array, like_given

__all__ = ["names_of", "of_each", "of_list", "of_tree"]

_MOST_STRUCTURES: Final = 64
# Address in a key that has no representation of its own; it differs between ranks.
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_known: Final[dict[Any, tuple[str, ...]]] = {}
_LEAF: Final = jax.tree.structure(0)

# Runs a collective: of which arrays, whether as a group, by which name, and what they are if there is no name.
Run = Callable[[list[jax.Array], bool, str | None, str | None], Sequence[jax.Array]]


def of_tree(given: Any, operation: str, name: str | None, run: Run) -> Any:
    """The result of an operation for an array, or for a pytree of arrays, which travel as one group."""
    if isinstance(given, jax.Array):  # needs no look at what is in it
        return run([as_array(given, operation, name)], False, name, None)[0]
    leaves, structure = _leaves(given)
    if structure == _LEAF:
        return like_given(given, run([as_array(given, operation, name)], False, name, None)[0])
    arrays = _arrays(given, leaves, operation, name)
    if not arrays:
        return given
    results = run(arrays, True, name, name_of_group(names_of(given, structure, "tree")))
    return jax.tree.unflatten(structure, map(like_given, leaves, results))


def of_each(given: Any, operation: str, name: str | None, run: Run) -> Any:
    """The same for an operation without groups: each leaf of a tree travels by itself."""
    if isinstance(given, jax.Array) or (found := _leaves(given))[1] == _LEAF:
        return of_tree(given, operation, name, run)
    leaves, structure = found
    arrays = _arrays(given, leaves, operation, name)
    paths = names_of(given, structure, "")
    results = [
        run([array], False, None if name is None else f"{name}{path}", f"tree{path}")[0]
        for array, path in zip(arrays, paths, strict=True)
    ]
    return jax.tree.unflatten(structure, map(like_given, leaves, results))


def of_list(given: Sequence[Any], operation: str, name: str | None, run: Callable[[list[jax.Array]], Any]) -> list[Any]:
    """The results of an operation for a list of arrays."""
    given = list(given)
    arrays = [as_array(one, operation, name, f"[{place}]") for place, one in enumerate(given)]
    return list(map(like_given, given, run(arrays)))


def _leaves(tree: Any) -> tuple[list[Any], Any]:
    """With None as a leaf, which is none of a tree of JAX: it would be dropped without a word."""
    return jax.tree.flatten(tree, is_leaf=_is_none)


def _is_none(value: Any) -> bool:
    return value is None


def _arrays(tree: Any, leaves: list[Any], operation: str, name: str | None) -> list[jax.Array]:
    """The leaves as arrays. ValueError names the path of one that is none."""
    if all(isinstance(leaf, jax.Array) and leaf.dtype in DTYPE_CODES for leaf in leaves):
        return leaves
    with_paths, _ = jax.tree.flatten_with_path(tree, is_leaf=_is_none)
    return [as_array(leaf, operation, name, jax.tree_util.keystr(path)) for path, leaf in with_paths]


def names_of(tree: Any, structure: Any, root: str = "gradient") -> tuple[str, ...]:
    """The names of the leaves of `tree`, each beginning with `root`. structure: of `tree`, as JAX has found it.

    JAX takes several times as long to find the keys as to find the leaves, so the names of each structure are kept.
    """
    # Parts of a structure may have no hash, or compare otherwise than with True or False.
    with contextlib.suppress(TypeError, ValueError):
        return _known.get((root, structure)) or _keep((root, structure), _names(tree, root))
    return _names(tree, root)


def _keep(key: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    if len(_known) >= _MOST_STRUCTURES:
        _known.clear()
    _known[key] = names
    return names


def _names(tree: Any, root: str) -> tuple[str, ...]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return tuple(_ADDRESS.sub("", f"{root}{jax.tree_util.keystr(path)}") for path, _ in leaves)
