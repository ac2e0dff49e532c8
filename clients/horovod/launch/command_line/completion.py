"""Completion scripts for bash, zsh and fish, made from the parser: `eval "$(horovodrun --completion bash)"`.

The options of horovodrun end where the program begins, so each script reads the words from the left: an option takes as
many words as the parser says, and what comes after them all belongs to the program, which the shell completes by its
own rules. What --help hides is not offered, but its values are skipped all the same.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from horovod.base.settings import SETTINGS

_FOLDERS = {"DIR"}
_FILES = {"FILE", "YAML", "SCRIPT", "TIMELINE", "LOG", "LIBRARY"}
_INTERFACES = {"NIC", "INTERFACES"}
_CHOICES = {setting.flag: setting.choices for setting in SETTINGS if setting.flag and setting.choices}


@dataclass(frozen=True)
class Option:
    """An option as a shell needs it: its spellings, what it means, how many words follow it and of which kind."""

    names: tuple[str, ...]
    text: str
    words: int
    kind: str = ""  # file, folder or interface; "": none of them
    choices: tuple[str, ...] = ()
    hidden: bool = False


def options_of(parser: argparse.ArgumentParser) -> list[Option]:
    """The options of `parser`, in its order."""
    found = []
    for action in parser._actions:
        if not action.option_strings:
            continue
        hidden = action.help is argparse.SUPPRESS
        words = 1 if action.nargs is None else int(action.nargs) if isinstance(action.nargs, int) else 0
        shown = action.metavar if isinstance(action.metavar, str) else ""
        kinds = {"folder": _FOLDERS, "file": _FILES, "interface": _INTERFACES}
        kind = next((name for name, metavars in kinds.items() if words and shown in metavars), "")
        choices = tuple(map(str, action.choices or ())) or _CHOICES.get(action.option_strings[0], ())
        text = " ".join((action.help or "").replace("%%", "%").split())
        found.append(Option(tuple(action.option_strings), "" if hidden else text, words, kind, choices, hidden))
    return found


def script(
    shell: str, parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser] | None = None
) -> str:
    """The completion script. commands: parsers of what may stand in place of the options, such as `horovodrun ps`."""
    table = {"": options_of(parser), **{name: options_of(one) for name, one in (commands or {}).items()}}
    return SHELLS[shell](table)


Table = Mapping[str, list[Option]]


# -- bash --------------------------------------------------------------------------------------------------------------
_BASH = """\
# bash completion of horovodrun, made by `horovodrun --completion bash`

declare -A _horovodrun_options=(
@OPTIONS@
)
declare -A _horovodrun_takes=(  # how many words follow
@TAKES@
)

_horovodrun_value() {
    case "$1" in
@VALUES@
    esac
}

