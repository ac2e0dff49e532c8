"""Names for hosts that a scheduler knows by ids, since several containers may have one name. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_SHORTEST = 4  # digits of the id behind the name


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
