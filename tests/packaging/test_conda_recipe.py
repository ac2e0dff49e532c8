"""The conda recipe asks for what pyproject.toml asks for. Building it needs a conda, which the tests have not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
RECIPE: Any = yaml.safe_load((ROOT / "deploy" / "conda" / "recipe.yaml").read_text())


def wanted(before: str) -> dict[str, str]:
    """Versions by package, of the list in pyproject.toml that begins with this text."""
    listed = re.findall(r'^  "(.*)",$', PYPROJECT.partition(before)[2].partition("\n]")[0], flags=re.MULTILINE)
    return {one.name.lower(): str(one.specifier) for one in map(Requirement, listed)}


def asked(section: str, *others: str) -> dict[str, str]:
    """The same of a section of the recipe, without the packages that only conda needs."""
    pairs = (line.partition(" ") for line in RECIPE["requirements"][section])
    return {name: str(Requirement(f"{name}{versions}").specifier) for name, _, versions in pairs if name not in others}


def test_packages() -> None:
    assert asked("run", "python") == wanted("\ndependencies = [\n")
    assert asked("host", "python", "pip") == wanted("\nrequires = [\n")


def test_facts() -> None:
    python = next(line for line in RECIPE["requirements"]["run"] if line.startswith("python "))
    assert f'requires-python = "{python.removeprefix("python ")}"' in PYPROJECT
    assert f'\nversion = "{RECIPE["context"]["version"]}"\n' in PYPROJECT
    assert f'\nlicense = "{RECIPE["about"]["license"]}"' in PYPROJECT
    source = ROOT / "deploy" / "conda" / RECIPE["source"]["path"]
    assert all((source / one).exists() for one in RECIPE["about"]["license_file"])
