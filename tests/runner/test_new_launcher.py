"""The launcher of CONTRIBUTING.md, run as it stands there: what is tested is the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
PROGRAM = """
import sys
from horovod.common import basics as hvd
hvd.init()
place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
open(f"{sys.argv[1]}/{hvd.rank()}", "w").write(repr(place))
sys.exit(3 * (hvd.rank() == 2))
"""


def test_the_launcher_of_the_page(tmp_path: Path) -> None:
    chapter = PAGE.read_text().partition("\n## A new launcher\n")[2].partition("\n## ")[0]
    (source,) = re.findall(r"^```python\n(.*?)^```$", chapter, re.DOTALL | re.MULTILINE)
    module: dict[str, Any] = {}
    exec(compile(source, "children.py", "exec"), module)
    assert module["launch"]([sys.executable, "-c", PROGRAM, str(tmp_path)], ["h1", "h1", "h2"]) == [0, 0, 3]
    told = [eval((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert told == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)]


@pytest.mark.parametrize("name", re.findall(r"`((?:launch|worker|coordinator)/[\w/]+\.py)`", PAGE.read_text()))
def test_files_that_the_page_names(name: str) -> None:
    root = PAGE.parent
    assert (root / name).exists() or (root / "clients" / "horovod" / name).exists()
