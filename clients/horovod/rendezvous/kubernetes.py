"""Pods of a Kubernetes Job with `completionMode: Indexed`: one process each, JOB_COMPLETION_INDEX is its rank.

A pod is not told how many there are, so the manifest sets HOROVOD_SIZE to `spec.completions`. The pod of index i has
the host name JOB-i; where a headless service gives the pods a domain (`subdomain` in the pod's template), the others
reach rank 0 by the name JOB-0 in it. A pod that fails is started again with its index.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from horovod.base.errors import SettingCode, coded
from horovod.rendezvous.task import Task, number

SIZE_IS_GIVEN = True  # it does not tell how many processes there are; HOROVOD_SIZE does
_OPTION = "`env:` in the pod's template"


def find(environ: Mapping[str, str], full_name: Callable[[str], str] = socket.getfqdn) -> Task | None:
    """Rank by the Job's variable; None where this is no pod of an indexed Job. full_name: a host's name with domain."""
    rank = number(environ, "JOB_COMPLETION_INDEX")
    if rank is None:
        return None
    size = number(environ, "HOROVOD_SIZE")
    if size is None:
        raise ValueError(
            coded(
                SettingCode.MISSING_SETTING,
                f"This is the pod of index {rank} in an indexed Job of Kubernetes (JOB_COMPLETION_INDEX), which is not "
                f"told how many pods there are: set HOROVOD_SIZE to the Job's spec.completions ({_OPTION}), or "
                "HOROVOD_CLUSTER=none for pods that train alone.",
            )
        )
    job, own = _job_and_name(environ.get("HOSTNAME", ""), rank)
    domain = full_name(own).partition(".")[2] if own else ""
    return Task(
        launcher="Kubernetes",
        rank=rank,
        size=size,
        one_host=False,
        run=(job, domain),
        first_host=f"{job}-0.{domain}" if job and domain else None,
        variable_option=_OPTION,
        meeting_advice="put the output of `openssl rand -hex 32` into a Secret and take HOROVOD_TOKEN from it "
        "(`valueFrom: secretKeyRef:` in the pod's template)",
        name_may_come=True,
        no_host="the pods have no names by which they can reach each other: give the Job a headless service (a Service "
        "with `clusterIP: None` that selects its pods, and `subdomain:` with the name of that service in the pod's "
        "template).",
    )


def _job_and_name(host: str, rank: int) -> tuple[str, str]:
    """("train", "train-3") of the pod's host name "train-3"; nothing where the pod was given another one."""
    name = host.partition(".")[0]
    job, dash, index = name.rpartition("-")
    return (job, name) if dash and index == str(rank) else ("", "")
