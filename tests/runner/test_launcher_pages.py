"""The launcher's own coordinator shows its pages where other hosts can connect only to who has a token for them."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
from launching import Launched

from benchmarks.ports import free_ports
from horovod.base.errors import AccessCode, ErrorCode, code_of


def test_on_loopback_the_launcher_prints_the_link_that_opens_them(tmp_path: Path) -> None:
    fifo = tmp_path / "until"
    os.mkfifo(fifo)
    (port,) = free_ports(1)
    environ = {"HOROVOD_WEB_LISTEN": f"127.0.0.1:{port}"}
    launched = Launched("-np", "1", "sh", "-c", f"read line < {fifo}", environ=environ)
    try:
        assert launched.process.stderr is not None
        link = launched.process.stderr.readline().split()[-1]
        address, _, token = link.partition("/?token=")
        assert token
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{address}/metrics", timeout=20)
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with browser.open(link, timeout=20) as page:
            assert (page.url, "horovod coordinator" in page.read().decode()) == (f"{address}/", True)
        with browser.open(f"{address}/metrics", timeout=20) as page:
            assert b"horovod_worlds" in page.read()
        fifo.write_text("go\n")
        assert launched.finish()[0] == 0
    finally:
        launched.clean_up()


@pytest.mark.parametrize(
    ("token", "code", "error"),
    [
        (None, 2, AccessCode.EXPOSED),
        ("missing", 1, AccessCode.UNUSABLE_TOKEN),
        ("readers", 2, AccessCode.WEAK_TOKEN),
        ("readers-of-its-pages", 0, None),
    ],
)
def test_off_loopback_a_token_is_needed(token: str | None, code: int, error: ErrorCode | None, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "token"
    if token not in (None, "missing"):
        file.write_text(token)
        file.chmod(0o600)
    environ = {"HOROVOD_WEB_LISTEN": f"0.0.0.0:{port}"} | ({"HOROVOD_WEB_TOKEN_FILE": str(file)} if token else {})
    launched = Launched("-np", "1", "true", environ=environ)
    try:
        found, _, errors = launched.finish()
    finally:
        launched.clean_up()
    assert (found, code_of(errors)) == (code, error), errors
