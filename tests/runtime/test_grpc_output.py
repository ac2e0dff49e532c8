"""gRPC keeps quiet on stderr unless a user wants to hear it, which it must be told before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import {package}
assert "grpc" not in sys.modules
told = os.environ["GRPC_VERBOSITY"]
import {module}
assert "grpc" in sys.modules
print(told)
"""
MODULES = {
    "horovod.worker": "horovod.worker.runtime.session",
    "horovod.coordinator": "horovod.coordinator.server",
    "horovod.launch": "horovod.launch.cluster.client",
}


@pytest.mark.parametrize("package", MODULES)
@pytest.mark.parametrize(("wanted", "told"), [("", "ERROR"), ("INFO", "INFO")])
def test_it_is_told_before_it_is_imported(package: str, wanted: str, told: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    if wanted:
        environ["GRPC_VERBOSITY"] = wanted
    command = [sys.executable, "-c", PROGRAM.format(package=package, module=MODULES[package])]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, told), done.stderr
