"""The extras: every name that 0.28 had, and none that pip would not know."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text()
OF_0_28 = {
    "all-frameworks",
    "dev",
    "keras",
    "mxnet",
    "pytorch",
    "pytorch-spark",
    "ray",
    "spark",
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "test",
}


def extras() -> dict[str, list[Requirement]]:
    section = PYPROJECT.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    parts = re.split(r"^([\w-]+) = \[", section, flags=re.MULTILINE)[1:]
    listed = zip(parts[::2], parts[1::2], strict=True)
    return {name: [Requirement(one) for one in re.findall(r'"([^"]+)"(?=[,\]\n])', text)] for name, text in listed}


def test_each_extra_of_0_28_is_there() -> None:
    """pip only warns of an extra that is not there, and installs no framework."""
    assert extras().keys() >= OF_0_28


def test_an_extra_of_extras_names_extras() -> None:
    known = extras()
    named = {extra for listed in known.values() for one in listed if one.name == "horovod" for extra in one.extras}
    assert named
    assert named <= known.keys()


def test_no_extra_asks_for_a_package_that_refuses_to_be_installed() -> None:
    """The latest tensorflow-gpu on PyPI is a stub that fails."""
    assert "tensorflow-gpu" not in {one.name for listed in extras().values() for one in listed}
