"""How a member makes a coordinator prove that it knows the token, before the member shows its own.

Between hosts a member knows where its coordinator should be, but not whose process answers there: a user of that host
may listen on the port first, or stand in the middle. Whoever is shown the token can take part in the training, and so
make its processes run code. So the member asks, and says nothing else:

    member                                                     coordinator
    first handshake of TLS, which believes nothing          <- certificate
    connection that believes this certificate alone:
    a call without a token, with a nonce                    -> refusal, with HMAC(token, certificate, nonce)

The certificate is part of the proof and the connection is its owner's alone, so a program that passes on the proof of
the true coordinator is found out: it shows another certificate, or it only passes on bytes that it can't read. The
member then joins over TLS, and believes no other certificate as long as the coordinator lives. base/proofs.py computes
the proof, coordinator/services/auth.py gives it. docs/adr/0115-proven-coordinators.md tells why so.
"""

from __future__ import annotations

import secrets
import socket
import ssl
from typing import Any

import grpc

from horovod.base.addresses import with_port
from horovod.base.proofs import NONCE, NONCE_LENGTH, PROOF, coordinator_proof, is_equal
from horovod.worker.runtime.channel import channel_options, status_of
from horovod.worker.runtime.tls import is_not_tls, shown_certificate

# Any method would do: the call is refused before it is looked at. This one is there in every version.
_METHOD = "/horovod.v1.Membership/Serves"
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_KEEPALIVE_TIMEOUT_S = 20.0


class UnprovenError(Exception):
    """What answers has proved nothing; the text says what it did, after "it". is_final: it will not do better later."""

    def __init__(self, what: str, is_final: bool = False) -> None:
        super().__init__(what)
        self.is_final = is_final


def proven_certificate(host: str, port: int, token: str, server_name: str, timeout_s: float) -> str:
    """The certificate, in PEM, of the coordinator that listens there and has proved that it knows the token.

    server_name: the name in its certificate. timeout_s: for each of the steps. OSError where nobody listens or the host
    can't be reached, UnprovenError where somebody does who is not that coordinator. The token is not sent.
    """
    certificate = _certificate(host, port, timeout_s)
    pem = ssl.DER_cert_to_PEM_cert(certificate)
    nonce = secrets.token_hex(NONCE_LENGTH // 2)
    given = _proof(with_port(host, port), pem, server_name, nonce, timeout_s)
    if not given:
        raise UnprovenError("gave no proof", is_final=True)
    if not is_equal(given, coordinator_proof(token, certificate, nonce).encode()):
        raise UnprovenError("proved another token", is_final=True)
    return pem


def _certificate(host: str, port: int, timeout_s: float) -> bytes:
    with socket.create_connection((host, port), timeout=timeout_s) as plain:
        try:
            certificate = shown_certificate(plain)
        except ssl.SSLError as error:
            if is_not_tls(error):
                raise UnprovenError("does not speak TLS", is_final=True) from error
            raise UnprovenError("ended the handshake of TLS") from error
        except TimeoutError as error:
            raise UnprovenError("takes connections and says nothing") from error
        except OSError as error:
            raise UnprovenError("ended the connection without an answer") from error
    if not certificate:
        raise UnprovenError("showed no certificate", is_final=True)
    return certificate


def _proof(address: str, pem: str, server_name: str, nonce: str, timeout_s: float) -> bytes:
    """What the refusal of a call without a token has."""
    options = (*channel_options(_KEEPALIVE_TIMEOUT_S), ("grpc.ssl_target_name_override", server_name))
    credentials = grpc.ssl_channel_credentials(pem.encode())
    with grpc.secure_channel(address, credentials, options=options) as channel:
        try:
            call: Any = channel.unary_unary(_METHOD)
            call(b"", metadata=((NONCE, nonce),), timeout=timeout_s)
        except grpc.RpcError as error:
            code, details = status_of(error)
            refusal: grpc.Call = error  # type: ignore[assignment]
            given = dict(refusal.trailing_metadata() or ()).get(PROOF, "")
            if not given and code in _SILENT:
                raise UnprovenError(f"showed a certificate, and did not speak gRPC with it ({details})") from None
            return given if isinstance(given, bytes) else given.encode()
    return b""
