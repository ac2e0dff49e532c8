"""Coordinators that end, or are replaced without noticing, at any point of a job: it goes on as if there was one.

What must hold is asserted in takeover_model.py where it happens: epochs never go back, no epoch has two worlds, no id
two meanings, nobody is lost without cause; and in the end every member has done all of its script.
"""

import asyncio
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from takeover_model import Model, Step, settle
from tiers import pick

from horovod.coordinator.core.agreement import negotiation
from horovod.coordinator.services import hub

SIZES = st.integers(2, 4)
NAMES = [f"allreduce.{letter}" for letter in "abcdefgh"]


@st.composite
def scripts(draw: st.DrawFn, size: int) -> tuple[list[list[Step]], list[list[int]]]:
    script, data, number = [], [], 1
    for _ in range(draw(st.integers(1, 3))):
        steps: list[Step] = []
        if draw(st.booleans()):
            steps.append(Step(number, adds=True))
            steps += [Step(number, name) for name in draw(st.lists(st.sampled_from(NAMES), max_size=3))]
            steps.append(Step(number))
            number += 1
        first = len(steps)
        steps += [
            Step(0, name, shape)
            for name, shape in draw(
                st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 2)), min_size=1, max_size=8)
            )
        ]
        script.append(steps)
        data.append([draw(st.integers(first, len(steps))) for _ in range(size)])
    return script, data


FAULTS = ("kill", "silence", "break", "lose", "notice")
ACTIONS = ("work", "send", "step", "step", "deliver", "deliver", "go on")


@pytest.mark.longer
@pytest.mark.timeout(600)
@settings(
    deadline=None,
    max_examples=pick(60, 2000),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # a smaller seed is no simpler case
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(st.data(), st.integers(0, 1 << 30), st.sampled_from([0.005, 0.02, 0.1]), st.sampled_from([negotiation.STEP, 1]))
def test_whatever_happens_to_coordinators_the_job_is_done(
    data: st.DataObject, seed: int, faults: float, step: int
) -> None:
    """faults: how many of the moves are some. step: operations of a message that are taken in at a time."""
    size = data.draw(SIZES)
    script, counts = data.draw(scripts(size))
    model = Model(size, script, counts, ids=data.draw(st.integers(5, 9)))
    with pytest.MonkeyPatch.context() as patch:
        for module in (negotiation, hub):
            patch.setattr(module, "STEP", step)
        asyncio.run(play(model, random.Random(seed), faults))


async def play(model: Model, dice: random.Random, faults: float) -> None:
    model.begin(coordinators=2)
    if dice.random() < 0.7:
        for _ in range(3):
            await model.round()
    for _ in range(dice.choice((100, 400, 1000))):
        member = dice.choice(model.members)
        coordinator = dice.randrange(2)
        match dice.choice(FAULTS if dice.random() < faults else ACTIONS):
            case "go on" if member.events is None:
                await member.connect(coordinator)
            case "go on" if member.attached and member.decisions is None:
                member.negotiate()
            case "go on":
                member.answer()
                while member.work():
                    pass
            case "work":
                member.work()
            case "send":
                member.send()
            case "step":
                member.step()
            case "deliver":
                await member.deliver()
            case "kill":
                await model.kill(coordinator)
            case "silence":
                model.silence(coordinator)
            case "notice":
                await model.notice(coordinator)
            case "break":
                member.lose_streams()
            case "lose":
                member.send(lost=True)
        model.run_all()
        await settle()
    await model.finish()
    for member in model.members:
        assert member.lasts == model.members[0].lasts, "members disagree on who joined last"
