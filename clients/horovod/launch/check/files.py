"""Which files `horovodrun --check` reads, what it prints, and its exit status."""

from __future__ import annotations

import os
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from horovod.base.errors import LaunchCode, coded
from horovod.base.words import for_people
from horovod.launch.check.rules import rules_of
from horovod.launch.check.script import Script
from horovod.launch.check.shell import faults_in_shell

_FOUND = 1
_UNREADABLE = 2
_SHELL = (".sh", ".bash")


def check(paths: Sequence[str]) -> int:
    """Prints a line for each thing that is found; 0: nothing was, 1: something, 2: a file could not be read."""
    status = 0
    for path in paths:
        for file in _files(Path(path)):
            try:
                found = sorted(set(_faults(file)))
            except (OSError, SyntaxError, ValueError, RecursionError) as error:
                where = f"{file}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else str(file)
                reason = getattr(error, "strerror", None) or getattr(error, "msg", None) or str(error)
                sentence = (
                    f"{where}: can't be checked: {reason}. Give Python sources (of Python 3), scripts of a shell or "
                )
                print(for_people(coded(LaunchCode.SCRIPT_UNREADABLE, sentence + "folders.")), file=sys.stderr)
                status = _UNREADABLE
                continue
            for line, sentence, remedy in found:
                print(for_people(coded(LaunchCode.OLDER_SCRIPT, f"{file}:{line}: {sentence}; {remedy}.")))
                status = max(status, _FOUND)
    return status


def _files(path: Path) -> Iterator[Path]:
    """A file itself; of a folder all sources, but for those in hidden folders and in virtual environments."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(
            one for one in folders if not one.startswith((".", "__")) and not Path(folder, one, "pyvenv.cfg").exists()
        )
        yield from (Path(folder, name) for name in sorted(names) if name.endswith((".py", *_SHELL)))


def _faults(file: Path) -> Iterator[tuple[int, str, str]]:
    if file.suffix in _SHELL:
        return faults_in_shell(file.read_text(encoding="utf-8", errors="replace"))
    with tokenize.open(file) as source:  # in the encoding that it declares
        return rules_of(Script(source.read()))
