"""What a launcher says when no coordinator of its list answers."""

from __future__ import annotations

import asyncio

import pytest

from horovod.protos.v1 import jobs_pb2
from horovod.runner.cluster_client import Access, ClusterClient, ClusterError


def test_a_submission_without_an_answer_may_have_been_taken() -> None:
    async def submit() -> None:
        async with ClusterClient(Access(["127.0.0.1:1", "127.0.0.1:2"]), patience_s=0.0) as cluster:
            with pytest.raises(ClusterError) as caught:
                await cluster.submit(jobs_pb2.JobSpec(command=["true"], processes=1))
            text = str(caught.value)
            assert text.startswith("The coordinator at 127.0.0.1:1, 127.0.0.1:2 did not answer: ")
            assert text.endswith(" The job may have been taken: `horovodrun ps` will show it.")
            with pytest.raises(ClusterError) as caught:
                await cluster.listing()
            assert "may have been taken" not in str(caught.value)

    asyncio.run(submit())
