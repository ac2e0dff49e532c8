"""The pages for operators: every option and setting on them exists, and the pages name each other."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from horovod.base.settings import SETTINGS
from horovod.coordinator.__main__ import make_parser as coordinator_parser
from horovod.launch import commands
from horovod.launch.command_line.flags import make_parser as launcher_parser
from horovod.worker.agent.__main__ import make_parser as agent_parser

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [
    f"{name}.md" for name in ("operating", "kubernetes", "gpu-hosts", "certificates", "backup", "monitoring", "runbook")
]
OURS = {row.env for row in SETTINGS} | {"HOROVOD_START_TIMEOUT", "HOROVOD_ELASTIC_TIMEOUT"}
# Options of Helm, kubectl, openssl, etcd, systemd and their like.
THEIRS = {
    *(
        "--set",
        "--from-file",
        "--from-literal",
        "--strict",
        "--now",
        "--preserve",
        "--since",
        "--kill-whom",
        "--cacert",
    ),
    *("--data-dir", "--name", "--initial-cluster", "--initial-advertise-peer-urls", "--bump-revision"),
    *("--mark-compacted", "--help", "--prefix", "--cluster", "--pid"),
}


def options() -> set[str]:
    parsers = [coordinator_parser(), agent_parser(), launcher_parser(), *commands.parsers().values()]
    return {word for parser in parsers for action in _actions(parser) for word in action.option_strings}


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions


@pytest.mark.parametrize("page", PAGES)
def test_options_and_settings_exist(page: str) -> None:
    text = (DOCS / page).read_text()
    assert set(re.findall(r"\bHOROVOD_\w+", text)) <= OURS
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= options() | THEIRS


def test_codes_exist() -> None:
    known = set(re.findall(r"^\| `([a-z0-9-]+)` \|", (DOCS / "errors.md").read_text(), re.MULTILINE))
    named = {
        code
        for page in PAGES
        for code in re.findall(r"(?:with|is|ends with) `([a-z]+(?:-[a-z]+)+)`", (DOCS / page).read_text())
    }
    assert named
    assert named <= known


def test_the_first_page_leads_to_all() -> None:
    text = (DOCS / PAGES[0]).read_text()
    assert [page for page in PAGES[1:] if f"({page}" not in text] == []
