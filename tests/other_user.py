"""Programs that run as another user of this host, for tests of what users may do to each other; only root can."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OTHER_USER = 64321  # a number without a name, as in a container


# All that the programs need is imported before: Python itself may lie in a directory of root's.
_BECOME = f"""
import asyncio, encodings.idna, os, pathlib, socket, sys, urllib.error, urllib.request
import grpc, grpc.aio
import horovod.coordinator.server, horovod.coordinator.store.sqlite
from horovod.protos.v1 import membership_pb2, membership_pb2_grpc
os.chdir("/")
os.setgroups([])
os.setresgid({OTHER_USER}, {OTHER_USER}, {OTHER_USER})
os.setresuid({OTHER_USER}, {OTHER_USER}, {OTHER_USER})
"""


def start_as_other_user(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Python runs `script`, with pipes. The test is skipped where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("only root can start programs as another user")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "XDG_"))}
    return subprocess.Popen(
        [sys.executable, "-c", _BECOME + script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
