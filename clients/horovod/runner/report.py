"""How a job ended, in one sentence and one exit code: as the coordinator says it of jobs on many hosts."""

from horovod.coordinator.core.ending import AFTERMATH_S, exit_code, explain, first_failure

__all__ = ["AFTERMATH_S", "exit_code", "explain", "first_failure"]
