"""Commands of the Makefile whose answer counts: `make help`, and what `make lint` and `make attack` make of answers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import advisories
import attacks
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_command_has_its_meaning() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    )
    said = dict(re.findall(r"^make ([a-z-]+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert set(said) == set(phony.split()) - {"ready"}  # a part of `build`
    assert min(len(meaning.split()) for meaning in said.values()) > 1
    assert len(done.stdout.splitlines()) == len(said)


# -- make lint: known vulnerabilities ----------------------------------------------------------------------------------
FINE = {"name": "packaging", "version": "26.3", "vulns": []}
FLAWED = {
    "name": "grpcio",
    "version": "1.49.1",
    "vulns": [{"id": "PYSEC-2023-1", "aliases": ["CVE-2023-1"], "fix_versions": ["1.53.2"]}],
}
UNKNOWN = {"name": "psutil", "skip_reason": "not found, and could not be audited"}


def test_a_known_vulnerability_fails_the_lint(monkeypatch: pytest.MonkeyPatch) -> None:
    good, lines = advisories.judged({"dependencies": [FINE, FLAWED, UNKNOWN]})
    assert not good
    assert all(fact in lines[0] for fact in ("grpcio 1.49.1", "PYSEC-2023-1", "1.53.2"))
    monkeypatch.setattr(advisories, "ACCEPTED", {"CVE-2023-1": "a reason"})
    assert advisories.judged({"dependencies": [FINE, FLAWED]})[0]


def test_an_index_without_advisories_is_said_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, (line,) = advisories.judged({"dependencies": [FINE, UNKNOWN]})
    assert good
    assert "psutil" in line
    assert "packaging" not in line
    late = subprocess.TimeoutExpired("pip-audit", 1)
    for error in (late, OSError("no program"), ValueError("no answer")):

        def fail(_: list[str], error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(advisories, "KEPT", tmp_path / "none.json")
        monkeypatch.setattr(advisories, "ask", fail)
        assert advisories.main() == 0
        said = capsys.readouterr().out
        assert said.startswith("Not checked for known vulnerabilities")
        assert said.count("\n") == 1


def test_what_horovod_installs_is_asked_for() -> None:
    names = [
        pin.partition("==")[0].lower()
        for pin in advisories.pins((ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text())
    ]
    assert names == ["cloudpickle", "cryptography", "grpcio", "packaging", "protobuf", "psutil", "pyyaml"]


# -- make attack: verdicts ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cases", "good", "says"),
    [
        (["", ""], True, "holds"),
        (["", '<failure message="got through"/>'], False, "BROKEN"),
        (["", '<error message="no fixture"/>'], False, "BROKEN"),
        (["", '<skipped message="only root"/>'], True, "in part"),
        (['<skipped message="only root"/>'], True, "not tried"),
        ([], False, "BROKEN"),
    ],
)
def test_what_is_said_of_a_row(cases: list[str], good: bool, says: str, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    listed = (f'<testcase classname="tests.a.test_b" name="test_c[{end != ""}]">{end}</testcase>' for end in cases)
    report.write_text(f"<testsuites><testsuite>{''.join(listed)}</testsuite></testsuites>")
    row = attacks.Row("somebody", ("a/test_b.py::test_c",))
    found = attacks.verdict(row, attacks.outcomes(report))
    assert found[0] is good
    assert found[1].startswith(says)
    assert "somebody" in found[1]
    assert "only root" not in "".join(cases) or "only root" in found[1]


def test_a_page_whose_row_names_no_test_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "| what | then |\n|---|---|\n| a | b |\n| c | d <!-- packaging/test_make_commands.py::test_none -->|\n"
        "| e | f <!-- packaging/test_make_commands.py::test_what_is_said_of_a_row -->|\n"
        "| g | h <!-- no/file.py::x -->|\n"
    )
    monkeypatch.setattr(attacks, "ROOT", tmp_path)
    found = attacks.defects("page.md")
    assert len(found) == 3
    assert all(fact in said for fact, said in zip((": a", "test_none", "no/file.py::x"), found, strict=True))
