"""Gradients that are the same on all ranks: `DistributedOptimizer` for Optax, `grad` and `value_and_grad` for the rest.

Both send all gradients of a step in one call, or in `groups` of them. They can be compiled (jax.jit), and should be.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Adasum, Average, Sum
from horovod.common.gradients import Reduction, Taken, check_passes, refuse
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.jax import plain_updates as plain_updates
from horovod.jax.compression import Compression, Compressor
from horovod.jax.overlap import allreduce_groups
from horovod.jax.same_weights import compared, compared_of_function
from horovod.jax.trees import names_of

if TYPE_CHECKING:
    import optax

__all__ = ["DistributedOptimizer", "DistributedState", "grad", "value_and_grad"]


class DistributedState(NamedTuple):
    """The state of a DistributedOptimizer with backward_passes_per_step > 1; else it is the state of `optimizer`."""

    passes: jax.Array  # since the last step
    sums: Any  # of this rank's gradients of these passes
    inner: Any


def DistributedOptimizer(  # noqa: N802  (its name in every framework)
    optimizer: optax.GradientTransformation,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    groups: int | None = None,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that reduces gradients over the ranks and gives them to `optimizer`.

        >>> optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))
        >>> opt_state = optimizer.init(params)
        >>> @jax.jit
        ... def step(params, opt_state, batch):
        ...     loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        ...     updates, opt_state = optimizer.update(gradients, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state, loss

    With op=hvd.Adasum `optimizer` makes its updates of this rank's gradients, and these are reduced.

    Args:
        optimizer: an optax.GradientTransformation.
        compression: how gradients travel, for example hvd.Compression.fp16.
        backward_passes_per_step: so many calls of update() make one step: gradients are summed on this rank, the
            updates of all calls but the last are zeros, and the ranks meet in the last one only.
        op: hvd.Average, hvd.Sum or hvd.Adasum.
        gradient_predivide_factor: gradients are divided by it before they are summed, and by the rest of the number of
            ranks afterwards; with hvd.Average.
        groups: in how many calls the gradients are sent; None: in one. Those at the end of the tree travel first, while
            others are computed, where XLA has another thread for that.
        average_aggregated_gradients: the sums are divided by backward_passes_per_step.
        process_set: the ranks that take part; on others `optimizer` gets their own gradients.

    Returns:
        An optax.GradientTransformationExtraArgs.

    Raises:
        TypeError: `optimizer` is a model, a function such as optax.adam itself, or something else that is none.
        ValueError, NotImplementedError: arguments that contradict each other. For errors of update() see `allreduce`.
    """
    try:
        import optax  # only who uses it needs it
    except ModuleNotFoundError as error:
        raise ImportError(
            f"hvd.DistributedOptimizer needs Optax, which is not installed ({error}). Install it with: "
            "pip install 'horovod[jax]'"
        ) from error

    if isinstance(optimizer, type) or not all(callable(getattr(optimizer, one, None)) for one in ("init", "update")):
        taken = Taken("an optax.GradientTransformation", "optax.adam(1e-3)")
        raise refuse(optimizer, "hvd.DistributedOptimizer", taken)
    check_passes(backward_passes_per_step)
    _check_groups(groups)
    reduction = Reduction(compression, op, gradient_predivide_factor, groups, process_set)
    inner = optax.with_extra_args_support(optimizer)
    made = Made(["gradient"], process_set)

    def average(tree: Any) -> Any:
        if not reduction.communicates():
            return tree
        with made.step():
            return reduced(tree, reduction, made.called)

    def step(gradients: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
        # With Adasum the state is made of this rank's own gradients.
        held = {"state": None if op == Adasum else state, "parameter": params}
        if op != Adasum:
            _check_own(gradients, op)
        with compared(gradients, held, reduction, made):
            if op != Adasum:
                gradients = average(gradients)
            else:
                updates, state = inner.update(gradients, state, params, **extra)
                return average(updates), state
        return inner.update(gradients, state, params, **extra)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return step(gradients, state, params, extra)

    passes = backward_passes_per_step

    def init(params: Any) -> Any:
        _check_place(optax)
        return inner.init(params)

    def init_sums(params: Any) -> DistributedState:
        _check_place(optax)
        return DistributedState(jnp.zeros((), "int32"), jax.tree.map(jnp.zeros_like, params), inner.init(params))

    def update_sums(gradients: Any, state: DistributedState, params: Any = None, **extra: Any) -> Any:
        _check_own(gradients, op)
        sums = jax.tree.map(jnp.add, state.sums, gradients)

        def last(state: DistributedState) -> Any:
            total = jax.tree.map(lambda one: one / passes, sums) if average_aggregated_gradients else sums
            updates, after = step(total, state.inner, params, extra)
            return updates, DistributedState(jnp.zeros_like(state.passes), jax.tree.map(jnp.zeros_like, sums), after)

        def earlier(state: DistributedState) -> Any:
            return jax.tree.map(jnp.zeros_like, gradients), DistributedState(state.passes + 1, sums, state.inner)

        is_last = state.passes == passes - 1
        if isinstance(is_last, jax.core.Tracer):
            return jax.lax.cond(is_last, last, earlier, state)
        return last(state) if is_last else earlier(state)  # cond would compile them anew in each call

    if passes == 1:
        return optax.GradientTransformationExtraArgs(init, update)
    return optax.GradientTransformationExtraArgs(init_sums, update_sums)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    groups: int | None = None,
    process_set: ProcessSet = global_process_set,
    **options: Any,
) -> Callable[..., Any]:
    """jax.value_and_grad whose gradients are reduced over the ranks; the value is this rank's. Example:

        >>> loss, gradients = hvd.value_and_grad(loss_of)(params, batch)

    Args:
        fun, argnums, has_aux, options: as for jax.value_and_grad.
        compression, op, gradient_predivide_factor, groups, process_set: as for `DistributedOptimizer`; with hvd.Adasum
            it is the gradients that are reduced.

    Raises:
        ValueError, NotImplementedError: arguments that contradict each other. For errors of a call see `allreduce`.
    """
    _check_groups(groups)
    reduction = Reduction(compression, op, gradient_predivide_factor, groups, process_set)
    inner = jax.value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradients = inner(*args, **kwargs)
        params = args[argnums] if isinstance(argnums, int) else tuple(args[one] for one in argnums)
        with compared_of_function(gradients, params, reduction):
            found = reduced(gradients, reduction)
        if reduction.communicates():
            _remember(found)
        return value, found

    return call


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    groups: int | None = None,
    process_set: ProcessSet = global_process_set,
    **options: Any,
) -> Callable[..., Any]:
    """jax.grad whose gradients are reduced over the ranks. Takes and raises what `value_and_grad` does. Example:

    >>> gradients = hvd.grad(loss_of)(params, batch)
    """
    both = value_and_grad(
        fun,
        argnums,
        has_aux,
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
        **options,
    )

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return call


