"""The documentation holds: the site builds without a warning, its snippets run, and what it quotes is said."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from attacks import defects, rows

from horovod.base.frameworks import WITH_AN_API

ROOT = Path(__file__).parents[3]
# Of two ranks that import a framework on a busy machine, one may be half a minute later.
HOROVODRUN = [sys.executable, "-m", "horovod.launch", "--start-timeout", "200"]
# A fenced block of Python, and whether the line before it marks it as a fragment, which does not run by itself.
BLOCK = re.compile(r"(<!-- fragment -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
QUOTED_ELSEWHERE = {"invalid device ordinal"}  # PyTorch's

MODULES = [
    *(f"horovod.{one.module}{part}" for one in WITH_AN_API for part in ("", ".callbacks", ".elastic")),
    "horovod.tensorflow.data.compute_service",
]
SUBMODULES = {"callbacks", "elastic"}  # which have sections of their own


def _public(source: Path) -> list[str]:
    """The names in `__all__`, with those of modules from which it takes all."""
    text = source.read_text()
    parts = re.findall(r"^ *__all__ \+?= \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    shared = re.findall(r"^from (horovod\.[\w.]+) import \*", text, re.MULTILINE)
    own = [name for part in parts for name in re.findall(r'"(\w+)"', part)]
    return own + [name for one in shared for name in _public(_source(one))]


def _source(module: str) -> Path:
    folder = ROOT / "clients" / module.replace(".", "/")
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def test_the_site_builds_strictly_and_has_every_public_name() -> None:
    """A link to a page or a heading that is not there is a warning, and a warning is an error."""
    pytest.importorskip("mkdocs", reason="make test-all installs it")
    built = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (ROOT / "build/site/docs/api/index.html").read_text()
    for module in MODULES:
        source = _source(module)
        if not source.exists():  # not every framework has callbacks
            continue
        public = _public(source)
        assert public
        prefix = module.replace("keras", "_?keras").replace(".", r"\.")  # some are where both share them
        shown = set(re.findall(rf'id="{prefix}\.(?:\w+\.)*(\w+)"', page))
        assert [name for name in public if name not in shown | SUBMODULES] == [], module


PAGES = [
    *("guide", "elastic", "pytorch", "checkpoints", "validation", "several-optimizers"),
    *("hangs", "from-0.28", "gpu-hosts"),
]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}.md" for page in PAGES)])
def test_the_snippets_run_on_two_ranks(page: str, tmp_path: Path) -> None:
    blocks = [code for fragment, code in BLOCK.findall((ROOT / page).read_text()) if not fragment]
    assert blocks
    script = tmp_path / "snippets.py"
    script.write_text("\n".join(blocks))
    settings = ["HOROVOD_DYNAMIC_PROCESS_SETS=1", "HOROVOD_TIMELINE=DYNAMIC"]
    command = ["env", *settings, *HOROVODRUN, "-np", "2", sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr


def test_quoted_messages_are_messages() -> None:
    """What the table of docs/troubleshooting.md quotes is in the sources; `...` stands for what differs."""
    folders = [ROOT / folder for folder in ("clients", "coordinator", "worker", "csrc")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".cc", ".h"}]
    text = "\n".join(path.read_text() for path in files)
    text = re.sub(r'"\s*\+?\s*f?"', "", text)  # a sentence that is written in several literals
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [code for row in rows for code in re.findall(r"`([^`]+)`", row) if " " in code]
    assert len(quoted) > 10
    parts = {part.strip() for code in quoted for part in code.split("...")} - {""} - QUOTED_ELSEWHERE
    assert sorted(part for part in parts if part not in text) == []


@pytest.mark.parametrize(("page", "least"), [("docs/elastic-promises.md", 30), ("SECURITY.md", 22)])
def test_each_promise_has_a_test(page: str, least: int) -> None:
    """What an elastic job survives, and what an attacker gets: each row names the tests that keep it true."""
    assert len(rows(page)) >= least
    assert defects(page) == []


def test_pages_stay_short() -> None:
    """A glossary of more words, or longer pages, are read by fewer people."""
    words = (ROOT / "docs/architecture.md").read_text().partition("\n## Glossary\n")[2]
    rows = [line for line in words.splitlines() if re.match(r"\| (?!word )\w", line)]
    assert 20 <= len(rows) <= 48
    assert len((ROOT / "docs/benchmarks.md").read_text().splitlines()) <= 120
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
