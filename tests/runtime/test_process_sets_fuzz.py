"""Whatever another rank says about process sets: all ranks get its answer or one sentence, and no set half made."""

from __future__ import annotations

import ctypes
import json
import struct
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from horovod._core import OpSpec
from horovod.base.errors import WorldCode, code_of
from horovod.base.settings import resolve
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.process_sets import ProcessSets, read_answers
from horovod.worker.runtime.world import Member, World

FUZZ = settings(deadline=None, max_examples=300, derandomize=True, print_blob=True)
ADDS = ("do", "sets", "offers", "trouble")

ANY_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 5), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
ENDPOINT = st.tuples(
    st.sampled_from(["127.0.0.1", "::1", "name", "", "\0"]), st.integers(-1, 2**17), st.just("lo")
).map(list)
OFFER = st.one_of(st.just({}), st.fixed_dictionaries({"segment": st.text(max_size=9)}), st.just({"endpoints": []}))
FIELDS = {
    "do": st.sampled_from(["adds", "removes"]),
    "sets": st.sampled_from([[[0], [1, 2]], [[0]], []]),
    "offers": st.lists(
        st.one_of(OFFER, st.fixed_dictionaries({"endpoints": st.lists(ENDPOINT, max_size=2)})), max_size=3
    ),
    "trouble": st.sampled_from(["", "No more of that."]),
    "pending": st.integers(0, 2),
}
# Of the right kind, but for a field that is missing or is anything.
ANSWER = st.builds(
    lambda good, name, bad, how: {
        **{k: v for k, v in good.items() if k != name or how < 2},
        **({name: bad} if how == 1 else {}),
    },
    st.fixed_dictionaries(FIELDS),
    st.sampled_from(sorted(FIELDS)),
    ANY_JSON,
    st.integers(0, 2),
)
# As rank 0 below, but for what it offers.
AGREEING = st.builds(
    lambda offers: {"do": "adds", "sets": [[0], [1, 2]], "offers": offers, "trouble": ""}, FIELDS["offers"]
)


def framed(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


SAID = st.one_of(
    st.binary(max_size=40),
    st.one_of(ANSWER, AGREEING).map(lambda answer: framed(json.dumps(answer).encode())),
    st.builds(framed, st.binary(max_size=20), st.one_of(st.none(), st.integers(0, 40), st.just(2**64 - 1))),
    st.just(framed(b"[" * 100_000)),
)


@FUZZ
@given(everything=st.lists(SAID, max_size=4).map(b"".join))
def test_answers_are_read_or_refused(everything: bytes) -> None:
    try:
        answers = read_answers(memoryview(everything), 3, ADDS)
    except StartError as error:
        assert code_of(error) is WorldCode.OTHER_VERSION  # noqa: PT017  (both ends are good)
        return
    assert len(answers) == 3
    for answer in answers:
        assert answer["do"] == "removes" or set(ADDS) <= answer.keys()
        for name, kind in {"do": str, "sets": list, "offers": list, "trouble": str, "pending": int}.items():
            assert isinstance(answer.get(name, kind()), kind)


class OtherRanksSay:
    """The engine's face towards process sets on rank 0 of three, where the others say anything."""

    def __init__(self, said: list[bytes]) -> None:
        self._said = said
        self.sets: set[int] = set()

    def run(self, spec: OpSpec, name: str, tensors: list[tuple[Any, ...]], keep: bytearray) -> list[bytes]:
        address, _, _, shape = tensors[0]
        mine = ctypes.string_at(address, shape[0])
        assert mine == bytes(keep)
        others = self._said.pop(0) if self._said else mine * 2
        return [mine + others]

    def add_process_set(self, number: int, ranks: list[int], **_: object) -> None:
        self.sets.add(number)

    def remove_process_set(self, number: int) -> None:
        self.sets.discard(number)

    def pending(self, number: int) -> int:
        return 0


@FUZZ
@given(said=st.lists(st.tuples(SAID, SAID).map(b"".join), min_size=1, max_size=3), removes=st.booleans())
def test_a_set_is_added_or_not(said: list[bytes], removes: bool) -> None:
    engine = OtherRanksSay([])
    members = tuple(
        Member(rank, 0, 1, rank, 3, member_id="", host=f"node-{rank}", shared_memory_domain="", pid=1)
        for rank in range(3)
    )
    world = World("job", 1, 0, members)
    sets = ProcessSets(resolve({}, {}), world, cast("Any", engine), negotiator=None)
    if removes:
        assert sets.add([[0]]) == [1]
    engine._said = said
    before = set(engine.sets)
    try:
        if removes:
            sets.remove(1)
        else:
            assert sets.add([[0], [1, 2]]) == [1, 2]
    except ValueError as error:
        assert code_of(error) is not None  # noqa: PT017  (both ends are good)
        assert engine.sets == before
    else:
        assert len(engine.sets) == (0 if removes else 2)
        assert sets.number(1, [0]) is not None or removes
