"""The options in the manuals of the three programs, made from their parsers: `python docs/tools/launcher_page.py docs`.

Everything else on these pages is written by hand; this replaces what stands between the two marks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from horovod.launch import commands
from horovod.launch.command_line.flags import make_parser

BEGIN = "<!-- made by `python docs/tools/launcher_page.py docs` -->"
END = "<!-- until here -->"
_SETTINGS = "settings"  # the group of the parser; its options are told in docs/settings.md


def with_options(page: str, name: str) -> str:
    """The page of that file name with the options of today. ValueError where the marks are missing."""
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page needs the lines {BEGIN} and {END}, between which the options belong.")
    return f"{before}{begin}{PAGES[name]()}\n{end}{after}"


def _of_launcher() -> str:
    return options(make_parser()) + _commands(commands.parsers())


def _of_coordinator() -> str:
    from horovod.coordinator.__main__ import make_parser as coordinator_parser

    return _table(coordinator_parser())


def _of_agent() -> str:
    from horovod.worker.agent.__main__ import make_parser as agent_parser

    return _table(agent_parser())


PAGES = {"launcher.md": _of_launcher, "coordinator.md": _of_coordinator, "agents.md": _of_agent}


def options(parser: argparse.ArgumentParser) -> str:
    """A heading for each group of the parser and a table of its options, without those that --help hides."""
    blocks = []
    for group in parser._action_groups:
        actions = [one for one in group._group_actions if one.option_strings and one.help is not argparse.SUPPRESS]
        if not actions:
            continue
        title = "general" if group.title == "options" else str(group.title)
        lines = [f"\n### {title[0].upper()}{title[1:]}\n"]
        if group.title == _SETTINGS:
            lines.append(
                "Each is also an environment variable and a key of `--config-file`: [settings](settings.md).\n"
            )
        lines += ["| option | meaning |", "|---|---|", *(_line(one) for one in actions)]
        blocks.append("\n".join(lines))
    return "\n".join(blocks) + "\n"


def _table(parser: argparse.ArgumentParser) -> str:
    """One table of all options, without those that --help hides."""
    actions = [one for one in parser._actions if one.option_strings and one.help is not argparse.SUPPRESS]
    return "\n".join(["\n| option | meaning |", "|---|---|", *map(_line, actions)]) + "\n"


def _commands(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """A heading, the usage and a table for each command in place of a program."""
    blocks = ["\n### Commands\n\nIf the first word is one of these, `horovodrun` runs that command.\n"]
    for parser in parsers.values():
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        text = " ".join(part for part in (parser.description,) if part)
        lines = [f"\n**`{usage}`** {text}\n", "| argument | meaning |", "|---|---|"]
        lines += [_line(one) for one in parser._actions if one.help is not argparse.SUPPRESS and one.dest != "help"]
        blocks.append("\n".join(lines) + "\n")
    return "".join(blocks)


def _line(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if not names:
        names = f"`{action.metavar or action.dest}`"
    elif action.nargs != 0 and action.metavar:
        metavar = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
        names += f" `{metavar}`"
    shown = (action.help or "") % {"default": action.default}
    # "]" before "[" would be a link of Markdown.
    text = " ".join(shown.replace("|", "\\|").replace("][", "]\\[").split())
    return f"| {names} | {text} |"


if __name__ == "__main__":
    for name in PAGES:
        target = Path(sys.argv[1]) / name
        target.write_text(with_options(target.read_text(encoding="utf-8"), name), encoding="utf-8")
