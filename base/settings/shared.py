"""What rows of several families have in common: ranges, and why some have no effect."""

from __future__ import annotations

from typing import Any

# Largest world that a coordinator accepts (horovod.coordinator.core.world.checks; a test compares the two).
MAX_SIZE = 1 << 16

PATIENCE: dict[str, Any] = {"unit": "seconds", "limits": (0.001, 10_000_000)}
PLACE: dict[str, Any] = {"limits": (0, MAX_SIZE - 1), "launcher": True}
COUNT: dict[str, Any] = {"limits": (1, MAX_SIZE)}

# Why settings of earlier versions are accepted and change nothing; completes "HOROVOD_... has no effect: ...".
NO_MPI = "this version of Horovod has no MPI"
NO_CCL = "this version of Horovod has no oneCCL"
