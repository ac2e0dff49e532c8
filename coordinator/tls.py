"""The coordinator's side of TLS: its certificate, whose clients it takes, and new files without a restart.

The files are looked at whenever a connection begins, so that a certificate that was renewed counts at once and an
operator need not stop anything. What is there then is checked before it is used: a pair half written, or one that has
expired, is told in the log, and the certificate from before stays. Connections that stand are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import ssl
import stat
from dataclasses import dataclass
from typing import Any

import grpc

from horovod.base.errors import AccessCode, SettingCode, coded, without_code
from horovod.base.tls import (
    EXPIRED,
    NOT_YET_VALID,
    OTHER_ADDRESS,
    OTHER_NAME,
    Stamp,
    no_password,
    shake_hands,
    stamp,
)

_log = logging.getLogger(__name__)

_NOT_PEM = "a file is not in PEM"


@dataclass(frozen=True)
class ServerTls:
    """Names of files in PEM.

    client_ca: with it only clients whose certificates it signed are served (mTLS).
    peer_ca: has signed the certificates of the other coordinators of the store; the same as client_ca by default.
    """

    cert: str
    key: str
    client_ca: str | None = None
    peer_ca: str | None = None

    def __post_init__(self) -> None:
        if not self.cert or not self.key:
            sentence = "TLS needs a certificate and its key; only one of them is given."
            raise ValueError(coded(SettingCode.MISSING_SETTING, sentence))

    def credentials(self) -> grpc.ServerCredentials:
        """Follows the files from now on. Raises OSError with a sentence when they can't be used."""
        loaded = self.load()
        fetch: Any = _Follower(self).fetch  # may return None, which the stubs do not know
        return grpc.dynamic_ssl_server_credentials(
            loaded, fetch, require_client_authentication=self.client_ca is not None
        )

    def load(self) -> grpc.ServerCertificateConfiguration:
        """What the files hold. Raises OSError with a sentence when the coordinator could not be known by it."""
        cert, key = _read(self.cert, "certificate"), _read(self.key, "key")
        client_ca = _read(self.client_ca, "certificate authority of clients") if self.client_ca else None
        _check_pair(self.cert, self.key)
        if self.client_ca:
            _check_authority(self.client_ca)
        _warn_of_readers(self.key)
        return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)

    def certificate(self) -> bytes:
        """The one that clients are shown, in DER. Raises OSError with a sentence when it can't be read."""
        first, end, _ = _read(self.cert, "certificate").decode("latin-1").partition(ssl.PEM_FOOTER)
        try:
            return ssl.PEM_cert_to_DER_cert(first[first.index(ssl.PEM_HEADER) :] + end)
        except ValueError as error:
            raise _unusable(f"The certificate {self.cert!r} can't be used: {_NOT_PEM}.") from error

    def stamp(self) -> Stamp:
        """Changes when a file does. OSError while one is missing."""
        return stamp((self.cert, self.key, self.client_ca, self.peer_ca))

    # -- other coordinators of the store (services/peers.py) -----------------------------------------------------------

    def check_between(self, host: str) -> None:
        """Has two connections in memory with itself, as coordinators that share a store have with each other.

        host: the name or address under which the others reach this one. Raises ValueError or OSError, with a sentence.
        """
        if (authority := self.peer_ca or self.client_ca) is None:
            sentence = (
                "Coordinators of one store ask each other which of them serves a job, and over TLS each has to know "
                "the others by their certificates. Name the authority that has signed them: --tls-peer-ca FILE."
            )
            raise ValueError(coded(SettingCode.MISSING_SETTING, sentence))
        _check_authority(authority)
        server, client = self._server_context(), self.peer_context()
        try:
            shake_hands(server, client, host)
        except ssl.SSLCertVerificationError as error:
            why = {
                OTHER_NAME: f"is not for {host!r}. Make one for that name, or name another with --advertise",
                OTHER_ADDRESS: f"is not for {host!r}. Make one for that address, or name another with --advertise",
            }.get(error.verify_code, f"is not signed by an authority in {authority!r}: {error.verify_message}")
            raise _untrusted(
                f"Other coordinators of the store would not believe this one: the certificate {self.cert!r} {why}.",
            ) from error
        if self.client_ca is None:
            return
        server.verify_mode = ssl.CERT_REQUIRED
        server.load_verify_locations(self.client_ca)
        try:
            shake_hands(server, client, host)
        except ssl.SSLError as error:
            raise _untrusted(
                "Other coordinators of the store ask for a certificate (--tls-client-ca), and they would not take "
                f"{self.cert!r}: {getattr(error, 'verify_message', None) or _reason(error)}. It has to be signed by an "
                f"authority in {self.client_ca!r}, and to be for clients as well as for servers.",
            ) from error

    def peer_context(self) -> ssl.SSLContext:
        """As Python's ssl knows another coordinator. Raises OSError (ssl.SSLError is one) when a file can't be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.peer_ca or self.client_ca)
        context.load_cert_chain(self.cert, self.key, password=no_password)
        return context

    def peer_credentials(self) -> grpc.ChannelCredentials:
        """As gRPC knows another coordinator, and is known by it. Raises OSError as `load` does."""
        _check_pair(self.cert, self.key)
        authority = self.peer_ca or self.client_ca
        assert authority is not None, "check_between has seen to it"
        return grpc.ssl_channel_credentials(
            _read(authority, "certificate authority of other coordinators"),
            _read(self.key, "key"),
            _read(self.cert, "certificate"),
        )

    # -- pages ---------------------------------------------------------------------------------------------------------

    def web_context(self) -> ssl.SSLContext:
        """For HTTPS, with this certificate; readers show a token. Follows the files as `credentials` does."""
        follower = _Follower(self)
        context = self._server_context()

        def latest(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            """What OpenSSL asks at the beginning of each connection, whether its client gives a name or not."""
            nonlocal context
            with contextlib.suppress(OSError):  # changed again a moment later: as before, until the next connection
                if follower.fetch() is not None:
                    context = self._server_context()
            connection.context = context

        context.sni_callback = latest
        return context

    def _server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key, password=no_password)
        return context


class _Follower:
    """What gRPC asks at the beginning of each connection, in threads of its own."""

    def __init__(self, files: ServerTls) -> None:
        self._files = files
        self._seen: Stamp | None = files.stamp()
        self._told = ""

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """None: as before."""
        try:
            stamp = self._files.stamp()
            if stamp == self._seen:
                return None
            self._seen = stamp  # before the load: a change during it is seen next time
            loaded = self._files.load()
        except OSError as error:
            sentence = without_code(error.strerror or str(error))
            if sentence != self._told:
                self._told = sentence
                _log.warning("%s The certificate from before stays in use.", sentence)
            return None
        self._told = ""
        _log.warning("The certificate %r was reloaded.", self._files.cert)
        return loaded


def _read(name: str, what: str) -> bytes:
    try:
        with open(name, "rb") as file:
            return file.read()
    except OSError as error:
        raise _unusable(f"Can't read the {what} {name!r}: {error.strerror}.", error.errno) from error


def _check_pair(cert: str, key: str) -> None:
    """Has one TLS connection in memory with itself: whether the two fit, and whether a client would take them today."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(cert, key, password=no_password)
    except (ssl.SSLError, ValueError) as error:
        raise _unusable(f"{_pair(cert, key)} can't be used: {_reason(error)}.") from error
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # this client does not know the names by which clients know the coordinator
    client.load_verify_locations(cert)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is believed; its dates are looked at
    try:
        shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        when = {
            EXPIRED: "has expired; renew it (`horovodrun certs DIR --renew` does this for its own certificates)",
            NOT_YET_VALID: "is not valid yet; check the clock of this host",
        }
        why = when.get(error.verify_code, f"can't be used by a server: {error.verify_message}")
        raise _untrusted(f"The certificate {cert!r} {why}.") from error
    except ssl.SSLError as error:
        raise _unusable(f"{_pair(cert, key)} can't be used: {_reason(error)}.") from error


