"""Which hosts a job may use: what people write, or LSF, and which of those names mean this machine.

horovodrun takes -np and -H from LSF where they are not given.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from horovod.base.addresses import wrong_host_name
from horovod.base.errors import SettingCode, coded

_ENTRY = re.compile(r"([\w.-]+):([0-9]+)", re.ASCII)
_LSF_HOSTS = "LSB_MCPU_HOSTS"  # "host slots host slots ..."
_LINE = re.compile(r"([\w.-]+)(?:\s+slots\s*=\s*([0-9]+))?", re.ASCII)


@dataclass(frozen=True)
class HostSlots:
    """A host and how many processes it may run."""

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[HostSlots, ...]:
    """The hosts of `h1:2,h2:4`, in that order."""
    found = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ValueError(
                coded(
                    SettingCode.INVALID_HOSTS,
                    f"{entry.strip()!r} in the host list {text!r} is not usable: expected host:slots, as in h1:2,h2:4.",
                )
            )
        found.append(HostSlots(match[1], int(match[2])))
    return _merge(found, f"the host list {text!r}")


def parse_hostfile(path: str | Path) -> tuple[HostSlots, ...]:
    """The hosts of a file with lines `h1 slots=2`; blank lines and `#` comments may stand between them.

    A line with only a name is one slot: such files, a line for each slot, are what batch systems write ($PBS_NODEFILE).
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        sentence = f"The host file {str(path)!r} cannot be read: {reason}."
        raise ValueError(coded(SettingCode.UNUSABLE_FILE, sentence)) from error
    found = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ValueError(
                coded(
                    SettingCode.INVALID_HOSTS,
                    f"Line {number} of the host file {str(path)!r} is {text!r}, which is not usable: expected "
                    "host slots=count, for example h1 slots=2.",
                )
            )
        found.append(HostSlots(match[1], int(match[2] or 1)))
    if not found:
        sentence = f"The host file {str(path)!r} names no host: expected lines such as h1 slots=2."
        raise ValueError(coded(SettingCode.INVALID_HOSTS, sentence))
    return _merge(found, f"the host file {str(path)!r}")


def fill(hosts: Sequence[HostSlots], count: int) -> tuple[str, ...]:
    """The host of each of `count` processes, host by host."""
    available = sum(host.slots for host in hosts)
    if count > available:
        slots = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            coded(
                SettingCode.TOO_FEW_SLOTS,
                f"Requested more processes ({count}) than there are available slots ({available}) on {slots}; ask for "
                "fewer with -np or give the hosts more slots.",
            )
        )
    names = (host.name for host in hosts for _ in range(host.slots))
    return tuple(islice(names, count))


def remote(names: Iterable[str]) -> list[str]:
    """Those of `names` that do not mean this machine."""
    import psutil  # late: hvd.init() reads the launcher's variables without it

    here = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
    addresses = {address.address for interface in psutil.net_if_addrs().values() for address in interface}
    found = []
    for name in dict.fromkeys(names):
        if name.lower() in here or name in addresses or name.startswith("127."):
            continue
        try:
            resolved = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
        except (OSError, UnicodeError):
            resolved = set()
        if not any(address in addresses or address.startswith("127.") for address in resolved):
            found.append(name)
    return found


def in_lsf_job(environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to an LSF job that tells its hosts."""
    return "LSB_JOBID" in environ and bool(environ.get(_LSF_HOSTS, "").strip())


def lsf_hosts(environ: Mapping[str, str]) -> tuple[HostSlots, ...]:
    """The hosts of the job and their slots. ValueError where LSB_MCPU_HOSTS is not what LSF writes.

    On systems where jsrun starts processes the first host is the one that runs the batch script: it has a single slot,
    the others have many, and no process is to be placed on it.
    """
    words = environ[_LSF_HOSTS].split()
    try:
        hosts = parse_hosts(",".join(f"{name}:{count}" for name, count in zip(words[::2], words[1::2], strict=True)))
    except ValueError as error:
        raise ValueError(
            coded(
                SettingCode.LAUNCHER_VARIABLES,
                f"{_LSF_HOSTS}={environ[_LSF_HOSTS]!r} is not usable: expected host slots host slots, as LSF writes "
                "it. Give -np and -H yourself.",
            )
        ) from error
    batch_host_apart = len(hosts) > 1 and hosts[0].slots == 1 and min(host.slots for host in hosts[1:]) > 1
    return hosts[1:] if batch_host_apart else hosts


def _merge(found: Sequence[HostSlots], where: str) -> tuple[HostSlots, ...]:
    """A host that is named twice has the slots of both; its first place counts."""
    slots: dict[str, int] = {}
    for host in found:
        if wrong := wrong_host_name(host.name):
            sentence = f"Host {host.name!r} in {where} can't be the name of a host: {wrong}."
            raise ValueError(coded(SettingCode.INVALID_HOSTS, sentence))
        if host.slots < 1:
            sentence = f"Host {host.name!r} in {where} has 0 slots: expected at least 1, or leave the host out."
            raise ValueError(coded(SettingCode.INVALID_HOSTS, sentence))
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(HostSlots(name, count) for name, count in slots.items())
