"""The benchmarks run, and report no figure whose values were not checked."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adasum_reference import adasum

from benchmarks import network, report, values
from benchmarks.cases import COLLECTIVES, SIZES, Case, cases, parse_size, resnet50_shapes
from benchmarks.measure import Budget, Figure, Row, UncheckedError, checked_times, idle_cpu, measure, settle
from benchmarks.namespaces import DEFAULT_CONGESTION, Network, NetworkError

REDUCING = ("allreduce", "resnet50", "small200")


def results_of(case: Case, rank: int, calls: int) -> list[torch.Tensor]:
    """What a correct library leaves on a rank, computed from the inputs of all."""
    inputs = []
    for source in range(case.ranks):
        inputs.append([torch.empty(count) for count in case.elements])
        values.fill(case, source, inputs[-1])
    if case.operation in REDUCING:
        sums = [torch.stack(same).sum(0) for same in zip(*inputs, strict=True)]
        return [total * float(case.ranks) ** (calls - 1) for total in sums]
    only = [tensors[0] for tensors in inputs]
    if case.operation == "adasum":
        return [torch.from_numpy(adasum([tensor.double().numpy() for tensor in only])).float()]
    if case.operation == "broadcast":
        return [only[0]]
    if case.operation == "allgather":
        return [torch.cat(only)]
    if case.operation == "alltoall":
        return [torch.cat([tensor.chunk(case.ranks)[rank] for tensor in only])]
    return [torch.stack(only).sum(0).chunk(case.ranks)[rank].clone()]


CHECKED = [
    *(case for ranks in (2, 3, 4) for case in cases(ranks, COLLECTIVES[:-1], (4, 1 << 10, 1 << 18))),
    Case("small200", 2),
]


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: f"{case.operation}-{case.ranks}-{case.bytes}")
def test_right_values_pass_and_one_wrong_value_does_not(case: Case) -> None:
    for rank in range(case.ranks):
        for calls in (1, case.most_calls()):
            results = results_of(case, rank, calls)
            assert values.check(case, rank, calls, results) == case.result_elements > 0
            before = sum(result.numel() for result in results[:-1])
            for place in {0, results[-1].numel() // 2, results[-1].numel() - 1}:
                spoiled = [result.clone() for result in results]
                spoiled[-1][place] = torch.nextafter(spoiled[-1][place], torch.tensor(math.inf))
                with pytest.raises(values.WrongValuesError, match=f"element {before + place} is"):
                    values.check(case, rank, calls, spoiled)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [4, 1 << 10, 1 << 18])
def test_adasum_is_its_definition_but_for_rounding(ranks: int, size: int) -> None:
    case = Case("adasum", ranks, size)
    results = results_of(case, 0, 1)
    for calls in (1, case.most_calls()):
        assert values.check(case, 0, calls, results) == case.result_elements
    place = results[0].numel() // 2
    for factor, right in ((1 + 2.0**-22, True), (1 + 2.0**-18, False), (1 - 2.0**-18, False), (math.nan, False)):
        other = results[0].clone()
        other[place] *= factor
        if right:
            assert values.check(case, 0, 1, [other]) == case.result_elements
        else:
            with pytest.raises(values.WrongValuesError, match=f"element {place} is"):
                values.check(case, 0, 1, [other])


def test_adasum_has_few_sizes_unless_asked_for_others() -> None:
    usual = cases(2, ("adasum", "allreduce"), None)
    assert {case.bytes for case in usual if case.operation == "allreduce"} == set(SIZES)
    assert {case.bytes for case in usual if case.operation == "adasum"} < set(SIZES)
    assert [case.bytes for case in cases(2, ("adasum",), (8, 32))] == [8, 32]


def test_missing_values_are_not_checked_ones() -> None:
    case = Case("allreduce", 2, 1 << 10)
    with pytest.raises(values.WrongValuesError, match="255 values came out of allreduce, not 256"):
        values.check(case, 0, 1, [results_of(case, 0, 1)[0][:-1]])


def reply(case: Case, **changes: Any) -> dict[str, Any]:
    return {"seconds": [0.5, 0.25], "checked": 2 * case.result_elements, "barriers": [], **changes}


def test_the_slowest_rank_counts() -> None:
    case = Case("allreduce", 2, 1 << 10)
    assert checked_times(case, 2, 5, [reply(case), reply(case, seconds=[0.1, 1.0])]) == [0.1, 0.2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checked": 256}, "Rank 1 checked 256 of 512 values"),
        ({"checked": None}, "Rank 1 checked None of 512 values"),
        ({"seconds": [0.5]}, "Rank 1 reported 1 blocks of 2"),
    ],
)
def test_times_without_checked_values_are_refused(changes: dict[str, Any], message: str) -> None:
    case = Case("allreduce", 2, 1 << 10)
    with pytest.raises(UncheckedError, match=message):
        checked_times(case, 2, 1, [reply(case), reply(case, **changes)])
    with pytest.raises(UncheckedError, match="1 of 2 ranks"):
        checked_times(case, 2, 1, [reply(case)])


def test_a_barrier_that_lets_ranks_pass_is_refused() -> None:
    case = Case("barrier", 2)
    first, good, early = [(0, 20), (30, 51)], [(10, 21), (50, 52)], [(10, 21), (60, 62)]
    assert checked_times(case, 2, 1, [reply(case, barriers=first), reply(case, barriers=good)])
    with pytest.raises(UncheckedError, match="left the barrier before all had entered"):
        checked_times(case, 2, 1, [reply(case, barriers=first), reply(case, barriers=early)])
    with pytest.raises(UncheckedError, match="Not every block"):
        checked_times(case, 2, 1, [reply(case, barriers=first[:1]), reply(case, barriers=good[:1])])


class FakeWorld:
    """Two ranks of a library whose values are right for the first `right` runs."""

    def __init__(self, library: str, right: int) -> None:
        self.library = self.name = library
        self._right = right
        self.runs = 0

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        if do != "run":
            return [{}, {}]
        self._right -= 1
        self.runs += 1
        blocks = arguments["blocks"]
        return [{"seconds": [0.01] * blocks, "checked": blocks * 256 * (self._right >= 0)} for _ in range(2)]


def test_a_library_with_wrong_values_gets_no_figure() -> None:
    worlds: Any = [FakeWorld("horovod", 100), FakeWorld("gloo", 3), FakeWorld("mpi", 0)]
    row = measure(Case("allreduce", 2, 1 << 10), worlds, Budget(rounds=4))
    assert set(row.figures) == {"horovod"}
    assert set(row.refused) == {"gloo", "mpi"}
    assert row.ratio("gloo") is None
    assert row.to_json()["figures"].keys() == {"horovod"}


def test_worlds_settle_before_anything_is_measured() -> None:
    worlds: Any = [FakeWorld("horovod", 1000), FakeWorld("gloo", 0)]
    case = Case("allreduce", 2, 1 << 10)
    settle(case, worlds, Budget(settle_seconds=0))
    assert worlds[0].runs == 0
    settle(case, worlds, Budget(settle_seconds=1e-6))
    assert worlds[0].runs > worlds[1].runs > 0
    assert measure(case, worlds, Budget(rounds=2)).refused.keys() == {"gloo"}, "told of where it is measured"


def test_what_a_library_does_not_know_is_not_asked_of_it() -> None:
    worlds: Any = [FakeWorld("horovod", 100), FakeWorld("gloo", 100)]
    row = measure(Case("adasum", 2, 1 << 10), worlds, Budget(rounds=2))
    assert set(row.figures) == {"horovod"}
    assert not row.refused


def test_adasum_is_compared_with_the_sum_of_the_same_size_and_world() -> None:
    def row(operation: str, size: int, seconds: float) -> Row:
        return Row(Case(operation, 2, size), {"horovod": Figure([seconds])})

    rows = [row("allreduce", 1 << 10, 2.0), row("allreduce", 1 << 20, 3.0), row("broadcast", 4, 9.0)]
    rows += [row("adasum", 1 << 20, 7.5), row("adasum", 4, 1.0)]
    assert report.cost_of_adasum(rows) == [
        "2 ranks of horovod: Adasum of 1 MB takes 2.50 times as long as its allreduce."
    ]
    rows[1].figures.clear()
    assert report.cost_of_adasum(rows) == []


def test_idle_use_is_measured() -> None:
    def burn(seconds: float) -> None:
        start = time.process_time()
        while time.process_time() < start + seconds:
            pass

    world: Any = SimpleNamespace(library="burning", pids=[os.getpid()])
    assert idle_cpu([world], 0.2, burn)["burning"][0] > 99.99
    assert idle_cpu([world], 0.2, lambda _: None)["burning"][0] < 50


def test_resnet50_has_its_published_size() -> None:
    assert (len(resnet50_shapes()), sum(map(math.prod, resnet50_shapes()))) == (161, 25_557_032)


@pytest.mark.parametrize(("text", "size"), [("4", 4), ("4 B", 4), ("16K", 16384), ("256 MB", 256 << 20)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "3", "-4", "1.5M", "4G", "many"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_wire_bytes_of_an_allreduce_is_the_bound_of_a_ring_over_hosts() -> None:
    for hosts, per_host in ((2, 1), (4, 2)):
        case = Case("allreduce", hosts * per_host, 1 << 20)
        assert network.wire_bytes(case, hosts, per_host) == 2 * (hosts - 1) / hosts * (1 << 20)


def is_png(file: Path) -> bool:
    return file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_plot_has_a_panel_for_each_collective_and_size_of_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: `make bench` installs it")
    from matplotlib import pyplot

    closed: list[Any] = []
    monkeypatch.setattr(pyplot, "close", closed.append)
    rows = [
        Row(case, {"horovod": Figure([1e-6 * (case.bytes + 1)])})
        for ranks in (2, 4)
        for case in cases(ranks, ("allreduce", "barrier", "broadcast"), (4, 1 << 10))
    ]
    report.plot(tmp_path / "new" / "plot.png", rows, {"cores": 2, "cpu": "a CPU"})
    assert is_png(tmp_path / "new" / "plot.png")
    titles = [axis.get_title() for axis in closed[0].axes]
    assert titles == ["allreduce, 2 ranks", "broadcast, 2 ranks", "allreduce, 4 ranks", "broadcast, 4 ranks"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "5"), "'5' is no size"),
        (("--np", "1"), "'1' is no number of ranks"),
        (("--ops", "gather"), "'gather' is no operation"),
        (("--ops", "mpi"), "'mpi' is no operation"),
        (("--libraries", "smoke"), "'smoke' is no library"),
    ],
)
def test_a_command_line_that_makes_no_sense(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import collectives

    programs = [collectives] if arguments[0] == "--np" else [collectives, network]
    for program in programs:
        with pytest.raises(SystemExit) as end:
            program.main(arguments)
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_network_needs_root_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert network.main(["--quick"]) == 2
    assert capsys.readouterr().err == "Network namespaces need root: run this as root (or with sudo).\n"


def test_network_needs_its_programs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert network.main(["--quick"]) == 2
    assert "No ip, tc, unshare here: install iproute2" in capsys.readouterr().err


@pytest.mark.parametrize("name", [DEFAULT_CONGESTION, "reno"])
def test_hosts_have_the_congestion_control_that_was_asked_for(name: str, namespaces: Callable[[], set[str]]) -> None:
    before = namespaces()
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    allowed_before = allowed.read_text() if allowed.exists() else ""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Network(1, congestion=name))
        except NetworkError as error:
            pytest.skip(str(error))
        command = [*made.hosts[0].prefix, "cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == name
    with pytest.raises(NetworkError, match=r"can't be vegetable here; this kernel has .*reno"):
        Network(1, congestion="vegetable").__enter__()
    assert namespaces() <= before
    assert not allowed_before or allowed.read_text() == allowed_before


@pytest.fixture
def namespaces() -> Callable[[], set[str]]:
    """This process's own: other tests make some at the same time."""
    return lambda: {path.name for path in Path("/run/netns").glob(f"hvdbench{os.getpid()}*")}
