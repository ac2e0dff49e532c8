"""`horovod-coordinator`: serves until it is told to stop."""

import argparse
import asyncio
import logging
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .address import ListenAddress
from .server import CoordinatorServer

EXIT_OK = 0
EXIT_FAILED = 1  # the environment does not let us serve
EXIT_USAGE = 2  # the command line makes no sense


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if arguments.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("grpc").setLevel(logging.WARNING)  # tells of every call otherwise
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    try:
        address = ListenAddress.parse(arguments.listen)
        token = _read_token(arguments.token_file) if arguments.token_file else None
        if token is None and not arguments.insecure and not address.is_loopback():
            raise ValueError(
                f"Refusing to listen on {address} without a token, since other hosts could take part in the training. "
                "Give the same secret to the coordinator (--token-file FILE) and to the processes (HOROVOD_TOKEN), "
                "listen on 127.0.0.1, or accept the risk with --insecure."
            )
        asyncio.run(_serve(address, token))
    except ValueError as error:
        return _fail(error, EXIT_USAGE, arguments.verbose)
    except OSError as error:
        return _fail(error, EXIT_FAILED, arguments.verbose)
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="horovod-coordinator",
        description="Brings the processes of training jobs together: ranks, membership, first agreement on operations.",
    )
    parser.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:29400", help="default: %(default)s")
    parser.add_argument("--token-file", metavar="FILE", help="members must know the secret in this file")
    parser.add_argument("--insecure", action="store_true", help="serve other hosts even without a token")
    parser.add_argument("--verbose", action="store_true", help="log what happens, and show tracebacks")
    return parser


def _read_token(path: str) -> str:
    """The secret in the file, without the white space around it."""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise OSError(f"The token file {path!r} must hold one line of ASCII text.") from error
    except OSError as error:
        raise OSError(f"Can't read the token file {path!r}: {error.strerror}.") from error
    if not token or any(character.isspace() or not character.isprintable() for character in token):
        raise OSError(f"The token file {path!r} must hold one line of ASCII text without spaces.")
    return token


async def _serve(address: ListenAddress, token: str | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = CoordinatorServer()
    port = await server.start(str(address), token)
    print(f"horovod-coordinator is listening on {ListenAddress(address.host, port)}", flush=True)
    await stop.wait()
    await server.stop()


def _fail(error: ValueError | OSError, code: int, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    sentence = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    print(f"horovod-coordinator: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
