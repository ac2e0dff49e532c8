"""Which resources a placement group lacks, in words. Pure: what the cluster has is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Resources = Mapping[str, float]


def missing(bundle: Resources, count: int, spread: bool, nodes: Sequence[Resources], free: Resources) -> str:
    """Completes "The resources were not there: ".

    bundle: what is needed `count` times, with `spread` on so many nodes. nodes: all that each of the cluster has. free:
    what nobody uses, in the whole cluster.
    """
    if spread:
        large = sum(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes)
        if large < count:
            return (
                f"the job needs {count} nodes with {in_words(bundle)} each, and {large} of the cluster's {len(nodes)} "
                f"{'has' if large == 1 else 'have'} that"
            )
    needed = {name: amount * count for name, amount in bundle.items()}
    total = {name: sum(node.get(name, 0) for node in nodes) for name in needed}
    if short := {name: needed[name] - total[name] for name in needed if needed[name] > total[name]}:
        return f"the job needs {in_words(needed)}, and the cluster has {in_words(total)}: {in_words(short)} missing"
    there = {name: free.get(name, 0) for name in needed}
    if short := {name: needed[name] - there[name] for name in needed if needed[name] > there[name]}:
        there_now, used = in_words(there), in_words(short)
        return f"the job needs {in_words(needed)}, and the cluster has {there_now} free: others use {used} of that"
    return f"the job needs {in_words(needed)}, as {count} x {in_words(bundle)}, and no placement on the nodes has that"


def in_words(resources: Resources) -> str:
    """As "2 CPU and 1 GPU"."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
