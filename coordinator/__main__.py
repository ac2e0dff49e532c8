"""`horovod-coordinator`: serves until it is told to stop."""

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
import sys
import traceback
from collections.abc import Sequence

from horovod.base.errors import SettingCode, coded
from horovod.base.processes import open_missing_streams
from horovod.base.proofs import MIN_CLUSTER_TOKEN_LENGTH
from horovod.base.protocol import __version__
from horovod.base.setting import on_loopback
from horovod.base.telemetry import otel
from horovod.base.telemetry.logs import JsonFormatter, TextFormatter
from horovod.base.tokens import read_token
from horovod.base.words import for_people

from .address import ListenAddress
from .config import CoordinatorConfig, Limits
from .exposure import check_store_exposure, check_web_exposure
from .server import CoordinatorServer
from .store import ETCD, MEMORY, open_store
from .store.etcd_address import EtcdAddress
from .store.seal import Seal
from .tls import ServerTls
from .token import random_token

EXIT_OK = 0
EXIT_FAILED = 1  # the environment does not let us serve
EXIT_USAGE = 2  # the command line makes no sense

_log = logging.getLogger("horovod.coordinator")


def main(argv: Sequence[str] | None = None) -> int:
    open_missing_streams()
    arguments = make_parser().parse_args(argv)
    handler = logging.StreamHandler()
    text = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if arguments.log_format == "json" else text)
    logging.basicConfig(level=_level(arguments), handlers=[handler])
    logging.getLogger("grpc").setLevel(logging.WARNING)  # otherwise gRPC logs every call
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    _allow_many_connections()
    try:
        asyncio.run(_serve(_config(arguments)))
    except ValueError as error:
        return _fail(error, EXIT_USAGE, arguments.verbose)
    except OSError as error:
        return _fail(error, EXIT_FAILED, arguments.verbose)
    return EXIT_OK


def _config(arguments: argparse.Namespace) -> CoordinatorConfig:
    """ValueError, or OSError for a file, with a sentence."""
    address = ListenAddress.parse(arguments.listen)
    token = read_token(arguments.token_file) if arguments.token_file else None
    tls = _tls(arguments)
    makes_token = token is None and not arguments.insecure and address.is_loopback()
    web_listen, web_token = _web(arguments, tls)
    seal = _seal(arguments, token)
    return CoordinatorConfig(
        str(address),
        random_token() if makes_token else token,
        shows_token=makes_token,
        insecure=arguments.insecure,
        advertise=_advertised(arguments.advertise, address, shared=arguments.store.startswith(ETCD)),
        tls=tls,
        open_store=lambda: open_store(arguments.store, seal),
        web_listen=web_listen,
        web_token=web_token,
        web_tls=arguments.web_tls,
        limits=Limits(arguments.keepalive_timeout_seconds, arguments.reattach_grace_seconds),
    )


def _seal(arguments: argparse.Namespace, token: str | None) -> Seal | None:
    """The seal of a store in etcd, made of the token unless there is a file of keys. ValueError, or OSError, with a
    sentence, also for an etcd that strangers could use.
    """
    if not arguments.store.startswith(ETCD):
        if arguments.store_key_file:
            sentence = "--store-key-file is for stores in etcd. The file of sqlite:PATH is for its user alone."
            raise ValueError(coded(SettingCode.CONFLICTING_SETTINGS, sentence))
        return None
    seal = None
    if arguments.store_key_file:
        seal = Seal.from_file(arguments.store_key_file)
    elif token is not None and len(token) >= MIN_CLUSTER_TOKEN_LENGTH:
        seal = Seal([token])
    address = EtcdAddress.parse(arguments.store)
    if warning := check_store_exposure(address, seal is not None, arguments.insecure_store):
        _log.warning("%s", warning)
    return seal


def _advertised(given: str | None, address: ListenAddress, *, shared: bool) -> str | None:
    """The checked address for others; None for that of --listen."""
    if given is not None:
        advertised = ListenAddress.parse(given)
        if advertised.port == 0:
            sentence = f"--advertise {given} needs a port from 1 to 65535."
            raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
        return str(advertised)
    if shared and address.is_wildcard():
        sentence = (
            f"Coordinators of one store redirect training processes to each other, and {address} is not an "
            "address to which others can connect. Add --advertise HOST:PORT with an address under which "
            "others reach this coordinator."
        )
        raise ValueError(coded(SettingCode.MISSING_SETTING, sentence))
    return None


