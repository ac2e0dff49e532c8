"""The one table of settings: a row (base/setting.py) says all that is known about one.

The table is the class `Settings` itself, so that code reads `settings.size` with a type. Its rows stand by families in
the modules beside this one. What else depends on a setting is derived from `SETTINGS`: its flag and its key in
`horovodrun`, what the ranks must agree on, the engine's options and docs/settings.md. An explicit argument beats the
environment; flags and files are the launcher's business, which turns them into environment variables of the processes.
Values are checked by their row, before a process contacts anybody: a bad one is a ValueError whose sentence names the
variable, flag or key, the value and what is expected. The engine checks its options again, as tests give it some that
are in no table. Importing this package reads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from horovod.base.errors import SettingCode, coded
from horovod.base.setting import MAX_SIZE, Setting, environment_text, rows
from horovod.base.words import shortened

from .data_plane import WIRE_MODES, BackendSettings, DataPlaneSettings
from .earlier import OF_BUILD, OF_BUILD_AND_TESTS, AutotuneSettings, EarlierSettings
from .observation import ObservationSettings
from .training import TrainingSettings
from .world import WorldSettings

__all__ = [
    "MAX_SIZE",
    "PARENT_WORLD",
    "ROWS",
    "SETTINGS",
    "WIRE_MODES",
    "Settings",
    "resolve",
    "unread",
    "variables",
]


# A dataclass takes the fields of its bases from the last to the first, so this is the order of the table, reversed.
@dataclass(frozen=True)
class Settings(
    EarlierSettings,
    BackendSettings,
    AutotuneSettings,
    ObservationSettings,
    TrainingSettings,
    DataPlaneSettings,
    WorldSettings,
):
    """All settings of one process, checked. None means not given."""

    @property
    def may_grow(self) -> bool:
        """Whether a later world of the job may have more processes: then one that is alone is not to stay so."""
        return self.elastic or self.min_size is not None


SETTINGS: tuple[Setting, ...] = rows(Settings)
ROWS: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}

# No setting: in this variable a rank tells its place to the processes that it starts (worker/runtime/parentage.py).
PARENT_WORLD: Final = "HOROVOD_PARENT_WORLD"
MAX_UNREAD: Final = 8  # variables that a warning names


def variables(**values: Any) -> dict[str, str]:
    """Environment variables for settings by name."""
    return {ROWS[name].env: environment_text(value) for name, value in values.items()}


def unread(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of `environ` that is no setting but has almost the name of one, and one for all
    others that nothing reads.
    """
    known = {setting.env.removeprefix("HOROVOD_") for setting in SETTINGS}
    given = {name.removeprefix("HOROVOD_") for name in environ if name.startswith("HOROVOD_")}
    sentences, others = [], []
    for name in sorted(given - known):
        if name in OF_BUILD or name.startswith(OF_BUILD_AND_TESTS) or f"HOROVOD_{name}" == PARENT_WORLD:
            continue
        from difflib import get_close_matches  # seldom needed

        if close := get_close_matches(name, known, n=1, cutoff=0.85):
            sentences.append(f"HOROVOD_{name} is not a setting; did you mean HOROVOD_{close[0]}?")
        else:
            others.append(f"HOROVOD_{name}")
    if others:
        several = len(others) > 1
        which = f"{shortened(others, MAX_UNREAD)} {'are not settings' if several else 'is not a setting'}"
        sentences.append(f"{which} of this version of Horovod: nothing reads {'them' if several else 'it'}.")
    return sentences


def resolve(environ: Mapping[str, str] | None = None, explicit: Mapping[str, Any] | None = None) -> Settings:
    """Settings from explicit arguments (None means not given), then `environ` (default: the process's), then defaults.

    An empty variable counts as unset. Raises ValueError for a bad value and for an argument that is not in the table.
    """
    environ = os.environ if environ is None else environ
    given = {name: value for name, value in (explicit or {}).items() if value is not None}
    if "token" in given:
        environ = {name: value for name, value in environ.items() if name != ROWS["token_file"].env}
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        if setting.name in given:
            values[setting.name] = setting.check(given.pop(setting.name))
        elif text := setting.text(environ):
            values[setting.name] = setting.parse(text)
    if given:
        known = ", ".join(setting.name for setting in SETTINGS)
        sentence = f"There is no setting named {', '.join(sorted(given))}; settings are: {known}."
        raise ValueError(coded(SettingCode.UNKNOWN_SETTING, sentence))
    return Settings(**values)
