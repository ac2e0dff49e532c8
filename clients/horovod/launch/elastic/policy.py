"""How failed processes are replaced, as the scheduler is told it: the policy in the description of a job."""

from __future__ import annotations

from horovod.launch.elastic.request import Replacement
from horovod.protos.v1 import jobs_pb2


def write_policy(spec: jobs_pb2.JobSpec, replacement: Replacement | None) -> None:
    """Writes it into the job. None: the job ends with its first failed process."""
    if replacement is not None:
        spec.policy.replaces_failed = True
        spec.policy.most_replacements = replacement.most
