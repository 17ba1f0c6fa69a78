"""`python -m benchmarks`: one list of names, and one form of results."""

from __future__ import annotations

import json
import re

import pytest
import report
import table

from benchmarks.__main__ import known, main
from tests.conftest import REPOSITORY


def test_the_list_says_in_a_line_what_each_does(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out.splitlines()
    names = known()
    assert {"suite", "waiting", "verify", "table"} <= names.keys()
    for name, what in names.items():
        assert what.strip(), name
        assert any(line.split("  ")[0] == name and line.endswith(what) for line in listed), name


def test_an_unknown_name_is_refused_in_one_line(capsys):
    assert main(["sweeps"]) == 2
    error = capsys.readouterr().err
    assert (error.count("\n"), "sweeps is not known" in error, "sweep_cost" in error) == (1, True, True)


def test_every_name_that_is_written_anywhere_is_known():
    files = [REPOSITORY / "Makefile", *REPOSITORY.glob("*.md"), *REPOSITORY.glob("results/*.md")]
    files += [*REPOSITORY.rglob("docs/**/*.md"), *REPOSITORY.glob("benchmarks/verify/claims/*.yaml")]
    written = re.compile(r"-m benchmarks[ .]([a-z_]+)|python benchmarks/([a-z_]+)\.py")
    named = {a or b for file in files for a, b in written.findall(file.read_text(encoding="utf-8"))}
    assert len(named) > 15
    assert named <= known().keys()


def test_a_result_has_flat_rows_and_its_table_shows_medians(tmp_path, capsys):
    rows = [{"side": "ours", "seconds": [3.0, 1.0, 2.0], "of": {"clients": 5}}, {"side": "theirs", "seconds": [0.1234]}]
    report.write(tmp_path / "made.json", rows, threads=1)
    made = json.loads((tmp_path / "made.json").read_text())
    assert made.keys() == {"command", "machine", "threads", "rows"}
    assert made["rows"][0] == {"side": "ours", "seconds": [3.0, 1.0, 2.0], "of.clients": 5}
    shown = ["| side | seconds | of.clients |", "| --- | ---: | ---: |", "| ours | 2 | 5 |", "| theirs | 0.123 |  |"]
    assert (tmp_path / "made.md").read_text().splitlines()[-4:] == shown
    assert table.main([str(tmp_path / "made.json")]) == 0
    assert capsys.readouterr().out.splitlines() == shown


def test_the_table_of_waits_is_that_of_its_result():
    page = (REPOSITORY / "docs" / "results" / "benchmarks.md").read_text()
    made = report.load(REPOSITORY / "benchmarks" / "measured" / "waiting.json")
    assert f"\n\n{report.table_of(made['rows'])}\n" in page.partition("## What a user waits for")[2]


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": []}', '{"rows": 3}'])
def test_a_file_without_rows_is_no_result(tmp_path, content):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ValueError):
        report.load(tmp_path / "bad.json")
