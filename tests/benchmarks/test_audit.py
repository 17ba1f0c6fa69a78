"""What `make lint` says of known faults in packages: faults, packages without data, and that nothing could be asked."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import audit

PACKAGES = [
    {"name": "sound", "version": "1", "vulns": []},
    {"name": "weak", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1", "3"]}]},
    {"name": "hopeless", "version": "3", "vulns": [{"id": "CVE-2", "fix_versions": []}]},
    {"name": "own", "skip_reason": "Dependency not found on PyPI"},
]


def answering(monkeypatch: pytest.MonkeyPatch, *answers: str | Exception) -> None:
    waiting = list(answers)

    def run(command: list[str], **_: object) -> SimpleNamespace:
        answer = waiting.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer, stderr="first\nNo module named pip_audit\n", returncode=1)

    monkeypatch.setattr(audit.subprocess, "run", run)


def of(*packages: dict) -> str:
    return json.dumps({"dependencies": list(packages)})


def test_faults_are_named_and_those_that_can_be_mended_fail(monkeypatch, capsys):
    answering(monkeypatch, of(PACKAGES[0]), of(*PACKAGES))
    assert audit.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "pip-audit: weak 2 has CVE-1, mended in 2.1, 3",
        "pip-audit: hopeless 3 has CVE-2, mended in no version yet",
        "pip-audit: 2 known faults in 3 packages; no data of 1: own",
    ]


@pytest.mark.parametrize("packages", [PACKAGES[:1], [PACKAGES[2]]], ids=["none", "without a remedy"])
def test_what_nobody_can_mend_does_not_fail(monkeypatch, packages):
    answering(monkeypatch, of(PACKAGES[0]), of(*packages))
    assert audit.main() == 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (of(PACKAGES[3]), "the package index has no data on faults"),
        ("", "No module named pip_audit"),
        ("{}", "No module named pip_audit"),
        (subprocess.TimeoutExpired("pip-audit", 1), "no answer within 300 seconds"),
    ],
    ids=["no data", "not installed", "other json", "silent"],
)
def test_where_nothing_can_be_asked_a_line_says_so(monkeypatch, capsys, answer, reason):
    answering(monkeypatch, answer)
    assert audit.main() == 0
    assert capsys.readouterr().out == f"pip-audit: NOTHING WAS CHECKED, since {reason}\n"
