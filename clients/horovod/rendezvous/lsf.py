"""The hosts of an LSF job, from which horovodrun takes -np and -H where they are not given.

LSF tells them in LSB_MCPU_HOSTS, "host slots host slots ...". On systems where jsrun starts processes the first host is
the one that runs the batch script: it has a single slot, the others have many, and no process is to be placed on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod.base.errors import SettingCode, coded
from horovod.rendezvous.hosts import HostSlots, parse_hosts

_HOSTS = "LSB_MCPU_HOSTS"


def present(environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to an LSF job that tells its hosts."""
    return "LSB_JOBID" in environ and bool(environ.get(_HOSTS, "").strip())


def allocated(environ: Mapping[str, str]) -> tuple[HostSlots, ...]:
    """The hosts of the job and their slots. ValueError where LSB_MCPU_HOSTS is not what LSF writes."""
    words = environ[_HOSTS].split()
    try:
        hosts = parse_hosts(",".join(f"{name}:{count}" for name, count in zip(words[::2], words[1::2], strict=True)))
    except ValueError as error:
        raise ValueError(
            coded(
                SettingCode.LAUNCHER_VARIABLES,
                f"{_HOSTS}={environ[_HOSTS]!r} is not usable: expected host slots host slots, as LSF writes it. Give "
                "-np and -H yourself.",
            )
        ) from error
    batch_host_apart = len(hosts) > 1 and hosts[0].slots == 1 and min(host.slots for host in hosts[1:]) > 1
    return hosts[1:] if batch_host_apart else hosts
