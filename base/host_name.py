"""What a host may be called. Pure: nothing is resolved here."""

from __future__ import annotations

_LABEL_CHARACTERS = 63  # RFC 1035, section 2.3.4
_NAME_CHARACTERS = 253  # the same, without the length bytes of the wire


def wrong_host_name(name: str) -> str:
    """Why no host can have this name, as a part of a sentence; "" if one can. Numeric addresses pass.

    Python's resolver raises UnicodeError for such names, with a text about a codec.
    """
    if not name.isascii():
        return "it has characters other than ASCII (an internationalised name is written as xn--...)"
    labels = name.removesuffix(".").split(".")
    if not all(labels):
        return "a part of it, between dots, is empty"
    if (longest := max(map(len, labels))) > _LABEL_CHARACTERS:
        return f"a part of it has {longest} characters, and at most {_LABEL_CHARACTERS} are allowed between two dots"
    if len(name) > _NAME_CHARACTERS:
        return f"it has {len(name)} characters, and at most {_NAME_CHARACTERS} are allowed"
    return ""
