"""Tables are written again only where something has changed."""

from __future__ import annotations

import os

import pytest

from fcl_bench.results.made import Made


@pytest.fixture
def out(tmp_path):
    for run in ("a", "b"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "run.json").write_text("{}")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "t.csv").write_text("1")
    return tmp_path


def made_now(out):
    return Made(out, {"by": ["beta"], "if_changed": True})


def noted(out):
    made = Made(out, {"by": ["beta"], "if_changed": False})
    assert not made.is_current()
    made.note([out / "tables" / "t.csv"])


def test_what_was_noted_is_current(out):
    noted(out)
    made = made_now(out)
    assert made.is_current()
    assert (made.files, made.runs) == ([str(out / "tables" / "t.csv")], 2)


def new_run(out):
    (out / "runs" / "c").mkdir()
    (out / "runs" / "c" / "run.json").write_text("{}")


def changed_run(out):
    os.utime(out / "runs" / "a" / "run.json", (1, 1))


def lost_file(out):
    (out / "tables" / "t.csv").unlink()


def edited_file(out):
    (out / "tables" / "t.csv").write_text("by hand")


def damaged_note(out):
    next((out / "tables").glob(".made-*")).write_text("{")


def note_of_something_else(out):
    next((out / "tables").glob(".made-*")).write_text('["files"]')


@pytest.mark.parametrize("change", [new_run, changed_run, lost_file, edited_file, damaged_note, note_of_something_else])
def test_any_change_tells(out, change):
    noted(out)
    change(out)
    assert not made_now(out).is_current()


@pytest.mark.parametrize("suffix", [".py", ".yaml"])
@pytest.mark.parametrize("function", ["fcl_bench.composition.config_dir", "fcl_bench.results.reference.folder"])
def test_configurations_and_reference_results_count_as_code(out, monkeypatch, function, suffix):
    """A changed preset, paper's note or reference run was passed over."""
    (out / "beside").mkdir()
    monkeypatch.setattr(function, lambda: out / "beside")
    options = {"reference": []}
    Made(out, options).note([out / "tables" / "t.csv"])
    assert Made(out, options).is_current()
    (out / "beside" / f"changed{suffix}").touch()
    assert not Made(out, options).is_current()
    made = Made(out, options)
    made.note([out / "tables" / "t.csv"])
    assert Made(out, options).is_current()
    os.utime(out / "beside" / f"changed{suffix}", (1, 1))  # such as of an older version
    assert not Made(out, options).is_current()


def test_more_reports_of_a_sweep_tell(out):
    """They decide which sweep is the latest, and which runs it has."""
    jobs = out / "sweeps" / "one" / "jobs"
    jobs.mkdir(parents=True)
    os.utime(jobs, (1, 1))
    noted(out)
    (jobs / "0.json").write_text("{}")
    assert not made_now(out).is_current()


def test_a_run_that_comes_while_tables_are_written_is_not_in_them(out):
    """It was noted as one of theirs, and the next command did nothing."""
    made = made_now(out)
    new_run(out)
    made.note([out / "tables" / "t.csv"])
    assert not made_now(out).is_current()


def test_other_options_are_another_matter(out):
    noted(out)
    assert not Made(out, {"by": ["clients"]}).is_current()