def reduced(tree: Any, reduction: Reduction, called: Callable[[str], str] = str) -> Any:
    """The pytree with its floating-point leaves reduced over the ranks; others are as they were.

    called: makes names on the wire.
    """
    if not reduction.communicates():
        return tree
    leaves, structure = jax.tree.flatten(tree)
    names = names_of(tree, structure)
    places = [place for place, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    common: dict[str, Any] = {
        "compression": reduction.compression,
        "op": reduction.op,
        "prescale_factor": reduction.prescale,
        "postscale_factor": reduction.postscale,
        "process_set": reduction.process_set,
    }
    count = min(reduction.groups or 1, len(places)) if isinstance(reduction.groups, int | None) else 1
    # Calls run in the order of the program, and a backward pass ends with the first layers. Most trees are in the order
    # of the layers, so the last part goes first: it need not wait for the gradients of the first layers.
    groups = [
        places[len(places) * part // count : len(places) * (part + 1) // count] for part in reversed(range(count))
    ]
    if reduction.op == Adasum:  # each array by itself, or their lengths would count together
        groups = [[place] for place in reversed(places)]
    return jax.tree.unflatten(structure, allreduce_groups(leaves, names, groups, called, **common))


# The arrays that hvd.grad and hvd.value_and_grad have returned, by identity, as long as anything holds them.
_REDUCED: Final[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()


def _remember(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        with contextlib.suppress(TypeError):  # a leaf that is a number
            _REDUCED[id(leaf)] = leaf


def _check_own(tree: Any, op: int) -> None:
    """Raises ValueError where gradients that are reduced are to be summed up again. An average of equal ones is one."""
    if op == Sum and any(_REDUCED.get(id(leaf)) is leaf for leaf in jax.tree.leaves(tree)):
        raise ValueError(
            coded(
                TrainingCode.REDUCED_TWICE,
                "hvd.DistributedOptimizer with op=hvd.Sum got gradients that hvd.grad or hvd.value_and_grad has "
                "reduced: to sum them up again would multiply them by the number of ranks. Take jax.grad, or the plain "
                "optimizer.",
            )
        )


def _check_place(optax: Any) -> None:
    """Raises ValueError within a transformation that decides by this rank's gradients whether it calls ours: the ranks
    whose gradients it skips would make no collective, and the next one of theirs would meet this one of the others.

    Such a transformation is known by its code, among the callers of `init`.
    """
    if_finite = optax.apply_if_finite.__code__.co_consts
    frame = inspect.currentframe()
    while frame is not None:
        skips = getattr(frame.f_locals.get("self"), "_should_skip_update_fn", None)
        decides = skips is not None and not getattr(skips, "__qualname__", "").startswith("MultiSteps.__init__.")
        if frame.f_code in if_finite or (frame.f_code is optax.MultiSteps.init.__code__ and decides):
            raise ValueError(
                coded(
                    TrainingCode.CONTRADICTORY_ARGUMENTS,
                    "hvd.DistributedOptimizer is within a transformation (optax.apply_if_finite, or optax.MultiSteps "
                    "with should_skip_update_fn) that looks at this rank's gradients and may skip the reduction on "
                    "some ranks only. Put it outside: hvd.DistributedOptimizer(optax.apply_if_finite(...)).",
                )
            )
        frame = frame.f_back


def _check_groups(groups: Any) -> None:
    if groups is not None and (not isinstance(groups, int) or isinstance(groups, bool) or groups < 1):
        raise ValueError(
            coded(
                TrainingCode.INVALID_GROUPS,
                f"groups must be the number of calls in which gradients are sent, or None, not {groups!r}.",
            )
        )