_horovodrun() {
    # COMP_WORDS would cut at = and :, which options and hosts contain.
    local -a words
    read -ra words <<< "${COMP_LINE:0:COMP_POINT}"
    [[ ${COMP_LINE:COMP_POINT-1:1} == [[:space:]] ]] && words+=('')
    local last=$((${#words[@]} - 1)) at=1 command='' option count
    local word=${words[last]}
    COMPREPLY=()
    if ((last > 1)) && [[ -n ${words[1]} && -n ${_horovodrun_options[${words[1]}]+known} ]]; then
        command=${words[1]} at=2
    fi
    while ((at < last)) && [[ ${words[at]} == -* ]]; do
        option=${words[at]}
        ((at++))
        [[ $option == -- ]] && break
        [[ $option == *=* ]] && continue
        count=${_horovodrun_takes[$command $option]:-0}
        if ((at + count > last)); then
            _horovodrun_value "$command $option" "$word"
            return
        fi
        ((at += count))
    done
    if ((at < last)); then
        compopt -o default  # an argument of the program
    elif [[ $word == --*=* && $option != -- ]]; then
        _horovodrun_value "$command ${word%%=*}" "${word#*=}"
    elif [[ $word == -* && $option != -- ]]; then
        COMPREPLY=($(compgen -W "${_horovodrun_options[$command:]}" -- "$word"))
    elif [[ -z $command ]]; then
        compopt -o filenames
        COMPREPLY=($(compgen -W "@COMMANDS@" -c -- "$word") $(compgen -f -- "$word"))
    else
        compopt -o default
    fi
}
complete -F _horovodrun horovodrun
"""


def _bash(table: Table) -> str:
    options = [f"    [{name}:]='{' '.join(_shown(options))}'" for name, options in table.items()]
    options += [f"    [{name}]=''" for name in table if name]
    takes, values = [], []
    for command, one in _each(table):
        if one.words:
            takes += [f"    ['{command} {name}']={one.words}" for name in one.names]
            if action := _bash_values(one):
                pattern = "|".join(f"'{command} {name}'" for name in one.names)
                values.append(f"        {pattern}) {action} ;;")
    values.append("        *) ;;")
    parts = {"OPTIONS": options, "TAKES": takes, "VALUES": values}
    text = _BASH.replace("@COMMANDS@", " ".join(name for name in table if name))
    for name, lines in parts.items():
        text = text.replace(f"@{name}@", "\n".join(lines))
    return text


def _bash_values(one: Option) -> str:
    if one.choices:
        return f"""COMPREPLY=($(compgen -W '{" ".join(one.choices)}' -- "$2"))"""
    return {
        "file": 'compopt -o filenames; COMPREPLY=($(compgen -f -- "$2"))',
        "folder": 'compopt -o filenames; COMPREPLY=($(compgen -d -- "$2"))',
        "interface": 'COMPREPLY=($(compgen -W "$(command ls /sys/class/net 2> /dev/null)" -- "$2"))',
    }.get(one.kind, "")


# -- zsh ---------------------------------------------------------------------------------------------------------------
_ZSH = """\
#compdef horovodrun
# zsh completion of horovodrun, made by `horovodrun --completion zsh`

_horovodrun_program() {
    _alternative 'commands:command of horovodrun:(@NAMES@)' 'programs:program:_command_names -e' 'files:file:_files'
}

_horovodrun() {
    local curcontext=$curcontext
    case ${words[2]} in
@COMMANDS@
        *)
            _arguments -S \\
@OPTIONS@ \\
                '(-)1:program:_horovodrun_program' \\
                '*::argument:_normal'
            ;;
    esac
}
if [[ ${funcstack[1]} == _horovodrun ]]; then _horovodrun "$@"; else compdef _horovodrun horovodrun; fi
"""


def _zsh(table: Table) -> str:
    commands = []
    for name, options in table.items():
        if name:
            specs = " \\\n".join(f"                {_zsh_option(one)}" for one in options if not one.hidden)
            commands.append(
                f"        {name})\n            shift words; ((CURRENT--))\n            _arguments -S \\\n{specs} \\\n"
                "                '*:argument:_files'\n            ;;"
            )
    specs = " \\\n".join(f"                {_zsh_option(one)}" for one in table[""])
    text = _ZSH.replace("@COMMANDS@", "\n".join(commands)).replace("@OPTIONS@", specs)
    return text.replace("@NAMES@", " ".join(name for name in table if name))


def _zsh_option(one: Option) -> str:
    many = "*" if one.text.endswith("repeatable") else ""
    exclude = f"({' '.join(one.names)})" if len(one.names) > 1 and not many else ""
    text = re.sub(r"([\[\]:])", r"\\\1", one.text).replace("'", "'\\''")
    action = (
        f"({' '.join(one.choices)})" if one.choices else {"file": "_files", "folder": "_files -/"}.get(one.kind, " ")
    )
    if one.kind == "interface":
        action = "_net_interfaces"
    values = f":value:{action}" * one.words
    # `!` keeps an option out of the list and still knows its values.
    return " ".join(f"'{'!' if one.hidden else ''}{exclude}{many}{name}[{text}]{values}'" for name in one.names)


# -- fish --------------------------------------------------------------------------------------------------------------
_FISH = """\
# fish completion of horovodrun, made by `horovodrun --completion fish`

# The words from where the options end: the program and its arguments, or one of horovodrun's own commands.
function __horovodrun_rest
    set -l words (commandline -opc)
    set -e words[1]
    while set -q words[1]
        switch $words[1]
            case --
                set -e words[1]
                break
@TAKES@
            case '-*'
                set -e words[1]
            case '*'
                break
        end
    end
    test (count $words) -gt 0; and printf '%s\\n' $words
end
function __horovodrun_in
    set -l rest (__horovodrun_rest)
    test "$argv[1]" = "$rest[1]"
end
function __horovodrun_at_options
    test -z "$(__horovodrun_rest)"
end

complete -c horovodrun -f
complete -c horovodrun -n __horovodrun_at_options -a '@COMMANDS@ (__fish_complete_command)'
complete -c horovodrun -n 'not __horovodrun_at_options' -F
@OPTIONS@
"""


def _fish(table: Table) -> str:
    by_count: dict[int, list[str]] = {}
    lines = []
    for command, one in _each(table):
        if one.words and not command:
            by_count.setdefault(one.words, []).extend(one.names)
        if not one.hidden:
            lines.append(_fish_option(command, one))
    takes = [
        f"            case {' '.join(names)}\n                set -e words[1..{words + 1}]"
        for words, names in sorted(by_count.items())
    ]
    text = _FISH.replace("@TAKES@", "\n".join(takes)).replace("@OPTIONS@", "\n".join(lines))
    return text.replace("@COMMANDS@", " ".join(name for name in table if name))


def _fish_option(command: str, one: Option) -> str:
    condition = f"'__horovodrun_in {command}'" if command else "__horovodrun_at_options"
    names = []
    for name in one.names:
        kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
        names.append(f"{kind} {name.lstrip('-')}")
    takes = ""
    if one.choices:
        takes = f" -x -a '{' '.join(one.choices)}'"
    elif one.words:
        takes = {
            "file": " -r -F",
            "folder": " -x -a '(__fish_complete_directories)'",
            "interface": " -x -a '(command ls /sys/class/net)'",
        }.get(one.kind, " -x")
    text = one.text.replace("\\", "\\\\").replace("'", "\\'")
    return f"complete -c horovodrun -n {condition} {' '.join(names)}{takes} -d '{text}'"


# -- all ---------------------------------------------------------------------------------------------------------------
def _each(table: Table) -> list[tuple[str, Option]]:
    return [(command, one) for command, options in table.items() for one in options]


def _shown(options: list[Option]) -> list[str]:
    return [name for one in options if not one.hidden for name in one.names]


SHELLS: dict[str, Callable[[Table], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
