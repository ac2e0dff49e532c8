"""The Python of the pages on frameworks, Spark, Ray and data sets runs as it is printed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HOROVODRUN = [sys.executable, "-m", "horovod.launch", "--start-timeout", "200", "-np", "2", sys.executable]
# A fenced block of Python, and whether the line before it marks it as a fragment, which does not run by itself.
BLOCK = re.compile(r"(<!-- fragment -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = {
    "spark": "pyspark",
    "ray": "ray",
    "data": "pyarrow",
    "jax": "jax",
    "tensorflow": "tensorflow",
    "lightning": "lightning",
}
ON_RANKS = {"jax", "tensorflow", "lightning"}


def blocks_of(page: str) -> list[tuple[str, str]]:
    found = BLOCK.findall((ROOT / f"docs/{page}.md").read_text())
    assert found
    return found


@pytest.mark.parametrize("page", PAGES)
def test_fragments_are_python(page: str) -> None:
    for _, code in blocks_of(page):
        compile(code, f"docs/{page}.md", "exec")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    """In a folder that has what the page on data sets reads: Parquet files with 64 features and a label."""
    if importlib.util.find_spec(PAGES[page]) is None or (page == "spark" and shutil.which("java") is None):
        pytest.skip(f"{PAGES[page]} is not installed")
    if page == "data":
        import pyarrow as pa
        import pyarrow.parquet as pq

        (tmp_path / "train").mkdir()
        rows = {"features": [[float(row)] * 64 for row in range(512)], "label": [float(row) for row in range(512)]}
        pq.write_table(pa.table(rows), tmp_path / "train/part-0.parquet")
    script = tmp_path / "page.py"
    script.write_text("\n".join(code for fragment, code in blocks_of(page) if not fragment))
    run = HOROVODRUN if page in ON_RANKS else [sys.executable]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "SPARK_"))}
    environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "RAY_AUTH_MODE": "disabled"}
    # A Java that is there for seconds only spends more time on compiling its code well than it saves by that.
    environ |= {"JAX_PLATFORMS": "cpu", "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}
    command = [*run, str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
