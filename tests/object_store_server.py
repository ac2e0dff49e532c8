"""A service that speaks the protocol of S3 or of Google Cloud Storage, in memory, as a process of its own.

python object_store_server.py s3|gs: it prints its address, and ends when its standard input does, as it does with its
parent.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any


def _s3() -> Any:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    return make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)


def _gs() -> Any:
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    return ThreadingHTTPServer(("127.0.0.1", 0), partial(RequestHandler, Storage(use_memory_fs=True)))


if __name__ == "__main__":
    server = {"s3": _s3, "gs": _gs}[sys.argv[1]]()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"serves at http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()
    os._exit(0)
