"""A client's side of TLS: whom it believes, what it shows, and sentences for each way in which a handshake fails.

gRPC says little about a failed handshake, so `probe` (probe.py) has another one by Python's ssl with the same files,
and `explained` here says what was wrong with which file on which side.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

import grpc

from horovod.base.errors import AccessCode, ErrorCode, SettingCode, coded
from horovod.base.settings import Settings
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
from horovod.worker.runtime.errors import StartError

_GRPC = "h2"  # protocol name in ALPN (RFC 7301); gRPC refuses a server that does not answer with it

_NOT_TLS = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
_UNKNOWN = {2, 18, 19, 20, 21}  # OpenSSL's numbers (X509_V_ERR_*, x509_vfy.h) for an unknown signer


@dataclass(frozen=True)
class ClientTls:
    """Names of files in PEM. `server_name`: that in the server's certificate, where it is not that of the address."""

    ca: str
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> ClientTls | None:
        """None: without TLS. StartError with a sentence when the settings do not fit together."""
        if settings.tls_ca is None:
            if settings.tls_cert or settings.tls_key or settings.tls_server_name:
                raise StartError(
                    coded(
                        SettingCode.MISSING_SETTING,
                        "HOROVOD_TLS_CERT, HOROVOD_TLS_KEY and HOROVOD_TLS_SERVER_NAME need HOROVOD_TLS_CA, the file "
                        "of the certificate authority by which the coordinator is known; without it there is no TLS.",
                    )
                )
            return None
        if (settings.tls_cert is None) != (settings.tls_key is None):
            sentence = "HOROVOD_TLS_CERT and HOROVOD_TLS_KEY belong together; only one of them is given."
            raise StartError(coded(SettingCode.MISSING_SETTING, sentence))
        return cls(settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_server_name)

    def checked_credentials(self) -> grpc.ChannelCredentials:
        """StartError with a sentence when a file can't be used."""
        self.context()
        key = _read(self.key, "HOROVOD_TLS_KEY") if self.key else None
        cert = _read(self.cert, "HOROVOD_TLS_CERT") if self.cert else None
        return grpc.ssl_channel_credentials(_read(self.ca, "HOROVOD_TLS_CA"), key, cert)

    def context(self) -> ssl.SSLContext:
        """The same for Python's ssl. StartError with a sentence when a file can't be used."""
        _read(self.ca, "HOROVOD_TLS_CA")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols([_GRPC])
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: the certificates in the file are believed
        try:
            context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            sentence = f"HOROVOD_TLS_CA={self.ca!r} holds no certificate in PEM."
            raise StartError(coded(AccessCode.UNUSABLE_CERTIFICATE, sentence)) from error
        if self.cert and self.key:
            _read(self.cert, "HOROVOD_TLS_CERT")
            _read(self.key, "HOROVOD_TLS_KEY")
            try:
                context.load_cert_chain(self.cert, self.key, password=no_password)
            except (ssl.SSLError, ValueError) as error:
                raise StartError(
                    coded(
                        AccessCode.UNUSABLE_CERTIFICATE,
                        f"HOROVOD_TLS_CERT={self.cert!r} and HOROVOD_TLS_KEY={self.key!r} can't be used together: "
                        f"{_reason(error)}.",
                    )
                ) from error
        return context

    def stamp(self) -> Stamp:
        """Changes when a file does; empty while one is missing."""
        try:
            return stamp((self.ca, self.cert, self.key))
        except OSError:
            return ()


