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


def noted(out):
    made = Made(out, {"by": ["beta"], "if_changed": False})
    assert not made.is_current()
    made.note([out / "tables" / "t.csv"])
    return Made(out, {"by": ["beta"], "if_changed": True})


def test_what_was_noted_is_current(out):
    made = noted(out)
    assert made.is_current()
    assert (made.files, made.runs) == (1, 2)


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


@pytest.mark.parametrize("change", [new_run, changed_run, lost_file, edited_file, damaged_note])
def test_any_change_tells(out, change):
    made = noted(out)
    change(out)
    assert not made.is_current()


def test_other_options_are_another_matter(out):
    noted(out)
    assert not Made(out, {"by": ["clients"]}).is_current()
