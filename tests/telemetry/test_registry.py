"""The registry, and what Prometheus reads of it."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from metrics_page import markdown

from horovod.base.telemetry import Registry
from horovod.base.telemetry import metrics as metrics_module
from horovod.base.telemetry.logs import JsonFormatter, about
from horovod.base.telemetry.metrics import text_of


def test_counters_and_gauges_as_text() -> None:
    registry = Registry()
    plans = registry.counter("plans_total", "Operations that\nhave an id", ("job",))
    registry.gauge("worlds", "Worlds", lambda: {(): 2})
    registry.counter("never_total", "Not yet")
    plans.add(3, "digits")
    plans.add(1, 'a"b\\c\nd')
    plans.add(2.5, "digits")
    assert text_of(registry).splitlines() == [
        r"# HELP plans_total Operations that\nhave an id",
        "# TYPE plans_total counter",
        'plans_total{job="digits"} 5.5',
        r'plans_total{job="a\"b\\c\nd"} 1',
        "# HELP worlds Worlds",
        "# TYPE worlds gauge",
        "worlds 2",
        "# HELP never_total Not yet",
        "# TYPE never_total counter",
        "never_total 0",
    ]


def test_a_histogram_counts_up_to_each_bound() -> None:
    registry = Registry()
    seconds = registry.histogram("store_seconds", "Calls", ("operation",), bounds=(0.5, 0.25, 1))
    for value in (0.25, 0.3, 7):
        seconds.observe(value, "get")
    assert text_of(registry).splitlines()[2:] == [
        'store_seconds_bucket{operation="get",le="0.25"} 1',
        'store_seconds_bucket{operation="get",le="0.5"} 2',
        'store_seconds_bucket{operation="get",le="1"} 2',
        'store_seconds_bucket{operation="get",le="+Inf"} 3',
        'store_seconds_sum{operation="get"} 7.55',
        'store_seconds_count{operation="get"} 3',
    ]


def test_labels_from_outside_fill_no_memory_and_steer_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_SERIES", 3)
    registry = Registry()
    refusals = registry.counter("refusals_total", "Refused", ("job",))
    for number in range(10):
        refusals.add(1, f"job{number}\x1b[31m")
    text = text_of(registry)
    assert 'refusals_total{job="(other)"} 7' in text
    assert len(refusals.samples()) == 4
    assert r"job0\\x1b[31m" in text
    assert re.sub(r"\n", "", text).isprintable()


def test_a_name_stands_for_one_metric() -> None:
    registry = Registry()
    counter = registry.counter("a_total", "A", ("job",))
    with pytest.raises(ValueError, match="There is a metric 'a_total' already"):
        registry.counter("a_total", "B")
    with pytest.raises(ValueError, match="a_total has the labels"):
        counter.add(1)


def test_records_as_json_lines() -> None:
    formatter = JsonFormatter(lambda: {"job": "mine", "epoch": None, "rank": 3})
    record = logging.LogRecord("horovod.x", logging.WARNING, "x.py", 1, "said %s\n", ("\x1b",), None)
    record.created = 1_700_000_000.25
    line = formatter.format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    found = json.loads(line)
    pid = found.pop("pid")
    assert isinstance(pid, int)
    assert found == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "horovod.x",
        "message": "said \x1b\n",
        "job": "mine",
        "rank": 3,
    }
    record.__dict__.update(about("theirs", 7))
    found = json.loads(formatter.format(record))
    assert (found["job"], found["epoch"], found["rank"]) == ("theirs", 7, 3)


def test_an_error_has_its_traceback() -> None:
    try:
        raise RuntimeError("why")
    except RuntimeError as error:
        info = (type(error), error, error.__traceback__)
        record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "failed", (), info)
    assert json.loads(JsonFormatter().format(record))["error"].endswith("RuntimeError: why")


def test_the_page_of_metrics_is_current() -> None:
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    assert page == markdown(), "python docs/tools/metrics_page.py > docs/metrics.md"
