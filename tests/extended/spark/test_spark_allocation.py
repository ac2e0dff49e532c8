"""A cluster that gives executors on demand (dynamic allocation), and whose Python comes with the job, in an archive.

It is `local-cluster[2,1,1024]`, which has executors as processes of their own.
"""

from __future__ import annotations

import shutil
import site
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import spark_ranks
from error_codes import ends_with

import horovod.spark
from horovod.base.errors import LaunchCode

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def spark(made_context: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One executor at first, and at most two."""
    import pyspark

    folder = tmp_path_factory.mktemp("spark")
    (home := folder / "home").mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":  # Spark makes the folders of executors there
            (home / entry.name).symlink_to(entry)
    venv.create(folder / "env", with_pip=False)
    packages = next((folder / "env").glob("lib/python*/site-packages"))
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (packages / "packages_of_the_test.pth").write_text("".join(lines))
    settings = {
        "spark.archives": f"{shutil.make_archive(str(folder / 'env'), 'gztar', folder / 'env')}#env",
        "spark.executor.memory": "450m",
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.initialExecutors": "1",
        "spark.dynamicAllocation.maxExecutors": "2",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(home))
        context = made_context("local-cluster[2,1,1024]", settings)
        patch.setattr(context, "pythonExec", "./env/bin/python")  # as spark-submit --conf spark.pyspark.python does
        yield context


def test_an_elastic_job_grows() -> None:
    """Its second task makes Spark ask for another executor."""
    found = horovod.spark.run_elastic(spark_ranks.grow, (2,), num_proc=1, max_num_proc=2)
    assert [one["sizes"] for one in found] == [[1, 2], [2]]


def test_a_job_of_fixed_size() -> None:
    """There are no barrier stages here."""
    found = horovod.spark.run(spark_ranks.place, num_proc=2)
    assert [(one["rank"], one["local"], one["sum"]) for one in found] == [(0, (0, 2), 1.0), (1, (1, 2), 1.0)]
    assert all(one["python"].startswith(one["folder"]) for one in found)


def test_tasks_that_wait_in_vain(spark: Any) -> None:
    """Of executors that come on demand there are two, and never a third, so nothing is waited for."""
    with pytest.raises(Exception, match=ends_with(LaunchCode.TOO_FEW_RESOURCES, "for 3 tasks", "2 slots")) as raised:
        horovod.spark.run(None, num_proc=3)
    assert str(raised.value).startswith("Timed out waiting for Spark tasks to start.")
