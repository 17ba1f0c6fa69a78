"""Names from files that hold what a terminal, a spreadsheet or a browser would obey, in everything that is written."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fcl_bench.cli.app import main as run_main
from fcl_bench.cli.tables import main as tables_main
from fcl_bench.data.sources.array_files import FeatureFile
from fcl_bench.data.sources.base import loaded

PAYLOADS = ["\x1b[2J\x1b]0;owned\x07", "a\nb: c", "<script>alert(1)</script>", "=cmd|' /C calc'!A0", "\u202egnp.exe"]
PAYLOADS += ["\\input{/etc/passwd}", "|x|\r", "n" * 3000]
#: What no file or screen may hold, besides line ends and what aligns columns.
OBEYED = {chr(code) for code in (*range(32), *range(127, 160))} - {"\n", "\t"} | {"\u202e", "\u2028"}


def features(path):
    rng = np.random.default_rng(0)
    labels = np.array(PAYLOADS)[np.arange(80) % len(PAYLOADS)]
    arrays = {f"x_{side}": rng.standard_normal((80, 5)) for side in ("train", "test")}
    np.savez(path, **arrays, y_train=labels, y_test=labels)
    return path


def test_names_lose_what_a_terminal_obeys_where_they_enter(tmp_path):
    names = loaded(FeatureFile(path=str(features(tmp_path / "f.npz")))).class_names
    assert len(set(names)) == len(PAYLOADS)
    assert all(name.isprintable() and len(name) <= 500 for name in names)
    assert "<script>alert(1)</script>" in names


@pytest.mark.slow
def test_nothing_that_is_written_holds_them(tmp_path, capsys, monkeypatch):
    path, out = features(tmp_path / "f.npz"), tmp_path / "out"
    typed = ["method=fedncm", "data=features", f"data.path={path}", "tasks=2", "clients=2", "predictions=true"]
    monkeypatch.setattr(sys, "argv", ["fcl-bench", *typed, f"out={out}", "details=true"])
    assert run_main() == 0
    monkeypatch.setattr(sys, "argv", ["fcl-tables", "--out", str(out), "--html"])
    assert tables_main() == 0
    told = capsys.readouterr()
    texts = {"stdout": told.out, "stderr": told.err}
    kinds = {".csv", ".json", ".log", ".yaml", ".md", ".tex", ".html"}
    files = [file for file in out.rglob("*") if file.suffix in kinds]
    assert kinds - {".log"} <= {file.suffix for file in files}
    texts |= {str(file): file.read_text() for file in files}
    assert {name: found for name, text in texts.items() if (found := OBEYED & set(text))} == {}
    # A positive control: the names are in there, so that something was looked at.
    assert any("alert(1)" in text for text in texts.values())
    assert not any("<script>alert(1)" in text for name, text in texts.items() if name.endswith(".html"))
