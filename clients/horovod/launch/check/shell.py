"""Lines of shell scripts: options of horovodrun, and variables that are set."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import PurePath

from horovod.base.errors import without_code
from horovod.base.settings import SETTINGS
from horovod.launch.check.rules import setting_faults
from horovod.launch.command_line import flags

_HELP = "see horovodrun --help"
_SET = re.compile(r"(?:^|[\s;])(?:export\s+|-x\s+|-e\s+)?(HOROVOD_\w+)=([\w.,:/-]*)(\S?)")
_ENDS = re.compile(r"^(?:[;&|]+|\d?>.*|<.*)$")


def faults_in_shell(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, sentence and remedy of each thing that is found."""
    for number, line in _whole_lines(text):
        for name, value, more in _SET.findall(line):
            for sentence, remedy in setting_faults(name, None if more in ("$", "`", '"', "'") else value):
                yield number, sentence, remedy
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation that goes on in the next line, or a here-document
            continue
        for at, word in enumerate(words):
            if PurePath(word).name == "horovodrun":
                for sentence, remedy in _faults_of(_arguments(words[at + 1 :])):
                    yield number, sentence, remedy


def _whole_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; what a backslash continues is one."""
    begun, whole = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        begun = begun or number
        if line.endswith("\\"):
            whole += line[:-1] + " "
            continue
        yield begun, whole + line
        begun, whole = 0, ""
    if whole:
        yield begun, whole


def _arguments(words: list[str]) -> list[str]:
    """Up to the end of the command. A variable of the shell counts as 1, which is a number and a name."""
    known = []
    for word in words:
        if _ENDS.match(word):
            break
        known.append("1" if "$" in word or "`" in word else word)
    return known


def _faults_of(argv: list[str]) -> Iterator[tuple[str, str]]:
    if not argv or argv[0] in flags.COMMANDS:
        return
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            args = flags.parse_args(argv)
        except ValueError as error:
            yield without_code(error).rstrip("."), _HELP
            return
        except SystemExit as end:
            if end.code:
                sentence = without_code(said.getvalue().strip()).partition(": ")[2]
                yield sentence.replace(" (see horovodrun --help).", ""), _HELP
            return
    if (refused := flags.refusal(args)) is not None:
        yield without_code(refused).rstrip("."), "leave it out"
    for setting in SETTINGS:
        if setting.flag and setting.no_effect:
            value = getattr(args, setting.flag.removeprefix("--").replace("-", "_"), None)
            if value is not None and value is not False:
                yield f"{setting.flag} has no effect: {setting.no_effect}", "leave it out"
