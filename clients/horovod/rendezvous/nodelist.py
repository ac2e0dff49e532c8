"""Slurm's way to write a list of hosts: "gpu[003-005,9],login1"."""

from __future__ import annotations

import re

from horovod.base.errors import SettingCode, coded

# The text up to the first comma outside of brackets.
_FIRST = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+(?=,|\Z)")
_BRACKETS = re.compile(r"\[([0-9]+)(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]")


def first_node(nodes: str) -> str:
    """The first host of the list, "gpu003" in the example. ValueError for what is no such list."""
    entry = _FIRST.match(nodes.strip())
    # Names may have several pairs of brackets: rack[1-2]node[01-16] begins with rack1node01.
    name = _BRACKETS.sub(r"\1", entry[0]) if entry else ""
    if not name or not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise ValueError(
            coded(
                SettingCode.LAUNCHER_VARIABLES,
                f"SLURM_STEP_NODELIST={nodes!r} is not usable: expected names of hosts as Slurm writes them, for "
                "example node[01-04]. Set HOROVOD_COORDINATOR and HOROVOD_TOKEN, or HOROVOD_CLUSTER=none.",
            )
        )
    return name
