"""Codes of worlds: joining, forming, leaving, process sets."""

from .code import ErrorCode


class WorldCode(ErrorCode):
    """A process can't join a world, or a world can't form."""

    JOB_RUNS_ALREADY = (
        "job-runs-already",
        "A world of this job is complete. Wait until it has ended, or give this job another name (HOROVOD_JOB).",
    )
