"""docs/frameworks.md is what the sources say, and a hole in it has a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import framework_holes as holes
import frameworks_page as page
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
WITHOUT_FRAMEWORKS = """
import sys
from horovod.base.frameworks import PACKAGES
sys.modules.update(dict.fromkeys([*PACKAGES, "numpy"]))
sys.path.insert(0, "docs/tools")
import frameworks_page
print(frameworks_page.markdown(), end="")
"""


def test_the_page_is_that_of_the_code_and_needs_no_framework() -> None:
    command = [sys.executable, "-c", WITHOUT_FRAMEWORKS]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=PAGE.parents[1])
    assert made.returncode == 0, made.stderr
    assert made.stdout == PAGE.read_text(), "python docs/tools/frameworks_page.py > docs/frameworks.md"


@pytest.fixture
def hole(monkeypatch: pytest.MonkeyPatch) -> str:
    """One that has lost its reason."""
    monkeypatch.setattr(holes, "REASONS", {key: value for key, value in holes.REASONS.items() if key != "load_model"})
    return "load_model"


def test_a_hole_needs_a_reason(hole: str) -> None:
    with pytest.raises(AssertionError, match=rf"PyTorch has no {hole}: write it"):
        page.markdown()


def test_a_reason_needs_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holes, "REASONS", holes.REASONS | {"allgather": {"PyTorch": "It is there."}})
    with pytest.raises(AssertionError, match=r"reasons for what is there.*'allgather', 'PyTorch'"):
        page.markdown()


def test_what_stands_for_a_name_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holes, "INSTEAD", holes.INSTEAD | {"SyncBatchNorm": {"TensorFlow": ("SyncNorm",)}})
    with pytest.raises(AssertionError, match=r"TensorFlow has \['SyncNorm'\] in place of SyncBatchNorm"):
        page.markdown()
