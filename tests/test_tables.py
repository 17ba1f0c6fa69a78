"""The command fcl-tables as a user meets it: from run folders to files, wrong input, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest

from fcl_bench.report.collect import collect
from tests.report.frames import real_runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return real_runs(tmp_path_factory.mktemp("out"), "beta=0.1,1")


@pytest.fixture
def tables(monkeypatch, capsys):
    """`fcl-tables` in this process: arguments -> (exit code, stdout, stderr)."""
    from fcl_bench.tables import main

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fcl-tables", *map(str, arguments)])
        capsys.readouterr()
        code = main()
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_runs_become_a_table_and_a_figure(tables, finished):
    code, out, err = tables("--out", finished)
    assert (code, err) == (0, "")
    folder = finished / "tables"
    names = ["summary.csv", "summary.md", "summary.png", "summary.runs.csv", "summary.svg"]
    assert sorted(entry.name for entry in folder.iterdir()) == names
    for name in names:
        assert f"written: {folder / name}\n" in out
    runs = collect(finished / "runs")
    summary = pd.read_csv(folder / "summary.csv")
    assert summary["n"].tolist() == [2, 2]
    for _, row in summary.iterrows():
        own = runs[runs["run_id"].isin(row["run_ids"].split())]
        assert set(own["beta"]) == {row["beta"]}
        assert row["A_T_mean"] == own["A_T"].mean()  # to the last digit
        assert row["A_T_std"] == pytest.approx(own["A_T"].std())
    companion = pd.read_csv(folder / "summary.runs.csv")
    assert sorted(companion["run_id"]) == sorted(runs["run_id"])
    assert {"label", "beta", "method.rank", "seed"} <= set(companion.columns)
    page = (folder / "summary.md").read_text()
    for text in ("data digits", "fedran: M 32, rank 8", "| beta | method | n |", "| 0.1 | fedran | 2 |"):
        assert text in page
    assert "nan" not in page.lower()
    assert "data digits" in out
    assert "│ 0.1  │ fedran │ 2 │" in out


def test_a_choice_of_runs_under_a_name_of_its_own(tables, finished, tmp_path):
    code, out, _ = tables("--out", finished, "--where", "beta=1", "--where", "seed=0,1", "--name", "one beta")
    assert code == 0
    assert "beta 1" in out
    assert pd.read_csv(finished / "tables" / "one beta.csv")["beta"].tolist() == [1]


def test_damaged_runs_are_told_and_left_out(tables, finished, tmp_path):
    import shutil

    shutil.copytree(finished / "runs", tmp_path / "runs")
    next((tmp_path / "runs").glob("*/tasks.csv")).write_text("")
    code, _, err = tables("--out", tmp_path)
    assert code == 0
    [line] = err.splitlines()
    assert line.startswith("fcl-tables: warning: run folder ")
    assert line.endswith("leaving it out")
    assert pd.read_csv(tmp_path / "tables" / "summary.csv")["n"].sum() == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--where", "methd=fedran"], "unknown key methd (did you mean method or"),
        (["--where", "beta=2"], "no run has beta=2 (choices: 0.1, 1)"),
        (["--where", "beta"], "is not KEY=VALUE"),
        (["--name", "a/b"], "--name=a/b is not a plain file name"),
        (["--name", ".."], "is not a plain file name"),
        (["--name", ""], "is not a plain file name"),
        (["--name", "x" * 300], "cannot be written: File name too long"),
        (["--nam"], "expected one argument"),
        (["beta=1"], "unrecognized arguments: beta=1 (fcl-tables --help"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(tables, finished, arguments, told):
    before = sorted(finished.rglob("*"))
    code, out, err = tables("--out", finished, *arguments)
    [line] = err.splitlines()
    assert (code, out) == (2, "")
    assert line.startswith("fcl-tables: error: ")
    assert told in line
    assert sorted(finished.rglob("*")) in (before, sorted([*before, finished / "tables"]))


def test_no_runs_at_all(tables, tmp_path):
    for out in (tmp_path, tmp_path / "nowhere"):
        code, _, err = tables("--out", out)
        assert code == 2
        assert err == f"fcl-tables: error: --out={out}: no complete run in {out / 'runs'} (fcl-bench makes runs)\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (ZeroDivisionError, 1)])
def test_interrupts_and_bugs_have_codes_of_their_own(tables, finished, monkeypatch, error, code):
    def raising(*_):
        raise error

    monkeypatch.setattr("fcl_bench.report.summary.summarise", raising)
    found, _, err = tables("--out", finished)
    assert found == code
    assert ("Traceback" in err) == (code == 1)


def test_help_imports_neither_torch_nor_pandas():
    program = (
        "import sys; sys.argv = ['fcl-tables', '--help']\n"
        "from fcl_bench.tables import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--where KEY=VALUE" in done.stdout


def test_a_reader_that_leaves_early_is_no_error():
    program = (
        "import sys; sys.argv = ['fcl-tables']; import fcl_bench.tables as command\n"
        "command._tables = lambda _: print('a long table' * 100_000, flush=True)\n"
        "sys.exit(command.main())"
    )
    line = f'{sys.executable} -c "{program}" | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("0", "")


def test_the_module_is_the_command(tmp_path):
    line = [sys.executable, "-m", "fcl_bench.tables", "--name", "a/b"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("fcl-tables: error: --name=a/b")
