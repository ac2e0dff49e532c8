"""Which etcd to use and how to be let in, as one piece of text:

    etcd://h1:2379,h2:2379,h3:2379?ca=ca.pem&cert=me.pem&key=me.key&user=me&password_file=secret&prefix=horovod/

ca: the certificate authority's file, in PEM; with it connections are encrypted. cert, key: this process's certificate,
where etcd asks for one. user, password_file: where etcd has users. prefix: of all keys, so that clusters can share one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from horovod.base.errors import SettingCode, coded

SCHEME = "etcd"
DEFAULT_PREFIX = "horovod/"
OPTIONS = ("ca", "cert", "key", "user", "password_file", "prefix")


@dataclass(frozen=True)
class EtcdAddress:
    endpoints: Sequence[str]  # host:port
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None
    user: str | None = None
    password_file: Path | None = None  # read at each login, so that a changed password counts
    prefix: str = DEFAULT_PREFIX

    @classmethod
    def parse(cls, text: str) -> EtcdAddress:
        """Raises ValueError with a sentence, also where a file can't be read."""
        example = "etcd://h1:2379,h2:2379?ca=ca.pem"
        scheme, _, rest = text.partition("://")  # some versions of urlsplit refuse brackets behind a comma
        places, _, query = rest.partition("?")
        if scheme != SCHEME or any(one in places for one in "/@") or "#" in rest:
            raise _invalid(f"The store {text!r} is no address of etcd; expected something like {example!r}.")
        endpoints = [endpoint for endpoint in places.split(",") if endpoint]
        if not endpoints:
            raise _invalid(f"The store {text!r} names no host; expected something like {example!r}.")
        for endpoint in endpoints:
            if not _is_endpoint(endpoint):
                raise _invalid(f"The store {text!r} has {endpoint!r} where HOST:PORT is expected, like h1:2379.")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        except ValueError:
            pairs = [(query, "")]
        options = dict(pairs)
        for name, value in pairs:
            if name not in OPTIONS or not value:
                raise _invalid(
                    f"The store {text!r} has {name!r} after the '?', without a value or unknown; "
                    f"there are {', '.join(OPTIONS)}, each as name=value, with '&' between them."
                )
        for one, other in (("cert", "key"), ("key", "cert"), ("user", "password_file"), ("password_file", "user")):
            if one in options and other not in options:
                sentence = f"The store {text!r} gives {one!r} without {other!r}; each needs the other."
                raise ValueError(coded(SettingCode.MISSING_SETTING, sentence))
        if "cert" in options and "ca" not in options:
            sentence = f"The store {text!r} gives 'cert' without 'ca', the file that etcd is known by."
            raise ValueError(coded(SettingCode.MISSING_SETTING, sentence))
        password_file = Path(options["password_file"]) if "password_file" in options else None
        if password_file is not None:
            _read(password_file)
        return cls(
            endpoints=tuple(endpoints),
            ca=_read(Path(options["ca"])) if "ca" in options else None,
            cert=_read(Path(options["cert"])) if "cert" in options else None,
            key=_read(Path(options["key"])) if "key" in options else None,
            user=options.get("user"),
            password_file=password_file,
            prefix=options.get("prefix", DEFAULT_PREFIX),
        )

    def off_loopback(self) -> list[str]:
        """The endpoints that are on other hosts, as far as the text tells: a name is not looked up."""
        return [one for one in self.endpoints if not _is_loopback(urlsplit(f"//{one}").hostname or "")]

    def password(self) -> str:
        """Raises ValueError with a sentence when the file can't be read."""
        assert self.password_file is not None
        return _read(self.password_file).decode().strip()


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(f"//{text}")
        return bool(parts.hostname and parts.port) and parts.netloc == text
    except ValueError:  # a port that is no number, or brackets that do not match
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        sentence = f"{file}, which the store's address names, can't be read: {error.strerror}."
        raise ValueError(coded(SettingCode.UNUSABLE_FILE, sentence)) from None


def _invalid(sentence: str) -> ValueError:
    return ValueError(coded(SettingCode.INVALID_SETTING, sentence))
