"""Processes that torchrun (python -m torch.distributed.run) started.

pytorch.py has those for which others set some of its variables.

torchrun sets RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and TORCHELASTIC_*, by which it is known.
When a process fails, or hosts come or go, it ends all processes and starts them again, with new ranks and perhaps
another number of them: each start is a run of its own, that forms a world of its own.

Between hosts rank 0 is on MASTER_ADDR. MASTER_PORT is torch's own; the coordinator takes one of the PORTS above it, so
that a firewall that lets the one through can let the others through too.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod.rendezvous.task import Task, number

PORTS = range(16, 64)  # added to MASTER_PORT; below them are the ports that people give their next jobs


def find(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by torchrun's variables; None where it has not started this process."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    run = tuple(f"{name}={environ.get(name, '')}" for name in names)
    return torch_task(environ, "torchrun", run, number(environ, "LOCAL_WORLD_SIZE"))


def torch_task(
    environ: Mapping[str, str],
    launcher: str,
    run: tuple[str, ...],
    local_size: int | None,
    name_may_come: bool = False,
) -> Task | None:
    """What the variables of torch.distributed say; None where rank or size is missing."""
    rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    if rank is None or size is None:
        return None
    master = number(environ, "MASTER_PORT") or 0
    above = master + PORTS.stop <= 1 << 16
    return Task(
        launcher=launcher,
        rank=rank,
        size=size,
        one_host=local_size == size,
        run=run,
        first_host=environ.get("MASTER_ADDR", "").strip() or None,
        variable_option="export them on each host",
        meeting_advice="set HOROVOD_TOKEN on each host to the same text, such as what `openssl rand -hex 32` prints",
        name_may_come=name_may_come,
        ports=range(master + PORTS.start, master + PORTS.stop) if above else range(master - 64, master - 16),
    )
