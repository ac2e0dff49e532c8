"""The launcher's own coordinator shows its pages where other hosts can connect only to who has a token for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Launched

from benchmarks.ports import free_ports
from horovod.base.errors import AccessCode, ErrorCode, code_of


@pytest.mark.parametrize(
    ("token", "code", "error"),
    [(None, 2, AccessCode.EXPOSED), ("missing", 1, AccessCode.UNUSABLE_TOKEN), ("readers", 0, None)],
)
def test_off_loopback_a_token_is_needed(token: str | None, code: int, error: ErrorCode | None, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "token"
    if token == "readers":
        file.write_text(token)
        file.chmod(0o600)
    environ = {"HOROVOD_WEB_LISTEN": f"0.0.0.0:{port}"} | ({"HOROVOD_WEB_TOKEN_FILE": str(file)} if token else {})
    launched = Launched("-np", "1", "true", environ=environ)
    try:
        found, _, errors = launched.finish()
    finally:
        launched.clean_up()
    assert (found, code_of(errors)) == (code, error), errors
