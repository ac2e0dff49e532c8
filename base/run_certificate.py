"""The certificate by which agents on other hosts know the launcher of `horovodrun -H` (docs/adr/0070), and ranks know
rank 0 (docs/adr/0115) and relays of a tf.data service each other (docs/adr/0116).

It counts for one run, and its key stays in a folder of the launcher that only its user can open. Agents get the
certificate with their order, over ssh, and believe that one alone. So nothing else has to sign it: it signs itself.
The program openssl makes it, in some 20 ms; the package `cryptography`, whose import takes longer, where that fails.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from horovod.base.tls import unnamed_file

SERVER_NAME = "launcher.horovod"
ADVICE = (
    "Install the program openssl or the package cryptography on this host: horovodrun then makes a certificate for "
    "each run."
)
_DAYS = 3650  # longer than any job; the certificate is deleted when the job is over
# The certificate is valid from this long before it is made, because clocks of hosts differ.
_EARLIER = datetime.timedelta(hours=24)
_TIMEOUT_S = 20.0

# The only configuration that openssl reads: the system's may hold anything. `openssl req -x509` would be one command,
# but could not say before OpenSSL 3.4 that the certificate counts from an earlier time on.
_CONFIGURATION = f"""
[req]
prompt = no
distinguished_name = name
[name]
CN = horovod run
[ca]
default_ca = run
[run]
database = index.txt
serial = serial
new_certs_dir = .
default_md = sha256
policy = names
x509_extensions = extensions
[names]
commonName = supplied
[extensions]
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = DNS:{SERVER_NAME}
subjectKeyIdentifier = hash
"""


@dataclass(frozen=True)
class RunCertificate:
    """Paths of its files, in PEM. The coordinator follows the files, so the folder has to stay while it serves."""

    cert: str
    key: str
    ca: str  # the certificate that members and agents trust, for SERVER_NAME

    def text(self) -> str:
        """The certificate that they trust."""
        return Path(self.ca).read_text()


@dataclass
class UnnamedCertificate:
    """One whose files have no names, for a coordinator in a process that may be killed and would leave files behind."""

    cert: str
    key: str
    ca: str  # path of the certificate that members trust, for SERVER_NAME
    text: str  # the same certificate, as PEM
    _descriptors: list[int]

    def close(self) -> None:
        """The files are gone; nothing serves with them any more. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def unnamed_certificate() -> UnnamedCertificate | None:
    """None as for `run_certificate`."""
    with run_certificate() as made:
        if made is None:
            return None
        files = [unnamed_file(Path(path).read_bytes()) for path in (made.cert, made.key, made.ca)]
        cert, key, ca = (path for _, path in files)
        return UnnamedCertificate(cert, key, ca, made.text(), [descriptor for descriptor, _ in files])


@contextlib.contextmanager
def run_certificate() -> Iterator[RunCertificate | None]:
    """None where this host has neither openssl nor `cryptography`, or neither works."""
    with tempfile.TemporaryDirectory(prefix="horovodrun-") as name:
        folder = Path(name)
        yield _by_openssl(folder) or _by_package(folder)


def _by_openssl(folder: Path) -> RunCertificate | None:
    now = datetime.datetime.now(datetime.timezone.utc)
    begin, end = (f"{at:%Y%m%d%H%M%SZ}" for at in (now - _EARLIER, now + datetime.timedelta(days=_DAYS)))
    (folder / "openssl.cnf").write_text(_CONFIGURATION)
    (folder / "index.txt").touch()
    (folder / "serial").write_text("01\n")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-pkeyopt", "ec_param_enc:named_curve"]
    request = ["req", "-config", "openssl.cnf", "-new", *curve, "-nodes", "-keyout", "run.key", "-out", "request.pem"]
    times = ["-startdate", begin, "-enddate", end]
    signed = ["-selfsign", "-batch", "-notext", *times, "-keyfile", "run.key", "-in", "request.pem", "-out", "run.pem"]
    environ = {**os.environ, "OPENSSL_CONF": str(folder / "openssl.cnf")}
    for arguments in (request, ["ca", "-config", "openssl.cnf", *signed]):
        try:
            subprocess.run(
                ["openssl", *arguments],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
    return _pair(folder / "run.pem", folder / "run.key", folder / "run.pem")


def _by_package(folder: Path) -> RunCertificate | None:
    try:
        import cryptography  # noqa: F401 - only whether it is there
    except ImportError:
        return None
    from horovod.base.certificates import make

    make(folder / "made", [SERVER_NAME], days=_DAYS)
    made = folder / "made"
    return _pair(made / "coordinator.pem", made / "coordinator.key", made / "ca.pem")


def _pair(certificate: Path, key: Path, believed: Path) -> RunCertificate:
    return RunCertificate(str(certificate), str(key), str(believed))