def _check_authority(name: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(name)
    except ssl.SSLError as error:
        raise _unusable(f"The certificate authority {name!r} can't be used: {_reason(error)}.") from error


def _warn_of_readers(key: str) -> None:
    status = os.stat(key)
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
        _log.warning(
            "Other users may read or change the key %r (mode %04o); `chmod 600` keeps it to its owner.",
            key,
            stat.S_IMODE(status.st_mode),
        )


def _pair(cert: str, key: str) -> str:
    return f"The certificate {cert!r} with the key {key!r}"


def _reason(error: Exception) -> str:
    known = {
        "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
        "NO_START_LINE": _NOT_PEM,
        "NO_CERTIFICATE_OR_CRL_FOUND": "it holds no certificate in PEM",
        "EE_KEY_TOO_SMALL": "the key is too short to be safe",
    }
    if "PEM lib" in str(error):
        return _NOT_PEM
    reason = getattr(error, "reason", None) or str(error)
    return known.get(reason, reason)


def _unusable(sentence: str, number: int | None = errno.EINVAL) -> OSError:
    return OSError(number, coded(AccessCode.UNUSABLE_CERTIFICATE, sentence))


def _untrusted(sentence: str) -> OSError:
    return OSError(errno.EINVAL, coded(AccessCode.UNTRUSTED_CERTIFICATE, sentence))
