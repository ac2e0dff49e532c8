"""One row of the table of settings (settings.py): how it is written there, and how its text is read and checked."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["int", "float", "bool", "text", "list", "choice", "address", "token"]

MAX_TOKEN_LENGTH = 4096  # gRPC refuses headers above 8 KiB

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Setting:
    """One row of the table. `flag` and `yaml` are None where `horovodrun` has no such option."""

    name: str  # attribute of Settings; the unit is its last word
    env: str
    flag: str | None  # "--fusion-threshold-mb"
    yaml: str | None  # "params.fusion_threshold_mb": section and key
    kind: Kind
    unit: str | None  # of the environment variable
    default: Any
    help: str
    choices: tuple[str, ...] = ()  # lower case; kind "choice"
    minimum: float | None = None
    maximum: float | None = None
    flag_scale: int = 1  # environment value = flag or YAML value * flag_scale (MB on the command line, bytes beyond)
    yaml_inverted: bool = False  # the YAML key says "enabled" where the variable says "disable"
    secret: bool = False  # the value appears in no message
    launcher: bool = False  # set by launchers for each process, never by a person
    no_effect: str = ""  # why nothing acts on a value that is checked and accepted, to end a sentence with; "": it acts

    def parse(self, text: str, source: str | None = None) -> Any:
        """The value of `text`; ValueError with a sentence that names `source` (default: the variable)."""
        where = source or self.env
        text = text.strip()
        if self.kind == "int":
            try:
                return self._in_range(int(text), text, where)
            except ValueError as error:
                raise self._bad(where, text) from error
        if self.kind == "float":
            try:
                return self._in_range(float(text), text, where)
            except ValueError as error:
                raise self._bad(where, text) from error
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
            if text.lower() not in self.choices:
                raise self._bad(where, text)
            return text.lower()
        if self.kind == "address":
            split_address(text, where)
            return text
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

    def unheeded(self, value: Any) -> str:
        """The sentence that a checked `value` has no effect; "" where it has one, or asks for nothing special."""
        if not self.no_effect or value is None or value is False or value == self.default:
            return ""
        flag = f" ({self.flag})" if self.flag else ""
        return f"{self.env}={environment_text(value)}{flag} has no effect: {self.no_effect}."

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
            "address": "host:port, for example 127.0.0.1:29400",
            "token": f"one line of ASCII text without spaces, {MAX_TOKEN_LENGTH} characters at most",
        }[self.kind]
        if self.minimum is not None and self.maximum is not None:
            words += f" from {self.minimum:g} to {self.maximum:g}"
        elif self.minimum is not None:
            words += f" >= {self.minimum:g}"
        return f"{words} ({self.unit})" if self.unit else words

    def _in_range(self, value: float, given: object, where: str) -> float:
        low = self.minimum is not None and value < self.minimum
        high = self.maximum is not None and value > self.maximum
        if low or high or not math.isfinite(value):
            raise self._bad(where, given)
        return value

    def _bad(self, where: str, value: object) -> ValueError:
        shown = "" if self.secret else f"={value!r}"
        return ValueError(f"{where}{shown} is not usable: expected {self.expected()}.")


def row(
    env: str,
    kind: Kind,
    default: Any,
    help: str,  # noqa: A002
    *,
    flag: str | None = None,
    yaml: str | None = None,
    unit: str | None = None,
    **more: Any,
) -> Any:
    """A field of a dataclass that `rows` makes a Setting of; `more` are those of Setting that have a default."""
    values = {"env": env, "flag": flag, "yaml": yaml, "kind": kind, "unit": unit, "default": default, "help": help}
    return dataclasses.field(default=default, metadata={"row": {**values, **more}})


def rows(table: type) -> tuple[Setting, ...]:
    """The settings that the fields of the dataclass `table` are, in their order."""
    return tuple(Setting(name=field.name, **field.metadata["row"]) for field in dataclasses.fields(table))


def is_token(text: str) -> bool:
    """Whether an HTTP header can carry `text`: one line of ASCII text without spaces."""
    return 0 < len(text) <= MAX_TOKEN_LENGTH and all("!" <= character <= "~" for character in text)


def environment_text(value: Any) -> str:
    """How a checked value is written in an environment variable."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)


def split_address(text: str, source: str) -> tuple[str, int]:
    """("host", 29400) of "host:29400" or "[::1]:29400"; ValueError naming `source` otherwise."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(
            f"{source}={text!r} is not usable: write an IPv6 address in brackets, for example [::1]:29400."
        )
    usable = colon and host and not any(c.isspace() or c in "/@,[]" for c in host)
    if not usable or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{source}={text!r} is not usable: expected host:port with a port from 1 to 65535, "
            "for example 127.0.0.1:29400."
        )
    return host, int(port)
