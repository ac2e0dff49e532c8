"""Digests of what a torch optimizer holds: parameters that are trained, state, options, and its GradScaler's scale.

A digest reads a tensor once, where it is, at the speed of memory. It adds up the tensor's bytes as 64-bit numbers, row
by row, and then mixes the rows' sums. What is not seen, inside of a row of 16 KiB: numbers that only change places, and
an even count of numbers that only change their sign.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from horovod.base.words import joined
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet
from horovod.common.same_weights import SCALER, Item, Kind, SameWeights

_ROW: Final = 2048  # 64-bit numbers
_SMALL: Final = 1 << 15  # numbers
_WORD_BYTES: Final = 8
_ODD: Final = 0x1E3779B97F4A7C15  # 64-bit arithmetic wraps around
_Thing = tuple[str, str, "torch.Tensor | float"]  # owner and name, as in Held
# How a step is computed, and not what comes of it: ranks may have different devices.
_OTHER_OPTIONS: Final = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def same_weights(
    optimizer: torch.optim.Optimizer,
    named: Callable[[Any], Iterable[tuple[str, torch.Tensor]]],
    process_set: ProcessSet,
    made: Made,
    scaler: Callable[[], Any] = lambda: None,
    state: bool = True,
) -> SameWeights:
    """named: the parameters of the optimizer that are compared now. made: of the optimizer.

    scaler: the GradScaler, if one is known. state: compares the optimizer's state too.
    """
    reference = weakref.ref(optimizer)  # which has this

    def things() -> list[_Thing]:
        owner = reference()
        return [] if owner is None else list(_things(owner, named(owner), scaler(), state))

    return SameWeights(lambda: _digest(things()), lambda: _held(things()), process_set, _remedy, made)


def _remedy(kinds: set[Kind]) -> str:
    calls = []
    if Kind.PARAMETER in kinds:
        calls.append("hvd.broadcast_parameters(model.state_dict(), root_rank=0)")
    if Kind.STATE in kinds:
        calls.append("hvd.broadcast_optimizer_state(optimizer, root_rank=0)")
    if Kind.SCALER in kinds:
        calls.append("scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), root_rank=0))")
    return f"Call {joined(calls)} on all ranks before the first step and after a checkpoint was loaded."


def _things(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]], scaler: Any, state: bool
) -> Iterator[_Thing]:
    # First, because weights differ after a step in which one of these did.
    yield from _values(SCALER, {"scale": getattr(scaler, "_scale", None)})
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in _OTHER_OPTIONS}
        yield from _values(f"parameter group {number}", options)
    for name, parameter in named:
        owner = f"parameter {name!r}"
        if _is_readable(parameter):
            yield owner, "", parameter.detach()
        # `in` first: a lookup would make an entry of a defaultdict.
        if state and parameter in optimizer.state:
            yield from _values(owner, optimizer.state[parameter])


def _values(owner: str, values: Any) -> Iterator[_Thing]:
    """Its numbers and tensors. A tensor of one number is that number: on other ranks it may be on another device."""
    for key, value in values.items() if isinstance(values, dict) else ():
        several = isinstance(value, tuple)  # several values in a tuple, such as betas
        for index, item in enumerate(value) if several else ((0, value),):
            name = f"{key}[{index}]" if several else str(key)
            if isinstance(item, (bool, int, float)):
                yield owner, name, float(item)
            elif isinstance(item, torch.Tensor) and _is_readable(item):
                yield owner, name, item.detach() if item.numel() != 1 or item.is_complex() else float(item)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own that can be read as numbers."""
    plain = type(tensor.detach()) is torch.Tensor and tensor.layout is torch.strided
    return plain and not tensor.is_quantized and not tensor.is_meta


def _digest(things: list[_Thing]) -> int:
    """Of all things. Small tensors are put into one, since each call of PyTorch costs more than they do."""
    small: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
    numbers: dict[torch.device, list[torch.Tensor]] = {}
    told: list[object] = []
    with torch.no_grad():
        for owner, name, value in sorted(things, key=lambda thing: thing[:2]):
            if isinstance(value, float):
                told.append((owner, name, value))
                continue
            told.append((owner, name, tuple(value.shape)))
            if value.numel() < _SMALL:
                small.setdefault((str(value.device), value.dtype), []).append(_as_it_is(value))
            else:
                numbers.setdefault(value.device, []).append(_number(value))
        for tensors in small.values():
            together = torch.cat(tensors)
            numbers.setdefault(together.device, []).append(_number(together))
        arrived = [number for some in numbers.values() for number in torch.stack(some).tolist()]
    return zlib.crc32(repr((told, sorted(arrived))).encode())


def _held(things: list[_Thing]) -> dict[str, dict[str, Item]]:
    held: dict[str, dict[str, Item]] = {}
    with torch.no_grad():
        for owner, name, value in things:
            if isinstance(value, float):
                item = Item(value, value)
            else:
                has_norm = value.is_floating_point() or value.is_complex()
                norm = float(torch.linalg.vector_norm(value, dtype=_wide(value))) if has_norm else None
                item = Item(int(_number(value)), norm)
            held.setdefault(owner, {})[name] = item
    return held


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers in a row, without negative and conjugate bits, which change their meaning."""
    return tensor.resolve_conj().resolve_neg().reshape(-1)


def _number(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of one tensor, a 64-bit number where the tensor is. On a GPU it is only queued."""
    flat = _as_it_is(tensor)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    per_word = max(1, _WORD_BYTES // flat.element_size())
    whole = flat.numel() // per_word * per_word
    numbers = flat[:whole].view(torch.int64) if whole else flat.new_zeros(0, dtype=torch.int64)
    in_rows = numbers.numel() // _ROW * _ROW
    length = torch.full((1,), tensor.numel(), dtype=torch.int64, device=tensor.device)
    rest = flat[whole:].view(torch.uint8).to(torch.int64)
    sums = torch.cat([numbers[:in_rows].view(-1, _ROW).sum(1), numbers[in_rows:], rest, length])
    # Odd weights, so that none of them loses bits; and upper bits, such as signs, must not only reach upper ones.
    weights = torch.arange(1, 2 * sums.numel(), 2, device=sums.device) * _ODD
    return ((sums ^ (sums >> 32)) * weights).sum()
