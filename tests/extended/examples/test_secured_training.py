"""Two processes train over mTLS, a token of their job and encrypted connections, with what `horovodrun certs` has made:
the same numbers as without any of it, and certificates that are renewed meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DIGITS = [sys.executable, str(ROOT / "examples" / "torch_digits.py"), "--epochs", "1"]
HOROVODRUN = [sys.executable, "-m", "horovod.launch"]

pytestmark = pytest.mark.timeout(400)
pytest.importorskip("cryptography", reason="cryptography makes the certificates")


def said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def train(address: str, **variables: str) -> list[str]:
    """What each of the two has printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    environ |= {"HOROVOD_COORDINATOR": address, "HOROVOD_SIZE": "2", "HOROVOD_TRANSPORT": "tcp", "OMP_NUM_THREADS": "1"}
    environ |= {"HOROVOD_START_TIMEOUT": "120"}  # both import PyTorch, one later than the other on a busy machine
    processes = [
        subprocess.Popen(
            DIGITS,
            env={**environ, **variables, "HOROVOD_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ends = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    return [out for out, _ in ends]


def test_the_same_training(tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    said([*HOROVODRUN, "certs", str(tls), "--hosts", "localhost,127.0.0.1"])
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    job_token = said([*HOROVODRUN, "token", "digits", "--token-file", str(token)])
    options = ["--tls-cert", f"{tls}/coordinator.pem", "--tls-key", f"{tls}/coordinator.key"]
    options += ["--tls-client-ca", f"{tls}/ca.pem", "--token-file", str(token), "--listen", "127.0.0.1:0"]
    members = {"CA": f"{tls}/ca.pem", "CERT": f"{tls}/client.pem", "KEY": f"{tls}/client.key"}
    secured = {f"HOROVOD_TLS_{name}": value for name, value in members.items()}
    secured |= {"HOROVOD_TOKEN": job_token, "HOROVOD_JOB": "digits"}
    command = [sys.executable, "-m", "horovod.coordinator", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as coordinator:
        try:
            assert coordinator.stdout is not None
            address = coordinator.stdout.readline().split()[-1]
            plain = train(address, **secured)
            assert any("accuracy" in out for out in plain)
            said([*HOROVODRUN, "certs", str(tls), "--renew"])
            assert train(address, **secured, HOROVOD_WIRE="encrypted") == plain
        finally:
            coordinator.terminate()
    assert coordinator.returncode == 0
