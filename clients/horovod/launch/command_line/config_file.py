"""The YAML file behind --config-file. Its keys are those of the settings table, plus `controller`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from horovod.base.errors import LaunchCode, coded
from horovod.base.setting import Setting
from horovod.base.settings import SETTINGS
from horovod.launch.located import MAX_EXPANDED, expanded

_CONTROLLERS = ("gloo", "mpi")


def read_config(path: str | Path) -> dict[str, str]:
    """The environment variables for the file's settings. ValueError with a sentence for anything else in it."""
    where = f"The configuration file {str(path)!r}"
    try:
        content = _content(Path(path).read_text(encoding="utf-8"), where)
    except OSError as error:
        raise _wrong(f"{where} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise _wrong(f"{where} cannot be read: it is not UTF-8 text.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise _wrong(f"{where} is not YAML: {' '.join(str(error).split())}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise _wrong(f"{where} holds {type(content).__name__}: expected sections such as `params:` with keys below.")
    rows = {setting.yaml: setting for setting in SETTINGS if setting.yaml}
    sections = {name.partition(".")[0] for name in rows}
    environ: dict[str, str] = {}
    for section, keys in content.items():
        if section == "controller":
            _check_controller(keys, where)
        elif section not in sections:
            raise _wrong(f"{where} has the unknown key {section!r}{_hint(section, {*sections, 'controller'})}")
        elif isinstance(keys, dict):
            for key, value in keys.items():
                name = f"{section}.{key}"
                if name not in rows:
                    known = {row.partition(".")[2] for row in rows if row.startswith(f"{section}.")}
                    raise _wrong(f"{where} has the unknown key {name!r}{_hint(str(key), known)}.")
                if value is not None:
                    environ[rows[name].env] = _text(rows[name], value, f"{name} in {path}")
        elif keys is not None:
            raise _wrong(f"{where} has {section!r} with the value {keys!r}: expected keys below it.")
    return environ


def _content(text: str, where: str) -> Any:
    """As yaml.safe_load, of a file whose aliases and merges come to a bounded size."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is not None and expanded(node, {}) > MAX_EXPANDED:
            raise _wrong(
                f"{where} repeats values by `*alias` or `<<: *alias` so often that it would expand to more "
                f"than {MAX_EXPANDED >> 20} MiB. Write the values out."
            )
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _wrong(sentence: str) -> ValueError:
    return ValueError(coded(LaunchCode.WRONG_CONFIG_FILE, sentence))


def _text(setting: Setting, value: Any, source: str) -> str:
    if setting.kind == "list" and not isinstance(value, list):
        value = str(value)
    if setting.yaml_inverted:
        value = not setting.check(value, source)
    return setting.from_option(value, source)


def _check_controller(value: Any, where: str) -> None:
    if value not in _CONTROLLERS:
        raise _wrong(f"{where} asks for the controller {value!r}: expected one of {', '.join(_CONTROLLERS)}.")
    if value == "mpi":
        raise _wrong(f"{where} asks for the controller 'mpi', which is not built: leave the key out or write gloo.")


def _hint(word: object, known: set[str]) -> str:
    close = difflib.get_close_matches(str(word), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"
