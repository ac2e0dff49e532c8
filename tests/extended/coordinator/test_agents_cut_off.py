"""A cluster that none of its parts can stop: jobs on two agents end well whatever happens to who serves the agents.

Each part has a network namespace. Limits of coordinators are short, so that each test outlasts them. The usual ones, by
which a link may be down or a process stopped for 20 s, are in docs/adr/0068-evidence-for-hosts.md.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import etcd_server
import pytest
from agent_site import HERE, HOSTS, THERE, A, AgentSite, B
from fault_training import pass_seconds
from resources import eventually

from benchmarks.namespaces import Network, NetworkError, check_possible

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

GRACE_S = 2.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        check_possible()
        with Network(HOSTS) as made:
            yield made
    except NetworkError as error:
        pytest.skip(str(error))


@pytest.fixture
def site(network: Network, tmp_path: Path) -> Iterator[AgentSite]:
    with ExitStack() as stack:
        made = AgentSite(network, tmp_path, stack, "--reattach-grace-seconds", f"{GRACE_S:g}")
        for host in (HERE, THERE):
            made.start_agent(host)
        yield made


def serves_both(site: AgentSite, leader: int) -> None:
    """That coordinator leads and has both agents, for longer than one that is away may be."""
    assert site.led_by(leader)
    assert eventually(lambda: site.listing(HERE).count(" ready ") == 2)
    pass_seconds(2 * GRACE_S)


@pytest.mark.parametrize("how", ["its link is down", "it is stopped"])
def test_a_leader_that_goes_silent(site: AgentSite, how: str) -> None:
    leader = site.leader()
    job = site.launch()
    if how == "it is stopped":
        site.replicas[leader].send_signal(signal.SIGSTOP)
    else:
        site.set_link(leader, "down")
    serves_both(site, A + B - leader)
    job.goes_on()
    if how == "it is stopped":
        site.replicas[leader].send_signal(signal.SIGCONT)
    else:
        site.set_link(leader, "up")
    job.goes_on()
    assert site.leader() == A + B - leader
    job.ends_well()


def test_a_leader_that_is_cut_off_from_the_hosts_gives_way(site: AgentSite) -> None:
    """It reaches the store and the other coordinator all the same."""
    leader = site.leader()
    job = site.launch()
    site.partitions.cut([leader], [HERE, THERE])
    serves_both(site, A + B - leader)
    job.goes_on()
    job.ends_well()
    site.launch("steady", name="another").ends_well()
    assert site.leader() == A + B - leader


def test_an_agent_that_is_killed_and_started_again(site: AgentSite) -> None:
    """Later than hosts without any sign of life are lost, and sooner than its ranks are ended."""
    job = site.launch()
    site.kill_agent(THERE)
    assert eventually(lambda: "away for" in site.listing(HERE))
    pass_seconds(2 * GRACE_S)
    assert not site.said("is failed")
    site.start_agent(THERE)
    job.ends_well()
