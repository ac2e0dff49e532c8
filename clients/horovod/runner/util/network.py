"""The address of the launcher's host, which scripts of earlier releases ask for or replace in their tests."""

from __future__ import annotations

from collections.abc import Iterable

from horovod.worker.runtime.host import choose_interfaces, interfaces


def get_driver_ip(nics: Iterable[str] | None = None) -> str:
    """The address at which other hosts reach this one, over one of these interfaces if any are named.

    Raises ValueError: no such interface.
    """
    chosen = choose_interfaces(interfaces(), list(nics)) if nics else choose_interfaces(interfaces())
    return chosen[0].addresses[0]
