"""The coordinator of one executor: in the process that has the adapter, for as long as the workers are there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import ray.util

from horovod.base.settings import Settings
from horovod.coordinator.address import ListenAddress, everywhere
from horovod.coordinator.config import CoordinatorConfig
from horovod.coordinator.limits import Limits
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.tls import ServerTls
from horovod.launch.observed import pages_of
from horovod.launch.ssh.run_certificate import run_certificate
from horovod.worker.runtime.host import choose_interfaces, interfaces

_ADVICE = (
    "Install the program openssl or the package cryptography where the driver runs: each executor then has a "
    "certificate of its own."
)


class OwnCoordinator:
    """Serves from the beginning; `stop` ends it.

    It has a token of its own. Where workers are on other nodes it has a certificate of its own too, and both come to
    them by Ray: whoever may call the actors may see them.
    """

    def __init__(
        self, settings: Settings, one_node: bool, nics: Iterable[str] | None = None, with_tls: bool = True
    ) -> None:
        """one_node: all workers are on the node of this process, so that nobody else need connect, and TLS is not
        needed. with_tls: whether members can be given a certificate.
        """
        self.certificate = ""  # by which members know it, in PEM
        self.server_name: str | None = None
        self._files: list[int] = []
        listen = CoordinatorConfig.listen if one_node else everywhere()
        limits = Limits(settings.keepalive_timeout_seconds, settings.reattach_grace_seconds)
        here = "" if one_node else _own_address(nics)
        try:
            tls = self._tls() if with_tls and not one_node else None
            self._running = EmbeddedCoordinator(
                listen, secrets.token_urlsafe(32), tls=tls, tls_advice=_ADVICE, limits=limits, **pages_of(settings)
            ).start()
        except BaseException:
            self._close_files()
            raise
        self.token = self._running.token
        self.address = self._running.address
        if not one_node:
            self.address = str(ListenAddress(here, ListenAddress.parse(self.address).port))

    def give_up(self, job: str, sentence: str) -> None:
        """As EmbeddedCoordinator.give_up."""
        self._running.give_up(job, sentence)

    def stop(self) -> None:
        """Idempotent."""
        self._running.stop(grace=0)
        self._close_files()

    def _tls(self) -> ServerTls | None:
        with run_certificate() as made:
            if made is None:
                return None
            self.certificate, self.server_name = made.text(), made.client.server_name
            # The folder goes at once: what is killed removes no files, and these files have no names.
            return ServerTls(self._unnamed(made.server.cert), self._unnamed(made.server.key))

    def _unnamed(self, path: str) -> str:
        descriptor = os.memfd_create("horovod-coordinator")
        self._files.append(descriptor)
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, Path(path).read_bytes())
        return f"/proc/self/fd/{descriptor}"

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())


def _own_address(nics: Iterable[str] | None) -> str:
    """Where workers on other nodes reach this process: as Ray reaches it, unless interfaces are named."""
    if nics:
        return choose_interfaces(interfaces(), list(nics))[0].addresses[0]
    return str(ray.util.get_node_ip_address())
