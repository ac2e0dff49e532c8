"""Who could reach a coordinator that listens there, or its store, and what must therefore be asked of those who do.

Off loopback no member is served without credentials: members show a token, or a certificate that the coordinator's
authority signed; readers of its pages show a token of their own. A token that could be found by trying is refused. One
without TLS is let pass with a warning (docs/adr/0035-credentials.md says why). An etcd off loopback must have TLS and
ask for credentials, since whoever writes there decides what agents run (docs/adr/0114-open-stores.md).
"""

from __future__ import annotations

from horovod.base.errors import AccessCode, coded
from horovod.base.proofs import MIN_CLUSTER_TOKEN_LENGTH

from .address import ListenAddress
from .store.etcd_address import EtcdAddress
from .tls import ServerTls

TLS_ADVICE = "`horovodrun certs DIR --hosts NAMES` makes certificates (--tls-cert, or HOROVOD_TLS_CERT of rank 0)."


def check_exposure(
    address: ListenAddress, token: str | None, tls: ServerTls | None, insecure: bool, tls_advice: str = TLS_ADVICE
) -> str:
    """The sentence of a warning, or "". ValueError when strangers would be served, OSError when the host is unknown.

    tls_advice: how whoever started it would get TLS.
    """
    if address.is_loopback():
        return ""
    asks_for_certificates = tls is not None and tls.client_ca is not None
    if token is None and not asks_for_certificates:
        if insecure:
            return (
                f"The coordinator at {address} serves everybody who can reach it. A program that takes part in a "
                "training can make its processes run any code."
            )
        sentence = (
            f"Refusing to listen on {address} without a token, since other hosts could take part in the "
            "training. Give the same secret to the coordinator (--token-file FILE) and to the processes "
            "(HOROVOD_TOKEN_FILE or HOROVOD_TOKEN), ask for certificates (--tls-client-ca FILE), listen on 127.0.0.1, "
            "or accept the risk with --insecure."
        )
        raise ValueError(coded(AccessCode.EXPOSED, sentence))
    if not insecure:
        _check_length(token, address, "--token-file, HOROVOD_TOKEN")
    if tls is None:
        return (
            f"The coordinator at {address} asks for a token, but without TLS the token travels in the clear: "
            f"anybody who can read the network can take it. {tls_advice}"
        )
    return ""


def check_web_exposure(address: ListenAddress, token: str | None, tls: bool, insecure: bool) -> str:
    """As `check_exposure`, for the port of pages and metrics. tls: they are served over it."""
    if address.is_loopback():
        return ""
    if token is None:
        if insecure:
            return f"Everybody who can reach {address} may read which jobs run, who is in them and their metrics."
        sentence = (
            f"Refusing to show jobs and metrics on {address}, where other hosts can connect, without a token. Give one "
            "for readers (--web-token-file FILE, and the same to Prometheus as its credentials_file), use --web-listen "
            f"127.0.0.1:{address.port}, which only this host can connect to, or accept the risk with --insecure."
        )
        raise ValueError(coded(AccessCode.EXPOSED, sentence))
    if not insecure:
        _check_length(token, address, "--web-token-file")
    if not tls:
        return (
            f"The pages at {address} ask for a token, but without TLS it travels in the clear: anybody who can "
            "read the network can take it and read the pages, but not join a job. --web-tls shows them over "
            "HTTPS."
        )
    return ""


def _check_length(token: str | None, address: ListenAddress, options: str) -> None:
    """ValueError for a token that other hosts could find by trying: they may connect as often as they like."""
    if token is not None and len(token) < MIN_CLUSTER_TOKEN_LENGTH:
        sentence = (
            f"The token for {address} ({options}) has {len(token)} characters, so anybody who can connect "
            f"could guess it. Use a random one of {MIN_CLUSTER_TOKEN_LENGTH} or more, for example of `openssl "
            "rand -hex 32`, or accept the risk with --insecure."
        )
        raise ValueError(coded(AccessCode.WEAK_TOKEN, sentence))


def check_store_exposure(address: EtcdAddress, is_sealed: bool, insecure: bool) -> str:
    """As `check_exposure`, for etcd. is_sealed: with a key (store/seal.py). insecure: the option --insecure-store."""
    others = address.off_loopback()
    missing = []
    if address.ca is None:
        missing.append("TLS (ca=FILE, of the authority that signed etcd's certificate)")
    if address.cert is None and address.user is None:
        missing.append("credentials (cert=FILE&key=FILE, or user=NAME&password_file=FILE)")
    if not is_sealed:
        missing.append("a key to encrypt its entries (--token-file, or --store-key-file)")
    if not others or not missing:
        return ""
    lacks = " and without ".join(missing)
    if insecure:
        return (
            f"The store, etcd at {', '.join(others)}, is used without {lacks}: anybody who can reach it can "
            f"end every job{'' if is_sealed else ', read what they are given, and change what agents run'}."
        )
    sentence = (
        f"Refusing to keep jobs in etcd at {', '.join(others)} without {lacks}: anybody who can reach it could "
        f"end every job{'' if is_sealed else ', read what they are given, and change what agents run'}. Name "
        "the files for TLS and credentials after the '?' in --store, and let etcd require them "
        "(--client-cert-auth, or `etcdctl auth enable`). Or use an etcd on 127.0.0.1, or accept the risk with "
        "--insecure-store."
    )
    raise ValueError(coded(AccessCode.EXPOSED, sentence))
