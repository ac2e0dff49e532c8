"""Certificates for tests of TLS: an authority of their own, and files as settings and options name them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from horovod.coordinator.tls import ServerTls
from horovod.worker.runtime.tls import ClientTls


@dataclass(frozen=True)
class Pair:
    cert: str
    key: str


class Authority:
    """A certificate authority whose files lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._ca = trustme.CA()
        self.folder = folder
        self.file = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, name: str, *identities: str, **more: Any) -> Pair:
        """The files name.pem and name.key, in place of older ones."""
        issued = self._ca.issue_cert(*identities, **more)
        pair = Pair(str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key"))
        for file, content in ((pair.cert, issued.cert_chain_pems[0]), (pair.key, issued.private_key_pem)):
            unfinished = f"{file}.unfinished"
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as out:
                out.write(content.bytes())
            os.rename(unfinished, file)
        return pair

    def server(self, *identities: str, mutual: bool = False, name: str = "coordinator", **more: Any) -> ServerTls:
        pair = self.issue(name, *(identities or ("127.0.0.1", "localhost")), **more)
        return ServerTls(pair.cert, pair.key, self.file if mutual else None)

    def client(self, cert: bool = False, **more: Any) -> ClientTls:
        pair = self.issue("client", "member.test") if cert else None
        return ClientTls(self.file, pair.cert if pair else None, pair.key if pair else None, **more)
