"""The alert rules of deploy/monitoring: their metrics are ours, each is in the runbook, and promtool runs them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from horovod.coordinator.metrics import CoordinatorMetrics
from horovod.coordinator.store import base

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "monitoring" / "horovod.rules.yaml"
TESTS = RULES.with_name("horovod.rules.test.yaml")
FAMILIES = {one.name: one for one in CoordinatorMetrics(lambda: ()).registry}
SUFFIXES = ("", "_bucket", "_sum", "_count")
BY_PROMETHEUS = {"job", "instance", "exported_job", "le"}  # our label `job` is renamed when it is scraped


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*words: str, folder: Path = RULES.parent) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool here: install the package prometheus of Debian")
    return subprocess.run([found, *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def family_of(name: str) -> str:
    (found,) = {family for family in FAMILIES for suffix in SUFFIXES if name == family + suffix}
    assert (FAMILIES[found].kind == "histogram") == (name != found), name
    return found


@pytest.mark.parametrize("source", [RULES, TESTS], ids=lambda path: path.name)
def test_metrics_and_their_labels_are_ours(source: Path) -> None:
    used = re.findall(r"\b(horovod_\w+)(\{[^}]*\})?", source.read_text())
    assert len(used) > 10
    for name, selector in used:
        labels = set(re.findall(r"(\w+)=", selector))
        assert labels <= {*FAMILIES[family_of(name)].labels, *BY_PROMETHEUS}, (name, selector)


def test_results_of_the_store_are_names_of_its_errors() -> None:
    (named,) = re.findall(r'result=~"([^"]+)"', RULES.read_text())
    for name in named.split("|"):
        assert issubclass(getattr(base, name), base.StoreError)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_each_alert_is_in_the_runbook(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor == rule["alert"].lower()
    assert rule["alert"] in headings
    assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_each_alert_fires_in_a_test() -> None:
    fired = re.findall(r'alertname="(\w+)"', TESTS.read_text())
    assert sorted(set(fired)) == sorted(rule["alert"] for rule in rules())


def test_promtool_takes_the_scrape_job() -> None:
    checked = promtool("check", "config", "--syntax-only", "prometheus.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_promtool_takes_the_rules_and_each_fires_when_it_should(tmp_path: Path) -> None:
    checked = promtool("check", "rules", RULES.name)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", TESTS.name)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    (tmp_path / RULES.name).write_text(RULES.read_text().replace('state="away"}) > 0', 'state="away"}) > 9'))
    (tmp_path / TESTS.name).write_text(TESTS.read_text())
    failed = promtool("test", "rules", TESTS.name, folder=tmp_path)
    assert failed.returncode != 0
    assert "HorovodMembersAway" in failed.stdout + failed.stderr
