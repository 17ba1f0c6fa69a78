"""The command fcl-tables as a user meets it: from run folders to files, wrong input, exit codes."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pandas as pd
import pytest

from fcl_bench.cli.tables import main
from fcl_bench.results.collect import collect
from fcl_bench.results.tables.cells import ABSENT
from tests.results.frames import real_runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return real_runs(tmp_path_factory.mktemp("out"), "beta=0.1,1")


@pytest.fixture
def tables(in_process):
    """`fcl-tables` in this process: arguments -> (exit code, stdout, stderr)."""
    return partial(in_process, main, "fcl-tables")


def files(folder):
    """Names of the files that a user sees there; some versions of filelock leave theirs."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != ".lock")


@pytest.mark.slow
def test_runs_become_a_table_and_a_figure(tables, finished):
    code, out, err = tables("--out", finished)
    assert (code, err) == (0, "")
    folder = finished / "tables"
    forms = ("csv", "md", "runs.csv", "tex")
    sections = [f"summary.{name}.{form}" for name in ("accuracy", "communication", "runtime") for form in forms]
    # One method alone compares with nothing, so there is no picture.
    names = sorted([*(f"summary.{form}" for form in (*forms, "bib")), *sections])
    assert [name for name in files(folder) if name.startswith("summary.")] == names
    assert out.splitlines()[-1] == f"written: 17 files, {folder / 'summary.'}* (csv, md, tex, bib)"
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
    for text in (
        "data digits",
        "M 32, activation relu, rank 8",
        "| method | beta | n |",
        "| fedran | 0.1 | 2 |",
    ):
        assert text in page
    assert "nan" not in page.lower()
    assert "data digits" not in out  # settings are in the files only
    assert "│ fedran │ 0.1  │ 2 │" in out


@pytest.mark.slow
def test_a_choice_of_runs_under_a_name_of_its_own(tables, finished, tmp_path):
    code, out, _ = tables("--out", finished, "--where", "beta=1", "--where", "seed=0,1", "--name", "one beta")
    assert code == 0
    assert "│ fedran │ 2 │" in out
    assert pd.read_csv(finished / "tables" / "one beta.csv")["beta"].tolist() == [1]


@pytest.mark.slow
def test_formats_measures_and_grouping_are_of_choice(tables, finished):
    line = ("--name", "chosen", "--format", "csv", "--metrics", "A_T,up_max_mib", "--by", "method")
    code, out, err = tables("--out", finished, *line)
    assert (code, err) == (0, "")
    written = sorted(entry.name for entry in (finished / "tables").glob("chosen.*"))
    parts = [f"chosen.{part}{form}" for part in ("", "accuracy.", "communication.") for form in ("csv", "runs.csv")]
    assert written == sorted(parts)
    read = pd.read_csv(finished / "tables" / "chosen.accuracy.csv", na_values=ABSENT)
    runs = collect(finished / "runs")
    assert read["method"].tolist() == ["fedran"]
    for beta in (0.1, 1):
        own = runs.loc[runs["beta"] == beta, "A_T"]
        assert read[f"A_T_mean [beta {beta}]"].tolist() == [own.mean()]
        assert read[f"A_T_n [beta {beta}]"].tolist() == [2]
    assert "A_avg" not in out


@pytest.mark.slow
def test_a_papers_tables_need_no_run(tables, tmp_path):
    code, out, err = tables("--out", tmp_path, "--paper", "stsa", "--table", "Table 5")
    assert (code, err) == (0, "")
    folder = tmp_path / "tables" / "papers"
    written = f"written: 4 files, {folder / 'stsa-table-5.'}* (csv, md, tex)"
    assert out == f"stsa, Table 5: 12 printed numbers, 0 with runs of ours\n{written}\n"
    assert files(folder) == [f"stsa-table-5.{form}" for form in ("csv", "md", "runs.csv", "tex")]
    page = (folder / "stsa-table-5.md").read_text()
    for number in ("79047.9", "955.6", "95.4", "60.1", "4.77"):
        assert f"| {number} | +0." in page
    read = pd.read_csv(folder / "stsa-table-5.csv", na_values=ABSENT)
    assert read["nominal"].dropna().round(2).tolist() == [79047.91, 95.39, 955.58, 4.77, 60.08]


def test_a_paper_beside_runs_that_are_not_of_its_setting(tables, finished):
    code, out, _ = tables("--out", finished, "--paper", "fedran", "--table", "Figure 6", "--format", "md")
    assert code == 0
    assert "0 with runs of ours" in out
    assert "not run" in (finished / "tables" / "papers" / "fedran-figure-6.md").read_text()


