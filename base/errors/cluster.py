"""Codes of clusters: agents, queued jobs, job files, coordinators and their store."""

from .code import ErrorCode


class ClusterCode(ErrorCode):
    """A cluster of agents can't run a job, or can't answer."""

    UNKNOWN_JOB = ("unknown-job", "The cluster has no such job. `horovodrun ps` lists those that it has.")