def explained(error: ssl.SSLError, tls: ClientTls, name: str) -> tuple[str, str, ErrorCode]:
    """What is wrong, to end "The coordinator at host:port ..."; what to do about it, as a sentence; and its code."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _about_their_certificate(error, tls, name)
    if is_not_tls(error):
        return (
            "does not speak TLS",
            "Start it with --tls-cert and --tls-key, or leave HOROVOD_TLS_CA out of the settings of this process.",
            AccessCode.TLS_ON_ONE_SIDE,
        )
    todo = "Check HOROVOD_TLS_CA, HOROVOD_TLS_CERT and HOROVOD_TLS_KEY."
    return f"ended the TLS handshake: {_reason(error)}", todo, AccessCode.TLS_HANDSHAKE


def not_welcome(tls: ClientTls) -> tuple[str, str, ErrorCode]:
    """As `explained`, for a server that completes a handshake and then ends the connection.

    In TLS 1.3 a client has finished before the server looks at its certificate, and gRPC does not say what it found.
    """
    if tls.cert is None or tls.key is None:
        return (
            "ended the connection after the TLS handshake, as one that asks for a certificate; this process has none",
            "Set HOROVOD_TLS_CERT and HOROVOD_TLS_KEY to one that the authority of its --tls-client-ca has signed.",
            AccessCode.REFUSED_CERTIFICATE,
        )
    if why := _why_useless(tls.cert, tls.key):
        return (
            f"does not take the certificate of this process, since it {why}",
            f"See HOROVOD_TLS_CERT={tls.cert!r}.",
            AccessCode.REFUSED_CERTIFICATE,
        )
    return (
        f"does not take the certificate {tls.cert!r} of this process",
        "Set HOROVOD_TLS_CERT to one that the authority of its --tls-client-ca has signed, for clients.",
        AccessCode.REFUSED_CERTIFICATE,
    )


def speaks_tls(plain: socket.socket) -> bool:
    """Whether a server answers as one of TLS does. `plain` is a fresh connection."""
    try:
        shown_certificate(plain)
    except OSError:
        return False
    return True


def shown_certificate(plain: socket.socket) -> bytes:
    """The certificate, in DER, with which a server answers. Nothing is sent to it, and nothing of it is believed.

    `plain` is a fresh connection. OSError, and ssl.SSLError of these, where the answer is none of TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([_GRPC])
    with context.wrap_socket(plain) as sock:
        return sock.getpeercert(binary_form=True) or b""


def is_not_tls(error: ssl.SSLError) -> bool:
    """Whether the handshake failed because the server speaks something else."""
    return (error.reason or "").upper() in _NOT_TLS


def _about_their_certificate(
    error: ssl.SSLCertVerificationError, tls: ClientTls, name: str
) -> tuple[str, str, ErrorCode]:
    return *_in_words(error, tls, name), AccessCode.UNTRUSTED_CERTIFICATE


def _in_words(error: ssl.SSLCertVerificationError, tls: ClientTls, name: str) -> tuple[str, str]:
    code = error.verify_code
    if code == EXPIRED:
        return (
            "has a certificate that has expired",
            "Renew it there; the coordinator takes new files without a restart.",
        )
    if code == NOT_YET_VALID:
        return "has a certificate that is not valid yet", "Check the clocks of both hosts."
    if code in _UNKNOWN:
        return (
            f"has a certificate that no authority in {tls.ca!r} has signed",
            "Set HOROVOD_TLS_CA to the certificate authority of this coordinator.",
        )
    if code in (OTHER_NAME, OTHER_ADDRESS):
        return (
            f"has a certificate that is not for {name!r}",
            "Use a name that is in it. If you can't change the address, put that name into HOROVOD_TLS_SERVER_NAME.",
        )
    return f"has a certificate that can't be believed: {error.verify_message}", "Check HOROVOD_TLS_CA."


def _why_useless(cert: str, key: str) -> str:
    """Why every server would refuse this certificate of a client today; "" when a server may accept it.

    A connection in memory with a server that believes this certificate alone.
    """
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    server.load_verify_locations(cert)
    for context in (client, server):
        context.load_cert_chain(cert, key)
    try:
        shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        when = {EXPIRED: "has expired; renew it", NOT_YET_VALID: "is not valid yet; check the clock of this host"}
        return when.get(error.verify_code, f"can't be used by a client: {error.verify_message}")
    except ssl.SSLError as error:
        return f"can't be used by a client: {_reason(error)}"
    return ""


def _read(name: str, variable: str) -> bytes:
    try:
        with open(name, "rb") as file:
            return file.read()
    except OSError as error:
        sentence = f"Can't read {variable}={name!r}: {error.strerror}."
        raise StartError(coded(AccessCode.UNUSABLE_CERTIFICATE, sentence)) from error


def _reason(error: Exception) -> str:
    if "PEM lib" in str(error):
        return "one of them is not in PEM"
    reason = getattr(error, "reason", None) or str(error)
    return {"KEY_VALUES_MISMATCH": "the key is not that of the certificate"}.get(reason, reason)