@pytest.mark.slow
def test_a_page_and_every_figure_on_request(tables, finished):
    code, out, err = tables("--out", finished, "--name", "whole", "--html", "--figures", "--metrics", "A_T")
    assert (code, err) == (0, "")
    folder = finished / "tables"
    page = (folder / "whole.html").read_text()
    runs = collect(finished / "runs")
    assert f"{runs.loc[runs['beta'] == 1, 'A_T'].mean():.2f}" in page
    drawn = sorted(entry.name for entry in folder.glob("whole.*.svg"))
    assert drawn
    assert page.count('<img alt="') == len(drawn)
    for name in drawn:
        for suffix in (".png", ".pdf"):
            assert (folder / name).with_suffix(suffix).stat().st_size > 1000
        assert (
            (folder / name)
            .with_suffix(".caption.txt")
            .read_text()
            .startswith("Accuracy" if "beta" not in name else "A line")
        )
    assert [line for line in out.splitlines() if line.startswith("written: ")] == out.splitlines()[-1:]


@pytest.mark.slow
def test_the_screen_fits_columns(tables, finished, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = tables("--out", finished)
    assert code == 0
    assert max(map(len, out.splitlines()[:-1])) <= 60
    assert "In the files only: settings; forgetting (%)" in " ".join(out.split())


def test_the_papers_tables_as_one_page(tables, tmp_path):
    code, _, _ = tables("--out", tmp_path, "--paper", "stsa", "--table", "Table 5", "--html")
    assert code == 0
    page = (tmp_path / "tables" / "papers" / "papers.html").read_text()
    assert page.count(">955.6<") == 2
    assert "not run" in page


@pytest.mark.slow
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


@pytest.mark.slow_cases(
    "arguments13---figures accuracy_against_rank: too few runs for it",
    "arguments6-cannot be written: File name too long",
)
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
        (["--format", "pdf"], "--format=pdf is not known (choices: csv, md, tex)"),
        (["--format", "csv,"], "--format csv, has an empty entry"),
        (["--metrics", "A_avrg"], "--metrics=A_avrg is not known (did you mean A_avg"),
        (["--by", "device"], "numbers of two devices never share a column"),
        (["--figures", "acuracy_matrix"], "--figures=acuracy_matrix is not known (did you mean accuracy_matrix"),
        (["--figures", "accuracy_against_rank"], "--figures accuracy_against_rank: too few runs for it"),
        (["--together", "betta"], "--together betta is no key of the setting (did you mean beta"),
        (["--table", "Table 4"], "--table Table 4 is a table of no paper"),
        (["--paper", "fedrann"], "--paper fedrann is not known (did you mean fedran"),
        (["--paper", "fedran", "--table", "Table 44"], "--table Table 44 is not in --paper fedran"),
        (["--paper", "fedran", "--by", "method"], "are not for --paper"),
        (["--paper", "fedran", "--reference"], "are not for --paper"),
        (["--latst"], "unrecognized arguments: --latst (did you mean --latest? fcl-tables --help lists the options)"),
        (["beta=1"], "unrecognized arguments: beta=1 (fcl-tables --help"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(tables, finished, arguments, told):
    before = sorted(path for path in finished.rglob("*") if path.name != ".lock")
    code, out, err = tables("--out", finished, *arguments)
    [line] = err.splitlines()
    assert (code, out) == (2, "")
    assert line.startswith("fcl-tables: error: ")
    assert told in line
    after = [path for path in finished.rglob("*") if path.name != ".lock"]
    assert sorted(after) in (before, sorted([*before, finished / "tables"]))


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

    monkeypatch.setattr("fcl_bench.results.summarise.summarise", raising)
    found, _, err = tables("--out", finished)
    assert found == code
    assert ("Traceback" in err) == (code == 1)


def test_help_imports_neither_torch_nor_pandas():
    program = (
        "import sys; sys.argv = ['fcl-tables', '--help']\n"
        "from fcl_bench.cli.tables import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--where KEY=VALUE" in done.stdout


def test_a_reader_that_leaves_early_is_no_error():
    program = (
        "import sys; sys.argv = ['fcl-tables']; import fcl_bench.cli.tables as command\n"
        "command._tables = lambda: print('a long table' * 100_000, flush=True)\n"
        "sys.exit(command.main())"
    )
    line = f'{sys.executable} -c "{program}" | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("0", "")


def test_the_module_is_the_command(tmp_path):
    line = [sys.executable, "-m", "fcl_bench.cli.tables", "--name", "a/b"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("fcl-tables: error: --name=a/b")


def test_the_folder_of_runs_in_miniature_and_the_runs_of_a_sweep(tables, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, told in (
        (["--out", "outputs/quick"], "no complete run in outputs/quick/runs"),
        ([], "no complete run in outputs/runs"),
        (["--latest", "--sweep", "a"], "argument --sweep: not allowed with argument --latest"),
    ):
        code, _, err = tables(*arguments)
        assert code == 2
        assert told in err
