"""Whatever hosts and jobs do, each process that should run does, no other one, and every job comes to its end."""

import pytest
import tiers
from cluster_chaos import ClusterChaos


@pytest.mark.longer
@pytest.mark.timeout(600)
def test_whatever_hosts_and_jobs_do_the_processes_are_those_of_the_records() -> None:
    count = tiers.pick(60, 2_000)
    starts = sum(ClusterChaos(seed).play() for seed in range(count))
    assert starts > 3 * count
