"""Which tests belong to the tier that runs; see tiers.py."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import hung_tests
import pytest
import tiers
from hypothesis import settings

FOLDER = Path(__file__).parent / "extended"
# Of a test that takes half a minute on a quiet machine, and ten times as long beside other work.
LONG_S = 400

settings.register_profile("tests", deadline=None)  # no test asserts on wall time
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """A shell without job control has Ctrl-C ignored in what it starts in the background, and so would all programs of
    the tests: those that are interrupted would go on.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hung_tests.register(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the extended tier, of the tests outside of tests/extended those that do more there than in the short one."""
    for item in items:
        if FOLDER in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_S))
    if not tiers.EXTENDED:
        return
    chosen, others = [], []
    for item in items:
        (chosen if FOLDER in item.path.parents or _does_more(item) else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def pytest_collection_finish() -> None:
    """What has been imported by now stays, so no later collection of garbage needs to search it: tests that wait for
    something to be let go collect again and again (resources.py).
    """
    gc.collect()
    gc.freeze()


def _does_more(item: pytest.Item) -> bool:
    return item.get_closest_marker("longer") is not None or "world_keeper" in getattr(item, "fixturenames", ())
