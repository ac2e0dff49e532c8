"""docs/from-0.28.md: its tables are those of today, and the message that it quotes is said."""

from __future__ import annotations

import re
from pathlib import Path

import earlier_settings
import pytest

from horovod.launch.check.files import check
from horovod.launch.command_line.flags import make_parser

PAGE = Path(__file__).parents[2] / "docs/from-0.28.md"


def test_the_tables_are_those_of_today() -> None:
    """`python tests/earlier_settings.py docs/from-0.28.md` writes them."""
    page = PAGE.read_text()
    assert earlier_settings.with_tables(page) == page


def test_each_row_is_told_once() -> None:
    tables = earlier_settings.tables()
    for name in (*earlier_settings.DEFAULTS, *earlier_settings.OPTIONS):
        assert tables.count(f"`{name}`") == 1, name


def test_each_option_of_today_that_changes_nothing_or_is_refused_is_one_of_0_28() -> None:
    """What is accepted or refused for scripts of 0.28 alone is on the page."""
    told = set(re.findall(r"`(--[\w-]+)`", earlier_settings.tables()))
    for action in make_parser()._actions:
        if action.help and action.help.startswith(("no effect", "not built", "accepted", "no MPI")):
            assert told & set(action.option_strings), action.option_strings


def test_the_quoted_message_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [line] = re.findall(r"^train\.py:12: .*$", PAGE.read_text(), re.MULTILINE)
    script = tmp_path / "train.py"
    script.write_text("import keras\n" + "\n" * 10 + "keras.optimizers.Adam(lr=0.1)\n")
    assert check([str(script)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}/{line}\n"
