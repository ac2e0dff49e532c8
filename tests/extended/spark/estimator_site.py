"""What the tests of estimators share: a Spark of their own, and worlds of ranks that have imported a framework."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from worlds import Keeper


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """Two slots on this machine. A task that fails runs once more."""
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
            patch.delenv(name)
        builder = SparkSession.builder.master("local[2,2]").appName("estimators")
        settings = {
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            # A Java that is there for seconds only spends more time on compiling its code well than it saves by that.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        }
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()


class WorldBackend:
    """A backend of processes that are there already: starting them would be most of each test."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def run(
        self,
        fn: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """The results by rank; raises what the first rank raises that fails."""
        outcomes = self._keeper.get().outcomes(fn, *args, deadline_seconds=300, **(kwargs or {}))
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    def num_processes(self) -> int:
        return 2
