"""hvd.DistributedOptimizer: the user's optimizer, whose step uses gradients reduced over all ranks.

The result is an instance of a subclass made on the fly, so that isinstance, param_groups, learning-rate schedulers and
GradScaler see the optimizer they know. It shares param_groups and state with the optimizer it was made from. What it
adds is small: construction checks, `synchronize` around `step`, and guards; horovod.torch.reducer does the reductions.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar, cast

import torch

from horovod.base.errors import OperationCode, TrainingCode, coded
from horovod.common.basics import Adasum, Average, Sum
from horovod.common.ops.objects import allgather_object
from horovod.common.ops.specs import registered_number
from horovod.common.optimizer_numbers import Made, Numbers
from horovod.common.process_sets import ProcessSet, global_process_set, of_ranks
from horovod.common.script import level_of_the_script
from horovod.torch import unreduced
from horovod.torch.adasum_optimizer import AdasumOptimizer
from horovod.torch.adasum_overlap import check_one_by_one
from horovod.torch.closures import decides_by_loss, loss_of_all
from horovod.torch.compression import Compression, Compressor, GradientCompressor
from horovod.torch.internals import calling_grad_scaler, is_called_by_grad_scaler, untraced
from horovod.torch.misuse import check_is_optimizer, guard, unnamed_parameters, warn_of_wrong_devices
from horovod.torch.reducer import GradientReducer
from horovod.torch.wrapping import (
    Arguments,
    Named,
    WrappedOptimizer,
    adorn,
    named_by_torch,
    named_group,
    share_state,
    tell_schedulers,
)
from horovod.worker.runtime.context import current, is_member

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_NO_NAME: Final = "allreduce.noname"
_STEPS_TO_A_SCALER: Final = 2  # a scaler that has not called step() by then does not call it


class _DistributedOptimizer(WrappedOptimizer):
    """What the on-the-fly subclass adds. Comes first in the method resolution order, the user's class second."""

    _hvd_synchronized: bool  # whether synchronize() was called since the last step
    _hvd_skip: bool  # inside skip_synchronize()
    process_set: ProcessSet

    @functools.cached_property
    def _hvd_reducer(self) -> GradientReducer:
        """Made with the optimizer, but for one that was unpickled before hvd.init(): then when it is first needed."""
        arguments = self._hvd_arguments
        if arguments.process_set.process_set_id is None and self.process_set is arguments.process_set:
            self.process_set = arguments.process_set = of_ranks(arguments.process_set.ranks)
        reducer = _reducer(self, self._hvd_named, arguments, self._hvd_made)
        if reducer.enabled:
            guard(self._hvd_original, reducer.stepped_past)
        return reducer

    # Scripts and libraries read these three.
    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return self._hvd_reducer.names()

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """The parameters whose gradients are reduced."""
        return self._hvd_reducer.trained()

    @property
    def _handles(self) -> dict[torch.Tensor, Any]:
        """Whose gradients are on their way, as keys; empty after a backward pass that waited for the averages."""
        return self._hvd_reducer.on_their_way()

    @untraced
    def synchronize(self) -> None:
        """Waits until all gradients are reduced; afterwards they may be clipped or inspected.

        The backward pass that makes the last gradient has waited already, unless a parameter of some rank has none;
        such gradients take part as zeros. They do so too where no rank has one, so weight decay and momentum change a
        parameter that one process would leave alone. Freeze it to prevent that. Call `step`
        inside `skip_synchronize()` afterwards.

        Raises:
            AssertionError: a gradient was changed while it was being reduced; the message names parameter, rank and
                step. All ranks raise it, and none has taken the step.
            HorovodInternalError: a rank was lost, or the ranks do not agree.
        """
        self._hvd_reducer.synchronize()
        self._hvd_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step` does not synchronize, because `synchronize` was called before:

        >>> optimizer.synchronize()
        >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> with optimizer.skip_synchronize():
        ...     optimizer.step()
        """
        self._hvd_skip = True
        try:
            yield
        finally:
            self._hvd_skip = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronizes the gradients (outside skip_synchronize) and takes the optimizer's step.

        With a closure, the gradients are synchronized each time after it has computed them. LBFGS, which decides by the
        loss that the closure returns, gets the average over the ranks. Raises what `synchronize` does, and ValueError
        where `param_groups` has a parameter that came past `add_param_group`.
        """
        closure = self._hvd_begin_step(closure)
        # torch.compile may trace the step of the user's class, and nothing else.
        result = super().step() if closure is None else super().step(closure)
        self._hvd_end_step()
        return result

    @untraced
    def _hvd_begin_step(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """The closure that the step of the user's class is to have."""
        tell_schedulers(self._hvd_original)
        if self._hvd_reducer.enabled:
            self._hvd_check(self._hvd_reducer.watches)
            if self._hvd_reducer.steps < _STEPS_TO_A_SCALER and (scaler := calling_grad_scaler()) is not None:
                self._hvd_reducer.note_scaler(scaler)
        if closure is not None:
            closure = self._hvd_closure(closure, synchronizes=not self._hvd_skip)
        elif self._hvd_skip:
            self._hvd_reducer.settle()
        else:
            reducer = self._hvd_reducer
            if self._hvd_synchronized and not reducer.stale and not reducer.averaged:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). The gradients are reduced already and are not reduced again. Write: "
                    "with optimizer.skip_synchronize(): optimizer.step()",
                    stacklevel=level_of_the_script(),
                )
            else:
                reducer.synchronize(scaled=reducer.watched_by_others and is_called_by_grad_scaler())
        self._hvd_synchronized = False
        self._hvd_stepping = True
        return closure

    @untraced
    def _hvd_end_step(self) -> None:
        self._hvd_stepping = False
        self._hvd_reducer.note_step()
        self._hvd_reducer.steps += 1

    step.hooked = True  # type: ignore[attr-defined]  # else PyTorch runs the hooks around it when it loads state

    def _hvd_closure(self, closure: Callable[[], Any], synchronizes: bool) -> Callable[[], Any]:
        """synchronizes: after `closure`, which has done so itself otherwise."""
        agrees = decides_by_loss(self) and self._hvd_reducer.enabled

        @untraced
        def together() -> Any:
            loss = closure()
            if synchronizes:
                self._hvd_reducer.synchronize()
            else:
                self._hvd_reducer.settle()
            self._hvd_reducer.note_step()  # the closure may clear the gradients when it is called again
            return loss_of_all(loss, self._hvd_arguments, self._hvd_reducer.first_name()) if agrees else loss

        return together

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients and restarts the count of backward passes.

        Raises AssertionError while gradients are being reduced: after a backward pass that could not wait for the
        averages, as `synchronize` says.
        """
        if self._hvd_reducer.in_flight:
            raise AssertionError(
                coded(
                    TrainingCode.GRADIENTS_IN_FLIGHT,
                    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                    "optimizer.synchronize(). This is prohibited as it can cause a race condition.",
                )
            )
        self._hvd_reducer.restart()
        self._hvd_synchronized = False
        super().zero_grad(set_to_none)

    @untraced
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduces after `passes` backward passes from now on; the local gradients are summed up meanwhile."""
        _check_passes(passes)
        self._hvd_reducer.set_passes(passes)
        self._hvd_arguments.backward_passes_per_step = self.backward_passes_per_step = passes

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state. A step that has begun is not taken on any rank; waits for gradients that are in flight.

        Ranks that go on with that step get an AssertionError in `synchronize` or `step`.
        """
        self._hvd_abandon_step()
        super().load_state_dict(state_dict)
        share_state(self, self._hvd_original)

    def _hvd_abandon_step(self) -> None:
        """A step that has begun is not taken on any rank, and the ranks' weights are compared in the next one."""
        self._hvd_reducer.reset()
        self._hvd_synchronized = False
        self._hvd_skip = False
        self._hvd_reducer.compare_weights()

    @untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, whose gradients are reduced from now on, under their names if the optimizer knows them."""
        super().add_param_group(param_group)
        added = named_group(self, self._hvd_named, _NO_NAME)
        if self._hvd_reducer.enabled:
            self._hvd_reducer.watch(added)
        self._hvd_named += added


def DistributedOptimizer(  # noqa: N802
    optimizer: _Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | GradientCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _Optimizer:
    """An optimizer of the same class whose `step` uses gradients reduced over all ranks.

    Each gradient is reduced while the backward pass still computes others. The pass then waits for the averages: they
    are in `.grad` when `backward()` returns, and you may clip them, as with DistributedDataParallel. If some rank makes
    no gradient of some parameter in a step, call `synchronize()` on all ranks before you clip or change gradients;
    otherwise every rank raises an error.
    Gradients of `backward_passes_per_step` passes are summed locally first. On a rank outside `process_set` the result
    is the optimizer unchanged.

    Example:

        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    Args:
        optimizer: any optimizer of torch; do not use it any more afterwards.
        named_parameters: `model.named_parameters()`; the names match gradients across ranks and appear in messages.
            Without them, the names that the optimizer was given are used, as in SGD(model.named_parameters());
            without these, gradients match by their place in the parameter groups, which must have the same order on
            all ranks.
        compression: how gradients are sent: Compression.fp16, Compression.bf16, your own Compressor class, or an
            instance of your own GradientCompressor (horovod.torch.compression), which needs op Average or Sum and no
            groups. Sparse gradients are not compressed, unless sparse_as_dense.
        backward_passes_per_step: number of backward passes before each step.
        op: hvd.Average, hvd.Sum, or hvd.Adasum: each rank then takes its own step and the changes of the parameters are
            combined (adasum_optimizer.py), in `step` or, with HOROVOD_ADASUM_OVERLAP, beside the backward pass
            (adasum_overlap.py); groups, sparse_as_dense and gradient_predivide_factor have no meaning then.
        gradient_predivide_factor: with Average, divides by this before and by size / this after the sum.
        num_groups: deprecated, use groups.
        groups: reduce gradients together: a number of groups of equal length, or lists of parameters.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that take part.

    The arguments op, process_set, backward_passes_per_step, gradient_predivide_factor and sparse_as_dense are
    attributes of the result. Copies of it, by copy.deepcopy((model, optimizer)) or by pickle, are distributed in the
    same way. Several optimizers may have parameters of the same names, as those of two models of one class or of copies
    have; all ranks make them in the same order, and may use them in any.

    Warns of an optimizer that is distributed already, of parameters on a device whose tensors can't be reduced, in the
    first step of ranks whose parameters, state or options differ (HOROVOD_DIFFERENT_WEIGHTS makes it a ValueError), and
    in the third step of ranks that all train on the same data.

    Raises:
        TypeError: `optimizer` is a model, a class or something else that is no optimizer.
        ValueError: arguments that contradict each other or the optimizer; names that are missing or not unique; with
            HOROVOD_ADASUM_OVERLAP, an optimizer that may not step each parameter by itself.
        NotImplementedError: Adasum in a process set that is not the global one.
    """
    if isinstance(optimizer, (_DistributedOptimizer, AdasumOptimizer)):
        warnings.warn(
            "hvd.DistributedOptimizer was given an optimizer that is distributed already; it is returned unchanged. "
            "Wrapping twice would reduce every gradient twice.",
            stacklevel=2,
        )
        return optimizer
    check_is_optimizer(optimizer, "hvd.DistributedOptimizer")
    _check_predivide_factor(gradient_predivide_factor, op)
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed.",
            DeprecationWarning,
            stacklevel=2,
        )
        if groups is None:
            groups = num_groups
    _check_passes(backward_passes_per_step)
    _check_compression(compression, op, groups)
    arguments = Arguments(
        op, process_set, backward_passes_per_step, gradient_predivide_factor, sparse_as_dense, compression
    )
    if op == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError(
                coded(OperationCode.UNDEFINED_REDUCTION, "Adasum does not support non-global process sets.")
            )
        if current().world.size > 1:
            named = _named(optimizer, named_parameters)
            warn_of_wrong_devices(named)
            if current().settings.adasum_overlap:
                check_one_by_one(optimizer)
            return cast(_Optimizer, wrap(optimizer, named, arguments, is_copy=False))
    if process_set is not global_process_set:
        registered_number(process_set, "hvd.DistributedOptimizer")
    named = _named(optimizer, named_parameters)
    _check_groups(groups)
    if _has_others(arguments):
        warn_of_wrong_devices(named)
        if groups is not None:
            arguments.groups = _partition(named, groups, process_set)
    return cast(_Optimizer, wrap(optimizer, named, arguments, is_copy=False))


def wrap(
    optimizer: torch.optim.Optimizer,
    named: Named,
    arguments: Arguments,
    is_copy: bool = True,
    numbers: Numbers | None = None,
) -> Any:
    """The distributed optimizer that these make. pickle and copy.deepcopy call it too, maybe before hvd.init().

    numbers: of the one that was copied.
    """
    made = Made((name for name, _ in named), arguments.process_set, is_copy, numbers)
    if arguments.op == Adasum and not (is_member() and current().world.size == 1):
        wrapped = adorn(
            optimizer, AdasumOptimizer, _hvd_named=named, _hvd_arguments=arguments, _hvd_wrap=wrap, _hvd_made=made
        )
        if is_member():
            _ = wrapped._hvd_steps
        return wrapped
    wrapped = adorn(
        optimizer,
        _DistributedOptimizer,
        _hvd_named=named,
        _hvd_arguments=arguments,
        _hvd_wrap=wrap,
        _hvd_made=made,
        _hvd_synchronized=False,
        _hvd_skip=False,
    )
    if is_member() and arguments.process_set.process_set_id is not None:
        _ = wrapped._hvd_reducer
    return wrapped


def gradient_reducer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]], arguments: Arguments
) -> GradientReducer:
    """For a training loop that leaves the optimizer as it is: it calls `synchronize` of the reducer when a backward
    pass is over, and `close` in the end. Raises what DistributedOptimizer does, and ValueError for op=hvd.Adasum.
    """
    if arguments.op == Adasum:
        sentence = "op=hvd.Adasum combines steps and not gradients, which only hvd.DistributedOptimizer does."
        raise ValueError(coded(TrainingCode.CONTRADICTORY_ARGUMENTS, sentence))
    _check_predivide_factor(arguments.gradient_predivide_factor, arguments.op)
    _check_compression(arguments.compression, arguments.op, arguments.groups)
    named = _named(optimizer, named_parameters)
    if _has_others(arguments):
        warn_of_wrong_devices(named)
    unreduced.watch.over()
    reducer = _reducer(optimizer, named, arguments, Made((name for name, _ in named), arguments.process_set))
    reducer.compare_after_loading(optimizer)
    return reducer


def _has_others(arguments: Arguments) -> bool:
    """Whether there is anyone to reduce with. An elastic job that starts with one rank may grow."""
    context = current()
    return bool(arguments.process_set.included()) and (context.world.size > 1 or context.settings.may_grow)


def _reducer(optimizer: torch.optim.Optimizer, named: Named, arguments: Arguments, made: Made) -> GradientReducer:
    """ValueError: before hvd.init(), or the process set is not registered."""
    if arguments.process_set is not global_process_set:
        registered_number(arguments.process_set, "hvd.DistributedOptimizer")
    reducer = GradientReducer(
        compression=arguments.compression,
        backward_passes_per_step=arguments.backward_passes_per_step,
        op=arguments.op,
        gradient_predivide_factor=arguments.gradient_predivide_factor,
        sparse_as_dense=arguments.sparse_as_dense,
        process_set=arguments.process_set,
        made=made,
        enabled=_has_others(arguments),
        optimizer=optimizer,
    )
    if reducer.enabled:
        reducer.watch(named)
        if arguments.groups is not None:
            reducer.group(arguments.groups)
    return reducer


def _default_names(group: int, parameters: Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(f"{_NO_NAME}.{group}.{index}", parameter) for index, parameter in enumerate(parameters)]


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters with their names, in the order of the names given."""
    if named_parameters is None:
        return named_by_torch(optimizer.param_groups) or [
            pair
            for index, group in enumerate(optimizer.param_groups)
            for pair in _default_names(index, group["params"])
        ]
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            coded(
                TrainingCode.INVALID_NAMES,
                "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                "model.named_parameters().",
            )
        )
    duplicates = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if duplicates:
        raise ValueError(
            coded(
                TrainingCode.INVALID_NAMES,
                f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}",
            )
        )
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if sentence := unnamed_parameters(optimizer, named):
        raise ValueError(coded(TrainingCode.INVALID_NAMES, sentence))
    return [pair for pair in named if id(pair[1]) in own]


def _check_passes(passes: int) -> None:
    if passes <= 0:
        raise ValueError(coded(TrainingCode.INVALID_ARGUMENT, "backward_passes_per_step must be > 0"))


def _check_predivide_factor(factor: float, op: int) -> None:
    if factor != 1.0 and op != Average:
        raise ValueError(
            coded(TrainingCode.CONTRADICTORY_ARGUMENTS, "gradient_predivide_factor not supported with op != Average.")
        )


def _check_compression(compression: Any, op: int, groups: Any) -> None:
    if isinstance(compression, type) and issubclass(compression, GradientCompressor):
        raise ValueError(
            coded(
                TrainingCode.INVALID_COMPRESSOR,
                f"compression is the class {compression.__name__}, which has memory; pass an instance of it, one for "
                f"each optimizer: compression={compression.__name__}(...).",
            )
        )
    if isinstance(compression, GradientCompressor):
        name = type(compression).__name__
        if op not in (Average, Sum):
            raise ValueError(
                coded(
                    TrainingCode.CONTRADICTORY_ARGUMENTS,
                    f"{name} is a GradientCompressor, which needs op=hvd.Average or op=hvd.Sum.",
                )
            )
        if groups is not None:
            raise ValueError(
                coded(
                    TrainingCode.CONTRADICTORY_ARGUMENTS, f"{name} reduces each gradient on its own; leave out groups."
                )
            )


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
        raise ValueError(
            coded(
                TrainingCode.INVALID_GROUPS,
                "groups should be a non-negative integer or a list of list of torch.Tensor.",
            )
        )
    if isinstance(groups, list):
        seen: set[int] = set()
        for group in groups:
            for parameter in group:
                if not isinstance(parameter, torch.Tensor):
                    raise ValueError(
                        coded(
                            TrainingCode.INVALID_GROUPS,
                            f"groups must consist of torch.Tensor, but one element is a {type(parameter).__name__}.",
                        )
                    )
                if id(parameter) in seen:
                    raise ValueError(coded(TrainingCode.INVALID_GROUPS, "A parameter can only appear once in groups."))
                seen.add(id(parameter))


def _partition(
    named: list[tuple[str, torch.Tensor]], groups: int | list[list[torch.Tensor]], process_set: ProcessSet
) -> list[list[torch.Tensor]]:
    """Lists of parameters; those that are in none are reduced on their own."""
    if isinstance(groups, list):
        return groups
    # All ranks must cut at the same places, so the first one's order counts.
    trainable = {name: parameter for name, parameter in named if parameter.requires_grad}
    orders = allgather_object(list(trainable), "distributed_optimizer.groups", process_set)
    order = orders[0]
    ranks = process_set.ranks or range(len(orders))
    for rank, names in zip(ranks, orders, strict=True):
        if differing := sorted(set(names) ^ set(order)):
            raise ValueError(
                coded(
                    TrainingCode.DIFFERENT_MODELS,
                    f"With groups={groups}, all ranks must have trainable parameters of the same names, but "
                    f"{differing[0]!r} is one on rank {rank if differing[0] in names else ranks[0]} and not on rank "
                    f"{ranks[0] if differing[0] in names else rank}.",
                )
            )
    length, longer = divmod(len(order), groups)
    parts = []
    first = 0
    for index in range(groups):
        count = length + (index < longer)
        parts.append([trainable[name] for name in order[first : first + count]])
        first += count
    return parts
