"""What `RayExecutor.create_settings` makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from horovod.runner.common.util.secret import make_secret_key
from horovod.runner.common.util.timeout import Timeout


@dataclass
class MiniSettings:
    """Takes other attributes too.

    nics: network interfaces over which the hosts reach each other; default: all that lead to other hosts.
    timeout_s: how long all processes may take to join their world, unless HOROVOD_START_TIMEOUT says it.
    placement_group_timeout_s: how long to wait for the resources.
    verbose, key, ssh_port, ssh_identity_file: taken for earlier releases' sake; Ray starts the processes, so nothing
        needs them.
    """

    nics: Iterable[str] | None = None
    verbose: int = 1
    key: bytes = field(default_factory=make_secret_key, repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False

    @property
    def start_timeout(self) -> Timeout:
        """Counts from now on."""
        message = f"Timed out waiting for {{activity}}: timeout_s of create_settings() is {self.timeout_s} s."
        return Timeout(self.timeout_s, message=message)
