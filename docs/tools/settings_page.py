"""docs/settings.md, made from the settings table: `python docs/tools/settings_page.py > docs/settings.md`."""

from __future__ import annotations

from collections.abc import Iterable

from horovod.base.setting import Setting, environment_text
from horovod.base.settings import SETTINGS

_BEGIN = """# Settings

This page is made from the table in `base/settings` by `python docs/tools/settings_page.py > docs/settings.md`.

A setting is an environment variable of the training processes. Most settings also have an option of `horovodrun` and a
key in its YAML file (`--config-file`), which set the variable. If several are given, an argument of `hvd.init()` comes
first, then the option, the file and the environment. An empty variable counts as unset.

`horovodrun` checks values before it starts anything, and `hvd.init()` before it contacts the coordinator. A switch
takes 1 or 0 (also true/false, yes/no, on/off), and has an option for 0: `--no-pin-gpus` beside `--pin-gpus`. The key
`params.spin_us` means `spin_us` in the section `params`:

```yaml
params:
  spin_us: 100
```
"""
_LAUNCHER = """
## Set by launchers

`horovodrun` sets these for each process, so they have neither an option nor a key. Set them yourself only for processes
that you start without a launcher.
"""
_NO_EFFECT = """
## Without effect

Horovod accepts these for programs that were written for earlier versions. It checks their values and ignores them.
Rank 0 warns once about each one that is set.
"""


def markdown() -> str:
    """The page."""
    acting = [setting for setting in SETTINGS if not setting.no_effect]
    return "\n".join(
        [
            _BEGIN,
            *_table(setting for setting in acting if setting.flag),
            _LAUNCHER,
            *_table(setting for setting in acting if not setting.flag),
            _NO_EFFECT,
            *_table(setting for setting in SETTINGS if setting.no_effect),
            "",
        ]
    )


def _table(settings: Iterable[Setting]) -> list[str]:
    head = ["| variable, option, key | value | default | meaning |", "|---|---|---|---|"]
    return head + [_line(setting) for setting in settings]


def _line(setting: Setting) -> str:
    names = "<br>".join(f"`{name}`" for name in (setting.env, setting.flag, setting.yaml) if name)
    value = "1 or 0" if setting.kind == "bool" else setting.expected()
    if setting.flag_unit:
        value += f"; option and key in {setting.flag_unit}"
    meaning = setting.meaning()
    if setting.yaml_inverted:
        meaning += ". The key means the opposite"
    default = "" if setting.default in (None, ()) else f"`{environment_text(setting.default)}`"
    return f"| {names} | {value} | {default} | {meaning} |"


if __name__ == "__main__":
    print(markdown(), end="")
