"""Names for hosts that a scheduler knows by ids, since several containers may have one name. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_SHORTEST = 4  # digits of the id that follow the name


def host_names(nodes: Sequence[tuple[str, str]]) -> dict[str, str]:
    """A name for each id, of pairs of id and name of the host: that name where no other id has it.

    >>> host_names([("aaaa11", "gpu-1"), ("bbbb22", "gpu-2"), ("cccc33", "gpu-2")])
    {'aaaa11': 'gpu-1', 'bbbb22': 'gpu-2-bbbb', 'cccc33': 'gpu-2-cccc'}
    """
    hosts = dict(nodes)
    names = {}
    for node, host in hosts.items():
        others = [other for other, its_host in hosts.items() if its_host == host and other != node]
        length = _SHORTEST
        while any(other[:length] == node[:length] for other in others):
            length += 1
        names[node] = f"{host}-{node[:length]}" if others else host
    return names


class HostNames:
    """The same for hosts that come one after the other: each keeps the name that it has got, and no other gets it."""

    def __init__(self) -> None:
        self._hosts: dict[str, str] = {}  # id of a host -> its name, for all hosts that have come
        self._names: dict[str, str] = {}

    def given(self, nodes: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Of these, and of all that came before.

        >>> names = HostNames()
        >>> names.given([("aaaa11", "gpu-1")])
        {'aaaa11': 'gpu-1'}
        >>> names.given([("bbbb22", "gpu-1")])
        {'aaaa11': 'gpu-1', 'bbbb22': 'gpu-1-bbbb'}
        """
        self._hosts |= dict(nodes)
        for node, name in host_names(list(self._hosts.items())).items():
            self._names.setdefault(node, name)
        return self._names
