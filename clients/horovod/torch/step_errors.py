"""Why a step would not be the same on all ranks: what each of them says of its gradients, in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

IN_FLIGHT: Final = (
    "so it is neither the average nor what was meant, and may differ between ranks. Call optimizer.synchronize() on "
    "all ranks after loss.backward() and before gradients are changed (by clipping or GradScaler, for example), and "
    "then optimizer.step() inside `with optimizer.skip_synchronize():`."
)


@dataclass(frozen=True)
class Report:
    """What one rank says of a step."""

    changes: tuple[tuple[str, str], ...] = ()  # parameters whose gradients the script has changed, with a verb
    scaled: bool = False  # GradScaler calls step(), and has divided gradients
    skipped: bool = False  # the script goes on without step()
    missing: tuple[str, ...] = ()  # parameters that have no gradient

    @property
    def is_change(self) -> bool:
        return bool(self.changes) or self.scaled or self.skipped


def sentence(step: int, reports: Mapping[int, Report], parameters: int) -> str:
    """reports: by rank, of all ranks or of those that are known. step: counted from 1. parameters: how many it has."""
    parts = _together({rank: text for rank, report in reports.items() if (text := _change(report))})
    told = "; ".join(what.format(ranks=_ranks(ranks)) for what, ranks in parts.items())
    told = told or "The script of another rank changed gradients while they were being reduced"
    lacks = _together({rank: text for rank, report in reports.items() if (text := _lack(report, parameters))})
    why = " ".join(
        f"In step {step} of this optimizer {_ranks(ranks)} made {what}, so backward() could not end with the averages "
        "on all ranks."
        for what, ranks in lacks.items()
    )
    return f"{told}, {IN_FLIGHT} {why or f'This was step {step} of this optimizer.'} No rank has taken the step."


def dropped(step: int) -> str:
    """All ranks have cleared the averages that a step was to be taken with. step: counted from 1."""
    return (
        "optimizer.step() was called after optimizer.zero_grad() had cleared the averages of loss.backward(), "
        "and no gradient has been computed since, so the step has no gradients. Call optimizer.zero_grad() "
        "before loss.backward() or after optimizer.step(), and don't call step() if you skip a step. This was "
        f"step {step} of this optimizer. No rank has taken the step."
    )


def parted(step: int) -> str:
    """Some ranks have cleared the last averages, and others took a step with them. step: counted from 1."""
    return (
        "Some ranks have taken a step with the last averages, and others have cleared them without one (by "
        "optimizer.zero_grad() between loss.backward() and optimizer.step(), or since a guard skipped the "
        "step), so the ranks' weights differ. Skip a step on all ranks or on none: decide by the averages, or "
        f"by a result of hvd.allreduce. This rank's next step is its step {step}."
    )


def _change(report: Report) -> str:
    """With a place for the ranks."""
    if report.changes:
        name, verb = report.changes[0]
        more = f" (and {len(report.changes) - 1} more)" if len(report.changes) > 1 else ""
        quoted = repr(name).replace("{", "{{").replace("}", "}}")
        return f"The gradient of parameter {quoted}{more} was {verb} on {{ranks}} while it was being reduced"
    if report.scaled:
        return "GradScaler has divided gradients on {ranks} while they were being reduced"
    if report.skipped:
        return "Gradients were dropped on {ranks}, without optimizer.step(), while they were being reduced"
    return ""


def _lack(report: Report, parameters: int) -> str:
    if not report.missing:
        return ""
    if len(report.missing) == parameters:
        return "no gradients"
    more = f" (and {len(report.missing) - 1} more)" if len(report.missing) > 1 else ""
    return f"no gradient of parameter {report.missing[0]!r}{more}"


def _together(by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    by_text: dict[str, list[int]] = {}
    for rank in sorted(by_rank):
        by_text.setdefault(by_rank[rank], []).append(rank)
    return by_text


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:16]]
    if len(ranks) > 16:
        return f"ranks {', '.join(shown)} and {len(ranks) - 16} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