def _allow_many_connections() -> None:
    """Raises the limit of open descriptors to what is allowed: each member takes one, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def make_parser() -> argparse.ArgumentParser:
    """Also for the manual."""
    parser = argparse.ArgumentParser(
        prog="horovod-coordinator",
        description="Brings the processes of training jobs together: gives them ranks, notices which of them are lost, "
        "and checks that they ask for the same operations.",
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:29400",
        help="address to which training processes, agents and launchers connect (default: %(default)s)",
    )
    parser.add_argument(
        "--advertise",
        metavar="HOST:PORT",
        help="address under which training processes and other coordinators of the same store reach this one (default: "
        "that of --listen, which must not be a wildcard then)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the token that processes must know. Without it, a coordinator on loopback makes a token, which "
        "processes of the same user find automatically",
    )
    parser.add_argument("--insecure", action="store_true", help="serve anybody, without a token")
    parser.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="serve over TLS with this certificate (PEM, with its chain). It is read again when it changes. "
        "`horovodrun certs` makes one",
    )
    parser.add_argument("--tls-key", metavar="FILE", help="the private key of --tls-cert (PEM, without a password)")
    parser.add_argument(
        "--tls-client-ca",
        metavar="FILE",
        help="serve only clients with a certificate that this certificate authority (PEM) has signed",
    )
    parser.add_argument(
        "--tls-peer-ca",
        metavar="FILE",
        help="certificate authority (PEM) that has signed the certificates of the other coordinators of the same store "
        "(default: that of --tls-client-ca)",
    )
    parser.add_argument(
        "--keepalive-timeout-seconds",
        metavar="S",
        type=_seconds,
        default=Limits.keepalive_timeout_s,
        help="how long a connection may leave a ping unanswered before it counts as broken (default: %(default)g "
        "seconds)",
    )
    parser.add_argument(
        "--reattach-grace-seconds",
        metavar="S",
        type=_seconds,
        default=Limits.reattach_grace_s,
        help="how long a process may be without a connection before it counts as lost, unless others see that it is "
        "alive (default: %(default)g seconds)",
    )
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        default=MEMORY,
        help="store of jobs and worlds: memory: (they are lost with this process), sqlite:PATH (a file on a disk of "
        "this host, for this coordinator only; jobs survive a restart), or for several coordinators "
        "etcd://HOST:PORT[,HOST:PORT...][?ca=FILE&cert=FILE&key=FILE&user=NAME&password_file=FILE&prefix=TEXT] "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--store-key-file",
        metavar="FILE",
        help="file with secrets, one a line. The first one encrypts the entries in etcd; the others decrypt older "
        "entries (default: the secret of --token-file)",
    )
    parser.add_argument(
        "--insecure-store",
        action="store_true",
        help="allow an etcd on other hosts without TLS, without credentials, or without a key to encrypt its entries",
    )
    parser.add_argument(
        "--web-listen",
        metavar="[HOST]:PORT",
        help="address of a status page, /metrics (Prometheus), /healthz and /readyz (without HOST: on 127.0.0.1)",
    )
    parser.add_argument(
        "--web-token-file",
        metavar="FILE",
        help="file with the secret that readers of the status page and /metrics send as a bearer token, or give once "
        "in a browser as /?token=SECRET. Required if other hosts can connect; on loopback the coordinator "
        "otherwise makes a secret and prints the link. It is not the token of --token-file",
    )
    parser.add_argument(
        "--web-tls",
        action="store_true",
        help="serve the status page and /metrics over HTTPS, with the certificate of --tls-cert",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="format of log lines on stderr. json: one object a line; its field epoch is the number of the world "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="least severe log messages that are written (default: %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="log everything, and show tracebacks")
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value <= 10_000_000:
        sentence = f"expected seconds from 0.001 to 10000000, not {text!r}"
        raise argparse.ArgumentTypeError(coded(SettingCode.INVALID_SETTING, sentence))
    return value


def _tls(arguments: argparse.Namespace) -> ServerTls | None:
    cert, key, client_ca, peer_ca = (
        arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca, arguments.tls_peer_ca,
    )  # fmt: skip
    if not cert and not key:
        if client_ca:
            raise _missing(
                "--tls-client-ca needs --tls-cert and --tls-key: clients are asked for theirs over TLS only."
            )
        if peer_ca:
            raise _missing("--tls-peer-ca needs --tls-cert and --tls-key: coordinators speak TLS with each other then.")
        return None
    if not cert or not key:
        raise _missing("--tls-cert and --tls-key belong together; only one of them is given.")
    return ServerTls(cert, key, client_ca, peer_ca)


def _missing(sentence: str) -> ValueError:
    return ValueError(coded(SettingCode.MISSING_SETTING, sentence))


def _level(arguments: argparse.Namespace) -> int:
    return logging.DEBUG if arguments.verbose else int(getattr(logging, arguments.log_level.upper()))


def _web(arguments: argparse.Namespace, tls: ServerTls | None) -> tuple[str | None, str | None]:
    """Where to show pages, and the token for them; ValueError with a sentence."""
    if arguments.web_tls and tls is None:
        raise _missing("--web-tls shows pages with the certificate of --tls-cert and --tls-key, which are missing.")
    if arguments.web_listen is None:
        return None, None
    address = ListenAddress.parse(on_loopback(arguments.web_listen))
    token = read_token(arguments.web_token_file) if arguments.web_token_file is not None else None
    check_web_exposure(address, token, arguments.web_tls, arguments.insecure)  # checked before any socket listens
    return str(address), token


async def _serve(config: CoordinatorConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = CoordinatorServer(config)
    await server.start()
    if server.web_link:
        print(f"horovod-coordinator shows its state at {server.web_link}", flush=True)
    address = ListenAddress(ListenAddress.parse(config.listen).host, server.port)
    print(f"horovod-coordinator is listening on {address}", flush=True)
    end_telemetry = otel.start("horovod-coordinator", server.registry)
    await stop.wait()
    await server.stop()
    await asyncio.to_thread(end_telemetry)


def _fail(error: ValueError | OSError, code: int, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    sentence = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    print(for_people(f"horovod-coordinator: {sentence}"), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
