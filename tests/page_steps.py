"""Pages that say how to add something, taken at their word: their steps are carried out in a copy of the tree.

A step is a block of code below a sentence that says where it belongs: "New file `a/b.py`:", or "In `a/b.py`, after
`the beginning of one line`:". A block of `sh` is run in the copy, where `python` finds the copy's package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import horovod._core
import horovod.protos

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?:(?P<new>New\sfile|In)\s`(?P<file>[^`]+)`(?:,\s(?P<where>after|before)\s`(?P<anchor>[^`]+)`)?:\n\n)?"
    r"^```(?P<kind>[a-z+]+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
# The folders of the package, by where they are installed.
PACKAGES = dict(re.findall(r'^"(horovod[\w/]*)" = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
COPIED = ("protos", "tests", "pyproject.toml", *sorted({Path(source).parts[0] for source in PACKAGES.values()}))


@dataclass(frozen=True)
class Step:
    file: str
    text: str
    where: str  # after or before the one line that begins with `anchor`; "": it is all of a new file
    anchor: str

    def apply(self, tree: Path) -> None:
        path = tree / self.file
        if not self.where:
            assert not path.exists(), f"{self.file} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.text)
            return
        lines = path.read_text().splitlines(keepends=True)
        found = [number for number, line in enumerate(lines) if line.lstrip().startswith(self.anchor.lstrip())]
        assert len(found) == 1, f"{self.file} has {len(found)} lines that begin with {self.anchor!r}"
        lines.insert(found[0] + (self.where == "after"), self.text)
        path.write_text("".join(lines))


@dataclass(frozen=True)
class Command:
    text: str


def steps(page: str, chapter: str) -> list[Step | Command]:
    """What the chapter of the page says, in its order. chapter: its heading, with the #s."""
    _, found, text = (ROOT / page).read_text().partition(f"\n{chapter}\n")
    assert found, f"{page} has no chapter {chapter!r}"
    level = chapter.partition(" ")[0]
    text = re.split(
        rf"^#{{1,{len(level)}}} ", re.sub(r"^```.*?^```$", _hidden, text, flags=_BLOCKS), flags=re.MULTILINE
    )[0]
    text = text.replace(_HASH, "#")
    matches = list(BLOCK.finditer(text))
    assert len(matches) == len(re.findall("^```", text, re.MULTILINE)) // 2
    return [_step(match) for match in matches]


_HASH = "\0"  # in place of a # in a block, which begins no chapter
_BLOCKS = re.DOTALL | re.MULTILINE


def _hidden(block: re.Match[str]) -> str:
    return block[0].replace("#", _HASH)


def _step(match: re.Match[str]) -> Step | Command:
    if match["kind"] == "sh":
        return Command(match["text"])
    assert match["file"], f"a block lacks its place:\n{match['text']}"
    assert (match["new"] == "In") == bool(match["anchor"]), f"{match['file']}: a step lacks its line"
    return Step(match["file"], match["text"], match["where"] or "", match["anchor"] or "")


def touched(found: Sequence[Step | Command]) -> set[str]:
    """The files that people write for it, without tests and CHANGELOG.md, which every change has."""
    files = {step.file for step in found if isinstance(step, Step)}
    return {file for file in files if not file.startswith("tests/") and file != "CHANGELOG.md"}


class Tree:
    """A copy of the tree, in which a page is followed."""

    def __init__(self, folder: Path, more: Sequence[str] = ()) -> None:
        """more: files and folders to copy beside the package and the tests."""
        self.folder = folder
        for name in (*COPIED, *more):
            source, copy = ROOT / name, folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, copy)
        self.package = folder / PACKAGES["horovod"]
        self._make_environment()
        for installed, source in PACKAGES.items():
            if installed != "horovod":
                (self.package.parent / installed).symlink_to(folder / source)

    def _make_environment(self) -> None:
        """A virtual environment with the packages of this one, but for `horovod`, which is the copy's."""
        environment = self.folder / ".venv"
        self._programs = environment / "bin"
        self._programs.mkdir(parents=True)
        base = Path(sys._base_executable)
        (environment / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
        (self._programs / "python").symlink_to(base)
        packages = environment / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        packages.mkdir(parents=True)
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if entry.name != "horovod" and "editable" not in entry.name:
                (packages / entry.name).symlink_to(entry)
        (packages / "horovod.pth").write_text(f"{self.package.parent}\n")

    def use(self, core: Path, protos: Path) -> None:
        """What the copy's package has that is made by a build."""
        (self.package / core.name).symlink_to(core)
        (self.package / "protos").symlink_to(protos)

    def use_built(self) -> None:
        """The same, of the tree that was copied. `make build` makes the protos anew, which is all that it does here."""
        self.use(Path(horovod._core.__file__), Path(next(iter(horovod.protos.__path__))))
        made, inputs = self.folder / "build", "$(cd protos; find . -name '*.proto' | sed 's#^./#horovod/protos/#')"
        flags = f"-Ihorovod/protos=protos --include_imports --descriptor_set_out={made}/descriptors"
        self._program(
            "make",
            'test "$*" = build || exit 2',
            f"mkdir -p {made} && python -m grpc_tools.protoc {flags} {inputs} || exit",
            f"python protos/generate.py {made}/descriptors {made} || exit",
            f"cp protos/python/*.py {made}/horovod/protos && ln -sfn {made}/horovod/protos {self.package}/protos",
        )

    def follow(self, found: Sequence[Step | Command]) -> None:
        for step in found:
            if isinstance(step, Step):
                step.apply(self.folder)
            else:
                self.run("sh", "-ec", step.text)

    def python(self, *arguments: str) -> str:
        return self.run("python", *arguments)

    def run(self, *command: str) -> str:
        """What the command has said; it must not fail."""
        done = self._done(command)
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def refusal(self, *command: str) -> str:
        """What the command has said, which must fail."""
        done = self._done(command)
        assert done.returncode != 0, f"{' '.join(command)} did not fail:\n{done.stdout}"
        return done.stdout

    def _done(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PATH": os.pathsep.join([str(self._programs), os.environ["PATH"]])}
        environment.pop("PYTHONPATH", None)
        environment.pop("HOROVOD_TEST_TIER", None)  # the tests of the copy are those of `make test`
        program = shutil.which(command[0], path=environment["PATH"])
        assert program is not None, command[0]
        return subprocess.run(
            [program, *command[1:]],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )

    def test(self, *arguments: str) -> str:
        """Runs tests of the copy."""
        return self.python("-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments)

    def _program(self, name: str, *lines: str) -> None:
        path = self._programs / name
        path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        path.chmod(0o755)
