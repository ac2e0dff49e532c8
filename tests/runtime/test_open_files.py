"""A process that may open no more files says so, with the limit and how to raise it, and blames nothing else."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

# Opens files up to a limit of its own and then does `body`.
PROGRAM = """
import os, resource, socket, sys
import horovod._core, grpc
from horovod.coordinator.address import ListenAddress
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.worker.agent.guardian import Guardian
from horovod.worker.runtime.host import Interface
from horovod.worker.runtime.mesh import Listeners
from horovod.worker.runtime.probe import probe
from horovod.base.words import reason_of
loopback = Interface("lo", ("127.0.0.1",))
encoded = "x".encode("idna")
probe("127.0.0.1", 1, 1.0)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    print({body})
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.mark.parametrize(
    ("body", "begin"),
    [
        ("Listeners([loopback])", "StartError: "),
        ("probe('127.0.0.1', 1, 1.0).sentence('h:1')", "The coordinator at h:1 "),
        ("ListenAddress('127.0.0.1', 0).check_free()", "OSError: [Errno 24] "),
        ("horovod._core.Segment()", "RuntimeError: "),
        ("Guardian()", "OSError: [Errno 24] "),
        ("EmbeddedCoordinator(token='x').start()", "OSError: [Errno 24] "),
    ],
)
def test_the_limit_is_named(body: str, begin: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)], capture_output=True, text=True, timeout=60, check=False
    )
    (line,) = run.stdout.splitlines()
    assert line.startswith(begin), run.stderr
    assert re.search(r"\b64\b", line)
    assert "ulimit -n" in line
