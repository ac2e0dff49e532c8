"""One row of the table of settings (base/settings): how it is written there, and how its text is read and checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from horovod.base.addresses import wrong_host_name
from horovod.base.errors import SettingCode, coded
from horovod.base.tokens import MAX_TOKEN_LENGTH, is_token

Kind = Literal["int", "float", "bool", "text", "list", "choice", "address", "addresses", "ports", "token"]

# Type of the field of Settings -> kind of the setting.
_KINDS: dict[str, Kind] = {"int": "int", "float": "float", "bool": "bool", "str": "text", "tuple[str, ...]": "list"}
_METAVARS = {
    "int": "N",
    "float": "X",
    "list": "A,B,...",
    "address": "[HOST]:PORT",
    "addresses": "HOST:PORT,...",
    "ports": "FIRST-LAST",
}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Setting:
    """One row of the table: all that is known about a setting, from which everything else follows."""

    name: str  # attribute of Settings; the unit is its last word
    env: str
    kind: Kind
    default: Any
    help: str
    flag: str | None = None  # option of `horovodrun`: "--fusion-threshold-mb"
    yaml: str | None = None  # section and key in its --config-file: "params.fusion_threshold_mb"
    unit: str | None = None  # unit of the variable's value
    choices: tuple[str, ...] = ()  # lower case; kind "choice"
    minimum: float | None = None
    maximum: float | None = None
    multiple: int = 1  # the value is a multiple of this
    flag_unit: str | None = None  # unit of option and key; None: that of the variable
    flag_scale: int = 1  # value of the variable = value of flag or key * flag_scale
    yaml_inverted: bool = False  # the key says "enabled" where the variable says "disable"
    agreed: bool = False  # the coordinator refuses a process whose value differs
    engine: str | None = None  # the engine's option (a field of csrc/base/config.h) that the value becomes
    engine_scale: int = 1  # value of the option = value of the setting * engine_scale
    secret: bool = False  # the value appears in no message
    launcher: bool = False  # internal: set by launchers for each process, never by a person
    no_effect: str = ""  # why nothing acts on a value that is checked and accepted, to end a sentence with; "": it acts
    # Choices that do what the default does, each with the reason, to end a sentence with.
    idle_choices: Mapping[str, str] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other words for choices

    def text(self, environ: Mapping[str, str]) -> str:
        """What the variable says; "" where it is unset or empty, which is the same."""
        return environ.get(self.env, "").strip()

    def parse(self, text: str, source: str | None = None) -> Any:
        """The value of `text`; ValueError with a sentence that names `source` (default: the variable)."""
        where = source or self.env
        text = text.strip()
        if self.kind in ("int", "float"):
            try:
                number = int(text) if self.kind == "int" else float(text)
            except ValueError as error:
                raise self._bad(where, text) from error
            # A variable that an old image still sets, and that nothing acts on, stops no job: -1 meant "none" there.
            is_none = number == -1 and bool(self.no_effect) and source is None
            return number if is_none else self._in_range(number, text, where)
        if self.kind == "bool":
            if text.lower() in _TRUE:
                return True
            if text.lower() in _FALSE:
                return False
            raise self._bad(where, text)
        if self.kind == "list":
            items = tuple(item.strip() for item in text.split(",") if item.strip())
            if not items:
                raise self._bad(where, text)
            return items
        if self.kind == "choice":
            choice = self.aliases.get(text.lower(), text.lower())
            if choice not in self.choices:
                raise self._bad(where, text)
            return choice
        if self.kind == "address":
            address = on_loopback(text)
            split_address(address, where)
            return address
        if self.kind == "ports":
            ports = split_ports(text)
            if ports is None:
                raise self._bad(where, text)
            return f"{ports[0]}-{ports[-1]}"
        if self.kind == "addresses":
            return ",".join(split_addresses(text, where))
        if not text or (self.kind == "token" and not is_token(text)):
            raise self._bad(where, text)
        return text

    def check(self, value: Any, source: str | None = None) -> Any:
        """`value` of an explicit argument, checked like the text of the variable."""
        where = source or self.name
        if isinstance(value, str):
            return self.parse(value, where)
        if self.kind == "int" and isinstance(value, int) and not isinstance(value, bool):
            return self._in_range(value, value, where)
        if self.kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
            return self._in_range(float(value), value, where)
        if self.kind == "bool" and isinstance(value, bool):
            return value
        if self.kind == "list" and isinstance(value, list | tuple) and value:
            return self.parse(",".join(str(item) for item in value), where)
        raise self._bad(where, value)

    def from_option(self, value: Any, source: str) -> str:
        """The variable's text for the `value` of a flag or key; ValueError with a sentence that names `source`."""
        row, scale = self, self.flag_scale
        if scale != 1:
            limits = {name: getattr(self, name) // scale for name in ("minimum", "maximum", "default")}
            row = dataclasses.replace(self, unit=self.flag_unit, **limits)
        try:
            checked = row.check(value, source)
        except ValueError as error:
            if self.kind in ("int", "float") and str(value).strip().startswith("-"):
                sentence = f"{source} must be >= 0, not {value}."
                raise ValueError(coded(SettingCode.INVALID_SETTING, sentence)) from error
            raise
        return environment_text(checked * scale if scale != 1 else checked)

    def unheeded(self, value: Any) -> str:
        """The sentence that a checked `value` has no effect; "" where it has one, or asks for nothing special."""
        why = self.no_effect or (self.idle_choices.get(value, "") if self.idle_choices else "")
        if not why or value is None or value is False or value == self.default:
            return ""
        flag = f" ({self.flag})" if self.flag else ""
        return f"{self.env}={environment_text(value)}{flag} has no effect: {why}."

    def meaning(self) -> str:
        """What --help and the documentation say of it."""
        if self.no_effect:
            return f"no effect: {self.no_effect}"
        return f"{self.help}. Must be the same on all ranks" if self.agreed else self.help

    def metavar(self) -> str:
        """What stands for the value of its option in --help."""
        if self.kind == "choice":
            return "{" + ",".join(self.choices) + "}"
        if unit := self.flag_unit or self.unit:
            return unit.upper()
        if self.name.endswith(("_file", "_library", "_log")) or self.name == "timeline":
            return "FILE"
        return _METAVARS.get(self.kind) or self.env.split("_")[-1]

    def option_meaning(self) -> str:
        """The help text of this setting's option: its meaning, and its default if a value has an effect."""
        if self.no_effect or self.default in (None, (), False):
            return self.meaning()
        value = self.default // self.flag_scale if self.flag_scale != 1 else self.default
        shown = "on" if value is True else f"{value:g}" if isinstance(value, float) else value
        unit = self.flag_unit or self.unit
        return f"{self.meaning()} (default: {shown} {unit})" if unit else f"{self.meaning()} (default: {shown})"

    def expected(self) -> str:
        """What a value must be, to end a sentence with: "an integer >= 1 (bytes)"."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        words = {
            "int": "an integer",
            "float": "a number",
            "bool": "1 or 0 (also true/false, yes/no, on/off)",
            "text": "a text that is not empty",
            "list": "names separated by commas",
            "address": "host:port, or :port for 127.0.0.1, for example 127.0.0.1:9400",
            "addresses": "host:port, for example 127.0.0.1:29400, or several separated by commas",
            "ports": "the first and the last port, from 1 to 65535, for example 29500-29599",
            "token": f"one line of ASCII text without spaces, {MAX_TOKEN_LENGTH} characters at most",
        }[self.kind]
        if self.minimum is not None and self.maximum is not None:
            words += f" from {_plain(self.minimum)} to {_plain(self.maximum)}"
        elif self.minimum is not None:
            words += f" >= {_plain(self.minimum)}"
        if self.multiple != 1:
            words += f", a multiple of {self.multiple}"
        return f"{words} ({self.unit})" if self.unit else words

    def _in_range(self, value: float, given: object, where: str) -> float:
        low = self.minimum is not None and value < self.minimum
        high = self.maximum is not None and value > self.maximum
        if low or high or not math.isfinite(value) or (self.multiple != 1 and value % self.multiple):
            raise self._bad(where, given)
        return value

    def _bad(self, where: str, value: object) -> ValueError:
        shown = "" if self.secret else f"={value!r}"
        default = "" if self.default in (None, ()) else f"; leave it out for {environment_text(self.default)}"
        sentence = f"{where}{shown} is not usable: expected {self.expected()}{default}."
        return ValueError(coded(SettingCode.INVALID_SETTING, sentence))


def row(
    env: str,
    default: Any,
    help: str,  # noqa: A002
    *,
    section: str | None = None,
    flag: str | None = None,
    key: str | None = None,
    limits: tuple[float | None, float | None] = (None, None),
    **more: Any,
) -> Any:
    """A field of a dataclass that `rows` makes a Setting of; `more` are other fields of Setting.

    section: of the configuration file; a setting in one also has a flag. Flag and key are made of the variable's name,
    unless they are given: HOROVOD_SPIN_US in the section params has --spin-us and params.spin_us.
    limits: smallest and greatest number.
    """
    minimum, maximum = limits
    values = {"env": env, "default": default, "help": help, "minimum": minimum, "maximum": maximum, **more}
    if section is not None:
        flag = flag or "--" + env.removeprefix("HOROVOD_").lower().replace("_", "-")
        key = key or flag.removeprefix("--").replace("-", "_").removeprefix(f"{section}_")
        values |= {"flag": flag, "yaml": f"{section}.{key}"}
    return dataclasses.field(default=default, metadata=values)


def rows(table: type) -> tuple[Setting, ...]:
    """The settings that the fields of the dataclass `table` are, in their order; the kind follows from the type."""
    found = []
    for field in dataclasses.fields(table):
        kind = "choice" if field.metadata.get("choices") else _KINDS[str(field.type).removesuffix(" | None")]
        found.append(Setting(name=field.name, **{"kind": kind, **field.metadata}))
    return tuple(found)


def environment_text(value: Any) -> str:
    """How a checked value is written in an environment variable."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)


def _plain(number: float) -> str:
    """Without the exponent that :g would write."""
    return str(int(number)) if number == int(number) else str(number)


def split_ports(text: str) -> range | None:
    """The ports of "29500-29599", or of one port; None when these are none."""
    first, dash, last = (part.strip() for part in text.partition("-"))
    last = last if dash else first
    if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        return None
    ports = range(int(first), int(last) + 1)
    return ports if ports and ports[0] > 0 and ports[-1] < 65536 else None


def on_loopback(address: str) -> str:
    """ "127.0.0.1:9400" of ":9400", and any other text as it is."""
    return f"127.0.0.1{address}" if address.startswith(":") and address[1:].isdigit() else address


def split_addresses(text: str, source: str) -> list[str]:
    """["a:29400", "b:29400"] of "a:29400, b:29400"; ValueError naming `source` when one is none."""
    addresses = [one.strip() for one in text.split(",")]
    for one in addresses:
        split_address(one, source)
    return list(dict.fromkeys(addresses))


def split_address(text: str, source: str) -> tuple[str, int]:
    """("host", 29400) of "host:29400" or "[::1]:29400"; ValueError naming `source` otherwise."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(
            coded(
                SettingCode.INVALID_SETTING,
                f"{source}={text!r} is not usable: write an IPv6 address in brackets, for example [::1]:29400.",
            )
        )
    usable = colon and host and not any(c.isspace() or c in "/@,[]" for c in host)
    if not usable or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            coded(
                SettingCode.INVALID_SETTING,
                f"{source}={text!r} is not usable: expected host:port with a port from 1 to 65535, "
                "for example 127.0.0.1:29400.",
            )
        )
    if wrong := wrong_host_name(host):
        raise ValueError(coded(SettingCode.INVALID_SETTING, f"{source}={text!r} names no host: {wrong}."))
    return host, int(port)


# -- what rows of several families have in common ----------------------------------------------------------------------

# Largest world that a coordinator accepts (horovod.coordinator.core.world.checks; a test compares the two).
MAX_SIZE = 1 << 16

PATIENCE: dict[str, Any] = {"unit": "seconds", "limits": (0.001, 10_000_000)}
PLACE: dict[str, Any] = {"limits": (0, MAX_SIZE - 1), "launcher": True}
COUNT: dict[str, Any] = {"limits": (1, MAX_SIZE)}

# Why settings of earlier versions are accepted and change nothing; completes "HOROVOD_... has no effect: ...".
NO_MPI = "this version of Horovod has no MPI"
NO_CCL = "this version of Horovod has no oneCCL"
