"""ElasticSampler: how an epoch is dealt out, and what is left of it in the next world."""

from __future__ import annotations

import logging
import random
from collections import Counter
from typing import Any

import pytest
from error_codes import ends_with
from event_words import NO_SAMPLES, tells
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from worlds import World

from horovod.base.errors import TrainingCode
from horovod.torch.elastic import ElasticSampler
from horovod.torch.elastic import sampler as sampler_module
from horovod.torch.elastic.state import SamplerStateHandler


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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    samples=some.integers(1, 60),
    shuffle=some.booleans(),
    batch=some.integers(1, 7),
    worlds=some.lists(some.tuples(some.integers(1, 4), some.integers(0, 6), some.integers(0, 2)), max_size=5),
    last=some.integers(1, 4),
)
def test_each_sample_counts_once_an_epoch(
    place: Any, samples: int, shuffle: bool, batch: int, worlds: list[tuple[int, int, int]], last: int
) -> None:
    """Worlds of any sizes, each left after some batches, of which the last ones are undone."""
    order = list(range(samples))
    if shuffle:
        random.Random(3).shuffle(order)
    kept: Counter[int] = Counter()
    progress = {"epoch": 3, "processed_num": 0}
    for size, batches, undone in [*worlds, (last, samples, 0)]:
        samplers = []
        for rank in range(size):
            place(rank, size)
            samplers.append(ElasticSampler(range(samples), shuffle))
            samplers[-1].load_state_dict(progress)
        dealt = [list(sampler) for sampler in samplers]
        assert len({len(one) for one in dealt}) == 1
        starts = range(0, len(dealt[0]), batch)[:batches]
        for start in starts[: max(len(starts) - undone, 0)]:
            for sampler, indices in zip(samplers, dealt, strict=True):
                taken = indices[start : start + batch]
                kept.update(taken)
                sampler.record_batch(0, len(taken))
        progress = samplers[0].state_dict()
        assert [sampler.state_dict() for sampler in samplers] == [progress] * size
    assert sorted(kept) == list(range(samples))
    more = [count - 1 for count in kept.values()]
    assert sum(more) == progress["processed_num"] - samples <= 3, "only those that fill the last places of the ranks"


@pytest.mark.parametrize("drops_last", [False, True])
def test_without_set_epoch_the_same_epoch_begins_anew(
    place: Any, caplog: pytest.LogCaptureFixture, drops_last: bool
) -> None:
    """Also where its last batches were dealt out by another world, which had left a part."""
    place(0, 1)
    sampler = ElasticSampler(range(10), shuffle=False)
    sampler.load_state_dict({"epoch": 0, "processed_num": 4})
    for first in (4, 0):
        indices = list(sampler)
        assert indices == list(range(first, 10))
        for start in range(0, 4 if drops_last else len(indices), 4):
            sampler.record_batch(0, len(indices[start : start + 4]))
        if drops_last and first == 0:
            sampler.record_batch(0, 4)
    assert sampler.processed_num == (16 if drops_last else 20), "only set_epoch sets it to 0"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    sampler.set_epoch(1)
    assert len(list(sampler)) == 10
    assert len(caplog.records) == 1


def _train(sampler: ElasticSampler, batches: int = 5) -> list[int]:
    """What one rank gets in this many batches of two."""
    indices = list(sampler)[: 2 * batches]
    for _ in indices[::2]:
        sampler.record_batch(0, 2)
    return indices


def test_without_set_epoch_the_progress_only_grows(place: Any, caplog: pytest.LogCaptureFixture) -> None:
    """And no pass loses samples to those before it, in whatever world it is continued."""
    place(0, 1)
    sampler = ElasticSampler(range(10), shuffle=False)
    assert _train(sampler) == list(range(10))
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 10}
    assert _train(sampler, batches=2) == [0, 1, 2, 3]
    assert (sampler.processed_num, sampler.remaining_indices) == (14, list(range(10)))
    progress = sampler.state_dict()
    dealt = []
    for rank in range(2):
        place(rank, 2)
        sampler = ElasticSampler(range(10), shuffle=False)
        sampler.load_state_dict(progress)
        assert sampler.processed_num == 14
        dealt.append(list(sampler))
    assert dealt == [[4, 6, 8], [5, 7, 9]]
    for _ in range(3):
        sampler.record_batch(0, 1)
    sampler.reset()
    assert (sampler.processed_num, list(sampler)) == (20, [1, 3, 5, 7, 9]), "the next pass, of the same samples"
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "processed_num": 0}


def test_a_pass_that_fails_after_a_commit_is_not_left_out(place: Any, caplog: pytest.LogCaptureFixture) -> None:
    place(0, 1)
    sampler = ElasticSampler(range(10), shuffle=False)
    handler = SamplerStateHandler(sampler)
    _train(sampler)
    handler.save()
    _train(sampler, batches=2)
    handler.restore()
    assert (sampler.processed_num, list(sampler)) == (10, list(range(10)))
    sampler.set_epoch(1)
    handler.save()
    _train(sampler, batches=2)
    handler.restore()
    assert (sampler.processed_num, list(sampler)) == (0, list(range(10)))


def test_a_pass_without_samples_is_told(place: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whether the script is about to call set_epoch, or has left it out, can't be seen in such a progress."""
    place(0, 1)
    sampler = ElasticSampler(range(10), shuffle=False)
    sampler.load_state_dict({"epoch": 0, "processed_num": 10})
    assert list(sampler) == []
    assert NO_SAMPLES in caplog.text
    assert list(sampler) == list(range(10))


def test_set_epoch_at_the_beginning_of_an_epoch_is_told(place: Any, caplog: pytest.LogCaptureFixture) -> None:
    place(0, 2)
    sampler = ElasticSampler(range(10))
    sampler.set_epoch(1)
    sampler.load_state_dict({"epoch": 1, "processed_num": 4})
    sampler.set_epoch(2)
    assert not caplog.records
    sampler.load_state_dict({"epoch": 2, "processed_num": 4})
    sampler.set_epoch(2)
    assert tells(caplog.text, "set_epoch(2)", "4 of the 10 samples")


def test_one_that_no_state_has_is_dealt_out_anew(
    place: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(0, 2)
    sampler = ElasticSampler(range(4), shuffle=False)
    place(0, 1)
    monkeypatch.setattr(sampler_module, "is_initialized", lambda: True)
    assert list(sampler) == [0, 1, 2, 3]
    assert "TorchState" in caplog.text


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
