"""A small certificate authority for one cluster, made by the package `cryptography` (docs/adr/0035-credentials.md).

Keys are of the curve P-256 and readable by their owner only. Both kinds of certificates are for clients, and that of
the coordinators is for servers, too: where rank 0 opens the coordinator, it serves and joins with one.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod.base.errors import LaunchCode, SettingCode, coded

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY, COORDINATOR, CLIENT = "ca", "coordinator", "client"
AUTHORITY_DAYS = 3650
MAX_DAYS = AUTHORITY_DAYS
_EARLIER = datetime.timedelta(hours=1)  # a certificate is valid from this long before it is made, because clocks differ
_MEMBER = "horovod member"


def make(folder: Path, hosts: Sequence[str], days: int) -> str:
    """What was made and what to do with it. Raises ValueError or OSError with a sentence; then nothing was made."""
    _check(days)
    names = _names(hosts)
    there = [file.name for name in (AUTHORITY, COORDINATOR, CLIENT) for file in _files(folder, name) if file.exists()]
    if there:
        sentence = (
            f"{folder} holds {', '.join(there)} already, and nothing is overwritten. Use --renew to renew the "
            "certificates there, or name another folder."
        )
        raise ValueError(coded(LaunchCode.CERTIFICATE_FILES, sentence))
    with _sentences(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority()
        pairs = {AUTHORITY: authority, **_leaves(authority, names, days)}
        for name, pair in pairs.items():
            _write(folder, name, pair)
    return _what_to_do(folder, hosts, days)


def renew(folder: Path, hosts: Sequence[str], days: int) -> str:
    """The same as `make`, with the authority that exists already."""
    _check(days)
    names = _names(hosts)
    with _sentences(folder):
        authority = _load(folder, AUTHORITY)
        names = names or _names_of(_load(folder, COORDINATOR).certificate)
    left = authority.certificate.not_valid_after_utc - datetime.datetime.now(datetime.timezone.utc)
    if left.days < days:
        sentence = (
            f"The authority {folder}/ca.pem itself ends in {left.days} days, so nothing that it signs can count for "
            f"{days}. Give fewer --days, or make another authority in another folder."
        )
        raise ValueError(coded(LaunchCode.CERTIFICATE_FILES, sentence))
    with _sentences(folder):
        for name, pair in _leaves(authority, names, days).items():
            _write(folder, name, pair)
    return f"Renewed coordinator.pem and client.pem in {folder}, for {days} days. Copy them to the hosts that use them."


@dataclass(frozen=True)
class _Pair:
    certificate: x509.Certificate
    key: EllipticCurvePrivateKey


def _authority() -> _Pair:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "horovod cluster")])
    builder = _builder(name, name, key.public_key(), AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return _Pair(builder.sign(key, hashes.SHA256()), key)


def _leaves(authority: _Pair, names: Sequence[x509.GeneralName], days: int) -> dict[str, _Pair]:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    client, server = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
    return {
        COORDINATOR: _leaf(authority, names, [server, client], days),
        CLIENT: _leaf(authority, [x509.DNSName("member.horovod")], [client], days),
    }


def _leaf(authority: _Pair, names: Sequence[x509.GeneralName], usages: Sequence[Any], days: int) -> _Pair:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _MEMBER)])
    builder = _builder(subject, authority.certificate.subject, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(signer, critical=False)
    return _Pair(builder.sign(authority.key, hashes.SHA256()), key)


def _builder(subject: x509.Name, issuer: x509.Name, key: Any, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        decipher_only=False,
        **dict.fromkeys(others, False),
    )


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    from cryptography import x509

    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host.strip("[]"))))
        except ValueError:
            if not _is_name(host):
                sentence = f"--hosts has {host!r}: expected names and numeric addresses, without ports."
                raise ValueError(coded(SettingCode.INVALID_SETTING, sentence)) from None
            names.append(x509.DNSName(host))
    return names


def _is_name(host: str) -> bool:
    labels = host.removeprefix("*.").split(".")
    return len(host) < 254 and all(
        0 < len(label) < 64 and label.isascii() and all(c.isalnum() or c in "-_" for c in label) for label in labels
    )


def _names_of(certificate: x509.Certificate) -> list[x509.GeneralName]:
    from cryptography import x509

    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return list(found.value)


# -- files -------------------------------------------------------------------------------------------------------------
def _files(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}.key"


def _write(folder: Path, name: str, pair: _Pair) -> None:
    """Each file complete or not at all. Who reads between the two gets a pair that does not fit, and looks again."""
    from cryptography.hazmat.primitives import serialization

    key = pair.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    certificate = pair.certificate.public_bytes(serialization.Encoding.PEM)
    for file, content, mode in zip(_files(folder, name), (certificate, key), (0o644, 0o600), strict=True):
        unfinished = file.with_name(f".{file.name}")
        unfinished.unlink(missing_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(descriptor)
        os.rename(unfinished, file)


def _load(folder: Path, name: str) -> _Pair:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    cert, key = _files(folder, name)
    found: Any = serialization.load_pem_private_key(key.read_bytes(), password=None)
    return _Pair(x509.load_pem_x509_certificate(cert.read_bytes()), found)


@contextlib.contextmanager
def _sentences(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        sentence = (
            f"{error.filename} does not exist. Without --renew, `horovodrun certs {folder} --hosts NAMES` "
            "makes all files."
        )
        raise ValueError(coded(LaunchCode.CERTIFICATE_FILES, sentence)) from error
    except OSError as error:
        sentence = f"Can't use {error.filename or folder}: {error.strerror}."
        raise OSError(error.errno, coded(LaunchCode.CERTIFICATE_FILES, sentence)) from error
    except ValueError as error:
        sentence = f"A file in {folder} can't be used: {error}."
        raise ValueError(coded(LaunchCode.CERTIFICATE_FILES, sentence)) from error


def _check(days: int) -> None:
    if not 1 <= days <= MAX_DAYS:
        sentence = f"--days must be from 1 to {MAX_DAYS}, not {days}."
        raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
    try:
        import cryptography  # noqa: F401 - only whether it is there
    except ImportError as error:
        sentence = (
            "Making certificates needs the package cryptography, which is not installed: pip install "
            "'horovod[tls]'. You can also use certificates of any other authority."
        )
        raise RuntimeError(coded(LaunchCode.MISSING_PROGRAM, sentence)) from error


def _what_to_do(folder: Path, hosts: Sequence[str], days: int) -> str:
    return (
        f"Made in {folder}, for {', '.join(hosts)} and {days} days:\n"
        f"  ca.pem                the authority; everybody may read it\n"
        f"  ca.key                signs certificates: keep it off the training hosts\n"
        f"  coordinator.pem .key  horovod-coordinator --tls-cert {folder}/coordinator.pem --tls-key "
        f"{folder}/coordinator.key --tls-client-ca {folder}/ca.pem --token-file FILE\n"
        f"  client.pem .key       HOROVOD_TLS_CA={folder}/ca.pem HOROVOD_TLS_CERT={folder}/client.pem "
        f"HOROVOD_TLS_KEY={folder}/client.key in each training process\n"
        f"Renew the two before they end: horovodrun certs {folder} --renew"
    )
