"""`fcl-bench runs`: what is printed of each run, the exit codes, and what is refused."""

from __future__ import annotations

import os
import re
import shutil
from datetime import datetime
from unittest.mock import Mock

import pytest
from filelock import FileLock

from tests.results.forging import resealed
from tests.small_runs import run_in


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("out"), "method=afl", "tasks=2", "clients=2").folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "runs" / finished.name)


def test_an_honest_run_is_right(run, command):
    code, printed, told = command("runs", "verify", str(run))
    lines = printed.splitlines()
    assert (code, told, lines[0]) == (0, "", run.name)
    assert "  right: metrics (from confusion.npz)" in lines
    assert "  right: communication (from uploads.csv and config.yaml)" in lines
    assert not any(line.startswith("  wrong") for line in lines)
    assert any(line.startswith("  data cb0c") and line.endswith("known as digits") for line in lines)
    assert any(line.startswith("  not recomputed") and "environment" in line for line in lines)


def test_an_edited_run_is_wrong_and_the_others_are_verified_all_the_same(run, command, tmp_path):
    edited = shutil.copytree(run, tmp_path / "runs" / "edited")
    resealed(edited, {"metrics.A_avg": 100.0, "data_origin": "\x1b[31mred"})
    code, printed, told = command("runs", "verify", str(edited), str(run))
    assert code == 2
    assert told.splitlines() == [
        "fcl-bench: error: not as they were written: edited (the lines that begin with wrong say why)"
    ]
    [line] = [line for line in printed.splitlines() if line.startswith("  wrong")]
    assert line.startswith("  wrong: metrics (from confusion.npz): metrics.A_avg is 100.0, recomputed ")
    assert run.name in printed.splitlines()


def test_text_of_a_foreign_record_cannot_move_the_cursor(run, command):
    resealed(run, {"method": "\x1b[2Jafl"})
    code, printed, _ = command("runs", "verify", str(run))
    assert code == 2
    assert "\x1b" not in printed
    assert r"\x1b[2Jafl" in printed


@pytest.mark.parametrize("typed", ["--out={}", "out={}"])
def test_runs_are_found_by_their_ids(run, command, typed):
    code, printed, _ = command("runs", "verify", run.name.rpartition("-")[2], typed.format(run.parent.parent))
    assert code == 0
    assert printed.startswith(run.name)


def test_signed_by_whom(run, command, tmp_path):
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = tmp_path / "key.pem"
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key.write_bytes(Ed25519PrivateKey.generate().private_bytes(*form))
    code, printed, _ = command("runs", "verify", str(run), "--signer", "somebody")
    assert code == 2
    assert "  wrong: signature: nobody signed it, not somebody" in printed
    code, printed, _ = command("runs", "sign", str(run), "--key", str(key))
    assert code == 0
    public = printed.split()[-1]
    code, printed, _ = command("runs", "verify", str(run), "--signer", public)
    assert (code, f"  right: signed by {public}" in printed) == (0, True)
    code, printed, _ = command("runs", "verify", str(run), "--signer", "somebody")
    assert code == 2
    assert f"  wrong: signature: {public} signed it, not somebody" in printed
    resealed(run, {"environment.git_commit": "1" * 40})
    code, printed, _ = command("runs", "verify", str(run))
    assert code == 2
    [line] = [line for line in printed.splitlines() if line.startswith("  wrong")]
    assert "run.sig is no signature of this run.json" in line


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("verify",), "the following arguments are required: RUN"),
        (("forge", "x"), "invalid choice: 'forge'"),
        (("verify", "nothing"), "no complete run nothing in"),
        (("sign", "x"), "the following arguments are required: --key"),
    ],
)
def test_wrong_words_get_one_line(command, typed, told):
    code, printed, error = command("runs", *typed)
    assert (code, printed) == (2, "")
    assert told in error
    assert len(error.splitlines()) == 1


def rows(printed: str) -> dict[str, list[str]]:
    """First cell -> the other cells of a printed table's row."""
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if "│" in line]
    return {first: rest for first, *rest in lines}


def test_two_runs_are_compared_by_settings_and_measures(run, command, tmp_path):
    other = shutil.copytree(run, tmp_path / "runs" / "other")
    resealed(other, {"metrics.A_avg": 50.0, "beta": 1.0, "metrics.forgetting": None})
    code, printed, told = command("runs", "compare", str(run), str(other))
    assert (code, told) == (0, "")
    found = rows(printed)
    assert found["beta"] == ["0.1", "1", ""]
    assert "seed" not in found
    assert found["A_avg (%)"][1] == "50"
    assert found["A_avg (%)"][2] == "one seed, no interval"
    assert found["forgetting (%)"][1] == "not defined"
    assert found["upload (MiB)"][0] == found["upload (MiB)"][1]


