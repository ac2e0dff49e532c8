"""ElasticSampler: how an epoch is dealt out, and what is left of it in the next world."""

from __future__ import annotations

import random
from typing import Any

import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import TrainingCode
from horovod.torch.elastic import ElasticSampler
from horovod.torch.elastic import sampler as sampler_module


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the rank and the size that a sampler sees: the formulas do not need processes."""

    def put(rank: int, size: int) -> None:
        monkeypatch.setattr(sampler_module, "rank", lambda: rank)
        monkeypatch.setattr(sampler_module, "size", lambda: size)

    return put


@pytest.mark.parametrize(
    ("rank", "first", "rest"), [(0, [0, 3, 6, 9], [6, 9]), (1, [1, 4, 7, 0], [7, 6]), (2, [2, 5, 8, 1], [8, 7])]
)
def test_ten_items_on_three_ranks(place: Any, rank: int, first: list[int], rest: list[int]) -> None:
    place(rank, 3)
    sampler = ElasticSampler(range(10), shuffle=False)
    assert list(sampler) == first
    assert (len(sampler), sampler.num_samples, sampler.total_size) == (4, 4, 12)
    sampler.record_batch(0, 2)
    assert sampler.processed_num == 6
    assert list(sampler) == first, "what is under way is not dealt out again before reset()"
    sampler.reset()
    assert list(sampler) == rest
    assert (len(sampler), sampler.total_size, sampler.remaining_indices) == (2, 6, [6, 7, 8, 9])
    assert (sampler.epoch, sampler.num_replicas, sampler.rank, sampler.processed_indices) == (0, 3, rank, set())


def test_the_order_of_an_epoch(place: Any) -> None:
    place(0, 1)
    sampler = ElasticSampler(range(20), seed=5)
    orders = []
    for epoch in (0, 3):
        expected = list(range(20))
        random.Random(5 + epoch).shuffle(expected)
        sampler.set_epoch(epoch)
        assert list(sampler) == expected
        orders.append(expected)
    assert orders[0] != orders[1]


def test_set_epoch_clears_the_progress(place: Any) -> None:
    place(1, 2)
    sampler = ElasticSampler(range(6), shuffle=False)
    sampler.record_batch(0, 2)
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "processed_num": 0}
    assert list(sampler) == [1, 3, 5]


def test_progress_goes_over_to_a_world_of_another_size(place: Any) -> None:
    place(1, 2)
    sampler = ElasticSampler(range(12))
    sampler.set_epoch(4)
    sampler.record_batch(0, 3)
    progress = sampler.state_dict()
    assert progress == {"epoch": 4, "processed_num": 6}

    order = list(range(12))
    random.Random(4).shuffle(order)
    dealt = []
    for rank in range(3):
        place(rank, 3)
        other = ElasticSampler(range(12))
        other.load_state_dict(progress)
        assert other.state_dict() == progress
        dealt.append(list(other))
    assert sorted(index for one in dealt for index in one) == sorted(order[6:])


@pytest.mark.parametrize("processed", [0, 9, 10, 12])
def test_fewer_left_than_ranks(place: Any, processed: int) -> None:
    dealt = []
    for rank in range(4):
        place(rank, 4)
        sampler = ElasticSampler(range(10), shuffle=False)
        sampler.load_state_dict({"epoch": 0, "processed_num": processed})
        dealt.append(list(sampler))
        assert len(dealt[-1]) == len(sampler)
    assert {index for one in dealt for index in one} == set(range(processed, 10))
    if processed == 9:
        assert dealt == [[9]] * 4


def test_before_init() -> None:
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_INITIALIZED)):
        ElasticSampler(range(3))


def _with_a_loader() -> list[list[int]]:
    import torch

    import horovod.torch as hvd

    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, sampler=sampler)
    return [batch.tolist() for batch in loader]


def test_a_loader_takes_it(pair: World) -> None:
    assert pair.run(_with_a_loader) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
