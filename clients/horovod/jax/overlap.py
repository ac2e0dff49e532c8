"""Gradients in several calls, which travel while a compiled function goes on with the backward pass.

Each call but the last one is asynchronous: XLA runs on with what needs none of its results. What that is depends on
memory too. XLA first puts all operations into one order, with little memory in mind, and there gives memory that is
free to the next operation that needs some, which then waits for all that has used it before. Weights that need only
their own gradient would be updated right after the call for that; the backward pass then takes the gradient's memory,
and waits for the call. `after_all` lets no weight be updated before the last call has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from horovod.common.gradients import name_of_group
from horovod.jax.library import AFTER_ALL, register
from horovod.jax.reductions import allreduce_of

__all__ = ["after_all", "allreduce_groups"]


def allreduce_groups(
    arrays: Sequence[Any],
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    called: Callable[[str], str] = str,
    **options: Any,
) -> list[Any]:
    """The arrays, reduced in a call for each group of places in the list, in the order of the groups.

    Arrays in no group stay as they are. names: of the arrays; `called` makes of the name of a group the one by which
    other ranks know it. The options are those of `grouped_allreduce`.
    """
    results = list(arrays)
    for number, group in enumerate(groups, 1):
        content = called(name_of_group([names[place] for place in group])) if group else ""
        reduced = allreduce_of(content, [arrays[place] for place in group], number < len(groups), **options)
        for place, result in zip(group, reduced, strict=True):
            results[place] = result
    if len(groups) > 1:
        places = [place for group in groups for place in group]
        for place, result in zip(places, after_all([results[place] for place in places]), strict=True):
            results[place] = result
    return results


def after_all(arrays: Sequence[Any]) -> list[Any]:
    """The same arrays. In functions that are compiled for the CPU, no result is ready before all of `arrays` are.

    XLA removes jax.lax.optimization_barrier before it puts operations into their order; a custom call it keeps.
    """
    results: list[Any] = after_all_p.bind(*arrays)
    return results


def _lowered(ctx: Any, *arrays: Any) -> Any:
    register()
    in_place = {place: place for place in range(len(arrays))}
    return jax.ffi.ffi_lowering(AFTER_ALL, operand_output_aliases=in_place)(ctx, *arrays)


after_all_p: Final = Primitive("horovod_after_all")
after_all_p.multiple_results = True
after_all_p.def_impl(lambda *arrays: list(arrays))
after_all_p.def_abstract_eval(lambda *arrays: list(arrays))
ad.primitive_jvps[after_all_p] = lambda primals, tangents: (after_all(primals), list(tangents))
batching.primitive_batchers[after_all_p] = lambda arrays, dimensions: (after_all(arrays), list(dimensions))
mlir.register_lowering(after_all_p, lambda ctx, *arrays: list(arrays))
mlir.register_lowering(after_all_p, _lowered, platform="cpu")
