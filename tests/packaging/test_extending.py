"""The chapters of docs/extending.md, carried out in copies of the tree: what is tested is the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from error_codes import ends_with
from page_steps import Tree, steps, touched

from horovod.base.errors import SettingCode

PAGE = "docs/extending.md"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    copy = Tree(tmp_path, ["docs", "csrc/base", "mkdocs.yml", "CHANGELOG.md"])
    copy.use_built()
    return copy


def test_an_error_code(tree: Tree) -> None:
    found = steps(PAGE, "## An error code")
    assert touched(found) == {"base/errors/jobs.py", "clients/horovod/rendezvous/hosts.py"}
    tree.follow(found)
    assert "| `dot-after-host` |" in (tree.folder / "docs/errors.md").read_text()
    said = tree.test("tests/runner/test_hosts.py", "tests/runtime/test_error_codes.py")
    assert "test_a_dot_after_a_host_is_refused PASSED" in said
    assert "test_the_page_is_current PASSED" in said


def test_a_setting(tree: Tree) -> None:
    found = steps(PAGE, "## A setting")
    assert touched(found) == {"base/settings/training.py", "worker/runtime/context.py"}
    tree.follow(found)
    said = tree.test("tests/runtime/test_niceness.py", "tests/runner/test_settings_table.py", "-k", "niceness or page")
    assert "test_a_process_gives_way PASSED" in said
    assert "test_flag_and_key_reach_the_ranks[niceness] PASSED" in said
    assert "test_the_page_in_docs_is_current PASSED" in said
    refused = tree.refusal("python", "-m", "horovod.launch", "-np", "1", "--niceness", "20", "true")
    assert re.search(ends_with(SettingCode.INVALID_SETTING, "--niceness='20' ", "an integer from 0 to 19"), refused)


def test_a_metric(tree: Tree) -> None:
    found = steps(PAGE, "## A metric")
    assert touched(found) == {"coordinator/metrics.py", "coordinator/services/hub.py"}
    tree.follow(found)
    assert "| `horovod_members_returned_total` | counter | `job` |" in (tree.folder / "docs/metrics.md").read_text()
    said = tree.test("tests/coordinator/test_returned_members.py", "tests/telemetry/test_registry.py")
    assert "test_members_that_come_back_are_counted PASSED" in said
    assert "test_the_page_of_metrics_is_current PASSED" in said


def test_an_rpc(tree: Tree) -> None:
    found = steps(PAGE, "## An RPC")
    service, client = "coordinator/services/jobs.py", "clients/horovod/launch/cluster/client.py"
    assert touched(found) == {"protos/v1/jobs.proto", service, client}
    tree.follow(found)
    said = tree.test(
        *("tests/runner/test_counted_jobs.py", "tests/coordinator/test_rpc_costs.py"),
        *("tests/coordinator/test_coordinator_rates.py", "-k", "counted or Count or every"),
    )
    for test in (
        "test_jobs_are_counted",
        *(f"test_strangers_are_refused[{who}]" for who in ("None-wrong-token", "x-wrong-token")),
        "test_every_rpc_has_a_target",
        "test_every_method_counts_how_often_a_peer_comes",
    ):
        assert f"{test} PASSED" in said
    assert said.count("test_what_a_request_costs[Jobs/Count-") == 2


def test_a_rule_of_elastic_jobs(tree: Tree) -> None:
    found = steps(PAGE, "## A rule of elastic jobs")
    core = "coordinator/core/elastic"
    assert touched(found) == {
        *("base/settings/training.py", "protos/v1/jobs.proto"),
        f"{core}/decision.py",
    }
    tree.follow(found)
    said = tree.test("tests/coordinator/test_hosts_of_a_rack.py", "tests/coordinator/test_elastic_stories.py")
    assert "test_the_prefix_reaches_the_decision PASSED" in said
    assert "test_story[hosts_of_a_rack] PASSED" in said


def test_a_framework(tree: Tree) -> None:
    pytest.importorskip("numpy", reason="make build installs it")
    found = steps(PAGE, "## A framework")
    own = {"clients/horovod/numpy/__init__.py", "clients/horovod/numpy/arrays.py", "docs/numpy.md"}
    assert own < touched(found)
    assert len(touched(found) - own) <= 5
    tree.follow(found)
    assert (
        "| name | PyTorch | TensorFlow | Keras | JAX | MXNet | NumPy |"
        in (tree.folder / "docs/frameworks.md").read_text()
    )
    said = tree.test(
        *("tests/runtime/test_numpy_arrays.py", "tests/runtime/test_frameworks_page.py"),
        *("tests/runtime/test_missing_frameworks.py", "-k", "two_ranks or page_is or numpy"),
    )
    for test in (
        *("test_two_ranks", "test_the_page_is_that_of_the_code_and_needs_no_framework"),
        "test_without_its_framework_it_says_what_to_install[numpy-NumPy]",
    ):
        assert f"{test} PASSED" in said
    shown = "from horovod.launch.command_line import check_build; print(*check_build._FRAMEWORKS.values())"
    assert tree.python("-c", shown).split()[-2:] == ["horovod.numpy", "horovod.lightning"]
