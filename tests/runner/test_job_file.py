"""Job files: what they may say, which line a mistake is in, and the job that comes of one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from error_codes import ends_with

from horovod.base.errors import ClusterCode
from horovod.coordinator.core.cluster.job import refusal_of
from horovod.launch.cluster.job_file.job_file import KNOWN, JobFile, check, schema
from horovod.launch.located import LineError, load

Write = Callable[[str], Path]
RUN = "run:\n  - distributed: python train.py\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write


def test_a_whole_file_becomes_a_job(write: Write) -> None:
    path = write("""\
project: vision
name: digits
framework: pytorch
environment: /opt/train
workers: 2
processes: 4
slots: 8
gpus: 4
cpus: 6
memory: 16 GiB
labels: {disk: ssd, rack: 010}
env:
  OMP_NUM_THREADS: 04
  DEBUG: yes
  TOKEN:
code: src
run:
  - python prepare.py --out "a b"
  - distributed: [python, train.py, --epochs, 3]
  - echo done
""")
    file = JobFile.read(path)
    spec = file.spec({"TOKEN": "secret", "OTHER": "stays here"}, "ada", attended=True)
    assert (spec.project, spec.name, spec.user, spec.attended) == ("vision", "digits", "ada", True)
    assert (spec.processes, spec.processes_per_worker, spec.slots_per_worker) == (8, 4, 8)
    assert (spec.needs.gpus, spec.needs.cpus, spec.needs.memory_bytes) == (1, 1.5, 4 << 30)
    assert dict(spec.labels) == {"disk": "ssd", "rack": "010"}
    assert dict(spec.environment) == {"OMP_NUM_THREADS": "04", "DEBUG": "yes", "TOKEN": "secret"}
    assert spec.python_environment == "/opt/train"
    assert file.code == path.parent / "src"
    look, *lines = spec.lines
    assert look.title == "the look for pytorch"
    assert look.command[-2:] == ["torch", "horovod"]
    assert [(list(line.command), line.distributed, line.title) for line in lines] == [
        (["sh", "-c", 'python prepare.py --out "a b"'], False, "line 1 of 3"),
        (["python", "train.py", "--epochs", "3"], True, "line 2 of 3"),
        (["sh", "-c", "echo done"], False, "line 3 of 3"),
    ]


def test_the_number_of_workers_may_change(write: Write) -> None:
    spec = JobFile.read(write(f"workers: {{min: 2, max: 8, reset_limit: 5, cooldown: [1, 9]}}\n{RUN}")).spec(
        {}, "ada", attended=False
    )
    policy = spec.policy
    assert (policy.cooldown_least_seconds, policy.cooldown_most_seconds) == (1, 9)
    assert (spec.processes, policy.fewest, policy.most, policy.most_replacements) == (2, 2, 8, 5)
    assert (policy.replaces_failed, policy.patience_seconds) == (True, 600)
    assert {name: spec.environment[name] for name in ("HOROVOD_MIN_SIZE", "HOROVOD_MAX_SIZE")} == {
        "HOROVOD_MIN_SIZE": "2",
        "HOROVOD_MAX_SIZE": "8",
    }
    assert refusal_of(spec) == ""
    file = JobFile.read(write(f"workers: {{min: 3}}\nenv: {{HOROVOD_ELASTIC_TIMEOUT: 5}}\n{RUN}"))
    policy = file.spec({}, "ada", attended=False).policy
    assert (policy.fewest, policy.most, policy.most_replacements, policy.patience_seconds) == (3, 0, 9, 5)
    policy = JobFile.read(write(f"workers: {{min: 3, max: 3}}\n{RUN}")).spec({}, "ada", attended=False).policy
    assert (policy.fewest, policy.most, policy.replaces_failed) == (3, 3, True)


def test_a_worker_that_may_come_later_runs_the_lines_before_by_itself(write: Write, tmp_path: Path) -> None:
    text = "run:\n  - echo ${HOROVOD_RANK-none} > first\n  - [sh, -c, 'exit 3']\n  - distributed: touch trained\n"
    spec = JobFile.read(write(f"workers: {{min: 1}}\n{text}")).spec({}, "ada", attended=False)
    assert refusal_of(spec) == ""
    (line,) = spec.lines
    assert line.distributed
    environ = {**os.environ, "HOROVOD_RANK": "1"}
    assert subprocess.run(line.command, env=environ, cwd=tmp_path, check=False).returncode == 3
    assert (tmp_path / "first").read_text() == "none\n"
    assert not (tmp_path / "trained").exists()


def test_the_shortest_file(write: Write) -> None:
    spec = JobFile.read(write(f"workers: 3\n{RUN}")).spec({"HOME": "/root"}, "ada", attended=False)
    assert (spec.name, spec.processes, spec.processes_per_worker, spec.slots_per_worker) == ("job", 3, 1, 1)
    assert not spec.environment
    assert [line.shown for line in spec.lines] == ["python train.py"]


def test_an_image_is_a_label_of_agents_that_run_in_it(write: Write) -> None:
    spec = JobFile.read(write(f"workers: 1\nimage: train:7\n{RUN}")).spec({}, "ada", attended=False)
    assert dict(spec.labels) == {"image": "train:7"}


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", [["job.yaml"]]),
        ("workers: [1", [["line 1:", "',' or ']'"]]),
        ("- 1", [["line 1:", "file", "list"]]),
        (f"{RUN}\nworker: 2\n", [["line 1:", "'workers'"], ["line 4:", "'worker'", "'workers'"]]),
        (f"workers: two\n{RUN}", [["line 1:", "'workers'", "two", "1 to 65536"]]),
        (f"workers: true\n{RUN}", [["line 1:", "'workers'", "true"]]),
        (f"workers: 0\n{RUN}", [["line 1:", "'workers'", " 0:", "1 to 65536"]]),
        (f"workers: 1\nworkers: 2\n{RUN}", [["line 2:", "'workers'", "line 1"]]),
        (f"workers: 1\nframework: pytorhc\n{RUN}", [["line 2:", "'framework'", "pytorhc", "jax", "'pytorch'?"]]),
        (f"workers: 1\nmemory: 16\n{RUN}", [["line 2:", "'memory'", " 16:"]]),
        (f"workers: 1\nmemory: 16 gigs\n{RUN}", [["line 2:", "'memory'", "16 gigs:"]]),
        (f"workers: 1\nenv:\n  - A=1\n{RUN}", [["line 2:", "'env'", "list"]]),
        (f"workers: 1\nenv:\n  A-B: 1\n{RUN}", [["line 3:", "'A-B'"]]),
        (f"workers: 1\nprocesses: 2\ngpus: 3\n{RUN}", [["line 3:", "3 GPUs", "2 processes"]]),
        (f"workers: 1\nprocesses: 2\nslots: 1\n{RUN}", [["line 3:", "2 processes", "not 1"]]),
        (f"workers: 1\ncode: .\ndirectory: /a\n{RUN}", [["line 3:", "'directory'", "'code'"]]),
        (f"workers: 1\nimage: a\nenvironment: /a\n{RUN}", [["line 2:", "'image'", "'environment'"]]),
        ("workers: 1\nrun:\n  - python train.py\n", [["line 2:", "`- distributed: python train.py`"]]),
        ("workers: 1\nrun: []\n", [["line 2:", "'run'", "0 entries", "1 to 999"]]),
        ("workers: 1\nrun:\n  - a\n  - distribute: b\n", [["line 4:", "'run, entry 2.distribute'", "'distributed'?"],
                                                          ["line 4:", "'distributed'", "'run, entry 2':"]]),
        ("workers: 1\nrun:\n  - distributed: {a: b}\n", [["line 3:", "'run, entry 1.distributed'", "mapping"]]),
        (f"workers: {{max: 2}}\n{RUN}", [["line 1:", "'min'", "'workers'"]]),
        (f"workers:\n  min: 3\n  max: 2\n{RUN}", [["line 3:", "'workers.max'", " 2:", "3."]]),
        (f"workers: {{min: 1, cooldown: [9, 1]}}\n{RUN}", [["line 1:", "'workers.cooldown'"]]),
        (f"workers: {{min: 1, cooldown: [9]}}\n{RUN}", [["line 1:", "'workers.cooldown'", "from 2 to 2"]]),
        (f"workers: {{min: 1, least: 2}}\n{RUN}", [["line 1:", "'workers.least'"]]),
        (f"workers: {{min: 1}}\nprocesses: 2\n{RUN}", [["line 2:", "'processes'"]]),
        (f"workers: {{min: 1}}\n{RUN}  - echo done\n", [["line 3:", "the last line"]]),
        (f"workers: 1\n1: 2\nlabels: &a [*a]\n{RUN}", [["line 3:", "itself"]]),
        (f"workers: 1\n? [a]\n: 2\n{RUN}", [["line 2:", "key"]]),
        (f"workers: 40000\nprocesses: 2\n{RUN}", [["line 1:", "40000 workers", "2 processes", "65536"]]),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_lines(write: Write, text: str, problems: list[list[str]]) -> None:
    with pytest.raises(LineError, match=ends_with(ClusterCode.WRONG_JOB_FILE)) as caught:
        JobFile.read(write(text))
    for told, facts in zip(sorted(caught.value.problems), sorted(problems), strict=True):
        assert [fact for fact in facts if fact not in told] == []


def test_all_mistakes_are_told_at_once_in_their_order(write: Write) -> None:
    with pytest.raises(LineError) as caught:
        JobFile.read(write(f"worker: 1\n{RUN}cpus: many\n"))
    assert [problem.partition("line ")[2][:2] for problem in caught.value.problems] == ["1:", "1:", "4:"]


def test_a_variable_without_a_value_must_be_in_the_shell(write: Write) -> None:
    file = JobFile.read(write(f"workers: 1\nenv:\n  SECRET:\n{RUN}"))
    with pytest.raises(LineError, match=ends_with(ClusterCode.WRONG_JOB_FILE, "job.yaml, line 3:", "SECRET")):
        file.spec({}, "ada", attended=False)


def test_merged_keys_count_once(write: Write) -> None:
    text = f"workers: 1\nenv: &more {{A: 1, B: 2}}\nlabels:\n  <<: *more\n  B: 3\n{RUN}"
    assert JobFile.read(write(text)).content.keys["labels"].data == {"A": 1, "B": 3}


def test_the_schema_uses_only_words_that_the_checker_knows() -> None:
    def look(rule: Any) -> None:
        assert set(rule) <= KNOWN
        for inner in rule.get("properties", {}).values():
            look(inner)
        for key in ("items", "additionalProperties"):
            if isinstance(rule.get(key), dict):
                look(rule[key])

    look(schema())


VALUES = ["null", "true", "1", "0", "-1", "1.0", "1.5", "65537", "''", "a", "'16 GiB'", "/a", "[]", "[a]", "[1, [a]]",
          "{}", "{a: b}", "{a: null}", "{distributed: a}", "[{distributed: a}]", "[{distributed: []}]", "[a, {b: c}]",
          "{min: 1}", "{min: 1, max: 0}", "{min: a}", "{max: 1}", ".inf", "pytorch"]  # fmt: skip


@pytest.mark.parametrize("key", [*schema()["properties"], "unknown"])
def test_the_checker_judges_like_jsonschema(key: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    for value in VALUES:
        others = "".join(f"{name}: {text}\n" for name, text in (("workers", "1"), ("run", "[a]")) if name != key)
        document = load(f"{others}{key}: {value}\n", "a.yaml")
        if value == ".inf":  # JSON has no such number
            continue
        try:
            check(document, "a.yaml")
            ours = True
        except LineError:
            ours = False
        assert ours == validator.is_valid(json.loads(json.dumps(document.data))), (key, value)


LINKS = "\n".join(f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]" for n in range(8))
MERGES = "\n".join(f"{chr(98 + n)}: &{chr(98 + n)} {{<<: [{', '.join(['*' + chr(97 + n)] * 9)}]}}" for n in range(8))


@pytest.mark.parametrize(
    "text",
    [
        f"a: &a [x]\n{LINKS}\n",
        f"a: &a {{x: y}}\n{MERGES}\n",
        f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 100)}]\n",
    ],
    ids=["lists", "merges", "long text"],
)
def test_aliases_that_come_to_far_more_than_the_file_are_refused(text: str) -> None:
    """Nine aliases of nine aliases of nine: each level of a few bytes takes nine times the memory of the last one."""
    with pytest.raises(LineError, match=ends_with(ClusterCode.WRONG_JOB_FILE, "job.yaml", "alias")):
        load(text, "job.yaml")


def test_aliases_of_ordinary_files_are_values() -> None:
    document = load("a: &a {x: [1, 2]}\nb: [*a, *a]\nc: {<<: *a, y: 3}\n", "job.yaml")
    assert document.data == {"a": {"x": [1, 2]}, "b": [{"x": [1, 2]}] * 2, "c": {"x": [1, 2], "y": 3}}
