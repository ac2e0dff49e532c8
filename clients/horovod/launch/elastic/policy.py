"""What an elastic job is, as the scheduler and its processes are told: a policy in its description, and variables."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.base.settings import resolve, variables
from horovod.launch.elastic.request import Replacement
from horovod.protos.v1 import jobs_pb2


def write_policy(spec: jobs_pb2.JobSpec, replacement: Replacement | None, environ: Mapping[str, str]) -> None:
    """Writes it into the job, of which `environ` is. replacement: None where it ends with its first failed process.

    What a setting says of the job has the name of the field, behind `elastic_` (docs/adr/0119-rules-by-name.md).
    """
    if replacement is None:
        return
    policy = spec.policy
    policy.replaces_failed = True
    policy.supplied_hosts = replacement.supplied
    if replacement.most is not None:
        policy.most_replacements, policy.since_progress = replacement.most, replacement.since_progress
    policy.fewest, policy.most = replacement.sizes[0], replacement.most_slots or 0
    policy.spares = replacement.spares
    policy.cooldown_least_seconds, policy.cooldown_most_seconds = replacement.cooldown_s or (0, 0)
    settings = resolve(environ)
    policy.patience_seconds = settings.elastic_timeout_seconds
    for name in policy.DESCRIPTOR.fields_by_name:
        if (value := getattr(settings, f"elastic_{name}", None)) is not None:
            setattr(policy, name, value)


def elastic_variables(replacement: Replacement | None) -> dict[str, str]:
    """Of each process: how many members its worlds may have."""
    if replacement is None:
        return {}
    fewest, most = replacement.sizes
    return variables(elastic=True, min_size=fewest, **({} if most is None else {"max_size": most}))
