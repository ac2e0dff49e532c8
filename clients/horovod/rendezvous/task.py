"""What the variables of a launcher say of the process that it started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from horovod.base.errors import SettingCode, coded


@dataclass(frozen=True)
class Task:
    """One of `size` processes that a launcher other than ours started together."""

    launcher: str  # the name that its users type: "mpirun"
    rank: int
    size: int
    one_host: bool  # all processes of the run are on this host
    # What names this run on this host, and no other: equal in all its processes. Empty where the variables do not tell.
    run: tuple[str, ...] = ()
    # Where `run` is empty: part of the name of the launcher's process that is an ancestor of all processes of a host.
    ancestor: str = ""
    first_host: str | None = None  # the host of rank 0, by a name that the others can connect to; None: not told
    variable_option: str = ""  # how a user gives all processes a variable
    meeting_advice: str = ""  # how a user gives all processes one secret; "": by export before the launcher
    no_host: str = ""  # where the launcher could tell the host of rank 0 and does not: what to do so that it does
    name_may_come: bool = False  # the name `first_host` may be unknown until the process there runs
    ports: range | None = None  # for the coordinator of rank 0 between hosts; None: those of join.py

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                coded(
                    SettingCode.LAUNCHER_VARIABLES,
                    f"{self.launcher} says that this process is rank {self.rank} of {self.size}, which cannot be. Set "
                    "HOROVOD_CLUSTER=none, or HOROVOD_COORDINATOR, HOROVOD_RANK and HOROVOD_SIZE yourself.",
                )
            )


def number(environ: Mapping[str, str], name: str) -> int | None:
    """The variable as a number, None when it is not set; ValueError with a sentence when it is none."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise ValueError(
            coded(
                SettingCode.LAUNCHER_VARIABLES,
                f"{name}={text!r} is not usable: a launcher sets it to a number. If no launcher did, unset it or set "
                "HOROVOD_CLUSTER=none.",
            )
        )
    return int(text)