@pytest.mark.slow
def test_accuracies_are_paired_where_answers_are_stored(command, tmp_path):
    usual = ("tasks=2", "clients=2", "predictions=true")
    folders = [run_in(tmp_path, f"method={name}", *usual).folder for name in ("afl", "fedncm")]
    code, printed, _ = command("runs", "compare", *map(str, folders))
    assert code == 0
    found = rows(printed)
    assert found["method"] == ["afl", "fedncm", ""]
    assert found["A_T (%)"][2].startswith("behind the best by ")
    assert re.search(r" \(1 seed, \d+ test samples\)$", found["A_T (%)"][2])


@pytest.mark.parametrize("number", [1, 3])
def test_other_than_two_runs_are_not_compared(number, run, command):
    code, _, told = command("runs", "compare", *[str(run)] * number)
    assert code == 2
    assert told == (
        "fcl-bench: error: runs compare takes two complete, undamaged runs (fcl-bench runs compare RUN RUN)\n"
    )


def test_a_damaged_run_is_not_compared(run, command):
    (run / "tasks.csv").write_text("")
    code, _, told = command("runs", "compare", str(run), str(run))
    assert code == 2
    assert "takes two complete, undamaged runs" in told


def test_a_run_is_exported_as_one_file_that_holds_all_of_it(run, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed, told = command("runs", "export", str(run))
    assert (code, told) == (0, "")
    assert printed.startswith(f"written: {run.name}.zip (")
    shutil.unpack_archive(f"{run.name}.zip", "unpacked")
    unpacked = tmp_path / "unpacked" / run.name
    assert {file.name: file.read_bytes() for file in unpacked.iterdir()} == {
        file.name: file.read_bytes() for file in run.iterdir()
    }
    assert command("runs", "verify", str(unpacked))[0] == 0
    code, _, told = command("runs", "export", str(run))
    assert (code, told.count("\n")) == (2, 1)
    assert f"{run.name}.zip is there already (--to another file)" in told
    assert command("runs", "export", str(run), "--to", "other.zip")[0] == 0
    code, _, told = command("runs", "export", str(run), str(run))
    assert code == 2
    assert "runs export takes one complete, undamaged run" in told


@pytest.fixture
def listed(run, tmp_path):
    """OUT with three complete runs, the oldest in quick/runs, and an older one of each kind that is not complete."""
    changes = {
        "best": {"metrics.accuracy.1": 99.5, "beta": 1.0, "metrics.plasticity_by_task.1": 101.0},
        "last": {"metrics.accuracy.1": None, "seed": 7, "metrics.plasticity_by_task.1": None},
    }
    places = {"best": run.parent, "last": tmp_path / "quick" / "runs"}
    for age, (name, changed) in enumerate(changes.items(), 1):
        resealed(shutil.copytree(run, places[name] / name), {"run_id": name, **changed})
        os.utime(places[name] / name / "run.json", (1e9 - age,) * 2)
    os.utime(run / "run.json", (1e9,) * 2)
    for age, name in enumerate(("begun", "failed", "active"), 3):
        folder = run.parent / f"{name}-{name[0] * 12}"
        folder.mkdir()
        (folder / "run.log").touch()
        os.utime(folder / "run.log", (1e9 - age,) * 2)
    (run.parent / f"begun-{'b' * 12}" / "checkpoint").mkdir()
    return tmp_path


def test_runs_are_listed_the_newest_first_with_what_tells_them_apart(listed, run, command):
    with FileLock(run.parent / ".locks" / f"active-{'a' * 12}.lock"):
        code, printed, told = command("runs", "list", f"out={listed}")
    assert (code, told) == (0, "")
    head, *lines = (re.split(r"\s{2,}", line.strip()) for line in printed.splitlines())
    assert head == ["run", "id", "A_avg (%)", "A_T (%)", "upload (MiB)", "date"]
    assert [(line[0], line[3], line[1]) for line in lines] == [
        ("afl digits beta=0.1 seed=0", "95.21", run.name[-12:]),
        ("afl digits beta=1 seed=0", "99.50", "best"),
        ("afl digits beta=0.1 seed=7", "-", "last"),
        ("begun [unfinished]", "-", "b" * 12),
        ("failed [failed or stopped]", "-", "f" * 12),
        ("active [running]", "-", "a" * 12),
    ]
    assert {line[5] for line in lines} == {f"{datetime.fromtimestamp(1e9 - 1):%Y-%m-%d %H:%M}"}


def test_a_list_is_sorted_by_a_measure_and_filtered_as_tables_are(listed, run, command):
    own = run.name[-12:]
    head, *lines = command("runs", "list", f"out={listed}", "--sort", "P_T")[1].splitlines()
    assert "plasticity (%)" in head
    assert [re.split(r"\s{2,}", line)[1] for line in lines] == ["best", own, "last", *(letter * 12 for letter in "bfa")]
    chosen = command("runs", "list", f"out={listed}", "--where", "seed=0", "--where", "beta=0.1")[1]
    assert [re.split(r"\s{2,}", line)[1] for line in chosen.splitlines()] == ["id", own]
    code, printed, told = command("runs", "list", "--sort", "A_t")
    assert (code, printed) == (2, "")
    assert told == "fcl-bench: error: --sort=A_t is not known (did you mean A_T? one of 48 choices)\n"


@pytest.mark.parametrize(("columns", "has_date"), [(60, False), (80, False), (120, True)])
def test_a_list_fits_a_terminal_with_whole_ids_and_numbers(columns, has_date, listed, run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = command("runs", "list", f"out={listed}")[1].splitlines()
    assert max(map(len, lines)) <= columns
    [own] = [line for line in lines if run.name[-12:] in line]
    assert " 95.21 " in own
    assert ("2001-09-" in own) == has_date
    assert (lines[-1] == "No room for: date.") != has_date


def test_a_folder_without_runs_is_told_in_a_line(tmp_path, command):
    assert command("runs", "list", f"out={tmp_path}") == (
        0,
        f"no run in {tmp_path / 'runs'}: fcl-bench makes runs\n",
        "",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def useless(run, tmp_path):
    """OUT with one sound run, and of each kind that is of no use one."""
    runs = run.parent
    (runs / f"failed-{'a' * 12}").mkdir()
    (runs / f"failed-{'a' * 12}" / "run.log").write_text("x" * 2**20)
    (runs / f"begun-{'b' * 12}" / "checkpoint").mkdir(parents=True)
    shutil.copytree(run, runs / f"{run.name} (copy)")
    damaged = shutil.copytree(run, runs / f"z-{'c' * 12}")
    (damaged / "tasks.csv").write_text("nonsense")
    (runs / "notes").mkdir()
    resealed(shutil.copytree(run, runs / f"old-{'d' * 12}"), {"schema": 1})
    return tmp_path


def test_clean_lists_what_is_of_no_use_and_deletes_it_only_if_told(useless, run, command, monkeypatch):
    code, printed, told = command("runs", "clean", f"out={useless}")
    assert (code, told.count("\n")) == (2, 1)
    assert "nobody can be asked here, so nothing is deleted (--yes deletes them)" in told
    found = {line.partition("runs/")[2] for line in printed.splitlines()}
    assert found == {
        f"failed-{'a' * 12}: no complete run, it failed or was stopped",
        f"begun-{'b' * 12}: no complete run, it would go on where it stopped",
        f"{run.name} (copy): the same run as {run}",
        f"z-{'c' * 12}: damaged: tasks.csv does not match its checksum",
    }
    assert "     1.00 MiB  " in printed
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert command("runs", "clean", f"out={useless}")[1].endswith("deleted: nothing\n")
    monkeypatch.setattr("builtins.input", Mock(side_effect=EOFError))  # Ctrl-D
    assert command("runs", "clean", f"out={useless}")[::2] == (0, "")
    assert len(list(run.parent.glob("[!.]*"))) == 7
    with FileLock(run.parent / ".locks" / f"begun-{'b' * 12}.lock"):
        code, printed, told = command("runs", "clean", "--yes", f"out={useless}")
    assert (code, told) == (0, "")
    assert "deleted: 3 folders, " in printed
    left = {folder.name for folder in run.parent.glob("[!.]*")}
    assert left == {run.name, f"begun-{'b' * 12}", "notes", f"old-{'d' * 12}"}


def test_clean_says_that_nothing_is_of_no_use(tmp_path, command):
    assert command("runs", "clean", f"out={tmp_path}")[1] == "deleted: nothing, no folder is of no use\n"
    assert list(tmp_path.iterdir()) == []


def test_clean_deletes_neither_what_links_lead_to_nor_what_is_no_run_of_ours(run, command, tmp_path):
    """Each of these was deleted: a run behind a link, all runs below a linked folder, another program's run.json."""
    runs = run.parent
    (runs / "a link").symlink_to(run)
    (tmp_path / "quick").symlink_to(tmp_path)
    (runs / f"weights-{'e' * 12}").mkdir()
    (runs / f"weights-{'e' * 12}" / "last.pt").write_text("theirs")
    (runs / "detect").mkdir()
    (runs / "detect" / "run.json").write_text('{"theirs": 1}')
    before = sorted(path.name for path in runs.glob("[!.]*"))
    assert command("runs", "clean", "--yes", f"out={tmp_path}")[1] == "deleted: nothing, no folder is of no use\n"
    assert sorted(path.name for path in runs.glob("[!.]*")) == before
    shutil.copytree(run, runs / "a backup")
    assert "deleted: 1 folders, " in command("runs", "clean", "--yes", f"out={tmp_path}")[1]
    assert sorted(path.name for path in runs.glob("[!.]*")) == before, "the folder that the run's command finds stays"


def test_clean_keeps_a_run_that_ends_while_it_asks(run, command, monkeypatch):
    record = run / "run.json"
    whole = record.read_bytes()
    record.unlink()

    def answered(question: str) -> str:
        record.write_bytes(whole)
        return "y"

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answered)
    told = command("runs", "clean", f"out={run.parents[1]}")[1]
    assert told.endswith("deleted: 0 folders, 0.00 MiB; in use by now, and kept: 1\n")
    assert record.read_bytes() == whole
