"""Whatever happens to an elastic training of real processes, every sample counts once, and the weights are those of one
process that takes the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import etcd_server
import pytest
from chaos_site import ChaosSite
from real_chaos import FORMING_POINTS, SERVING, Chaos, Event

from benchmarks.namespaces import NetworkError, check_possible

pytestmark = [
    pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing()),
    pytest.mark.timeout(600),  # Chaos fails before, with its story
]

SEEDS = 46


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosSite]:
    with ExitStack() as stack:
        try:
            check_possible()
            made = ChaosSite(tmp_path_factory.mktemp("chaos"), stack)
        except NetworkError as error:
            pytest.skip(str(error))
        yield made


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_or_repeated(site: ChaosSite, seed: int) -> None:
    play(Chaos.of(site, seed))


@pytest.mark.parametrize("point", FORMING_POINTS)
@pytest.mark.parametrize("cause", ["kill", "kill rank 0", "newcomer"])
def test_another_coordinator_takes_over_while_the_next_world_forms(site: ChaosSite, cause: str, point: str) -> None:
    """Between what makes the ranks leave their world and the first step in the next one; and then the same again."""
    events = [
        Event(cause, "backward", 4),
        Event(SERVING, point, 4),
        Event(cause, "saved", 12),
        Event(SERVING, point, 12),
    ]
    play(Chaos(site, f"takeover-{cause.replace(' ', '-')}-{point}", 3, 1, events))


def play(chaos: Chaos) -> None:
    steps = chaos.play()
    print(*chaos.story, f"{steps} steps", sep="\n")
