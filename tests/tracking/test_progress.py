"""How far work is, where no terminal shows a bar: a line a minute."""

from __future__ import annotations

import os
import sys

import pytest

from fcl_bench.tracking import console
from fcl_bench.tracking.console import ProgressLines, current_progress, duration, progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when a test says so."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_a_line_a_minute_and_no_carriage_return(clock, capsys):
    with progress(10, "learning", "round", done=2) as work:
        assert isinstance(work, ProgressLines)
        for _ in range(6):
            clock(25)
            work.update()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "learning: 5 of 10 rounds, about 2 min left\nlearning: 8 of 10 rounds, about 50 s left\n"


def test_bytes_are_told_in_millions(clock):
    work = ProgressLines(30_000_000, "downloading a", "B", done=10_000_000)
    assert work.text() == "downloading a: 10 of 30 MB"
    clock(10)
    work.update(10_000_000)
    assert work.text() == "downloading a: 20 of 30 MB, about 10 s left"
    work.update(10_000_000)
    assert work.text() == "downloading a: 30 of 30 MB"


def test_the_innermost_work_is_what_is_told(clock):
    assert current_progress() == ""
    with progress(2, "learning", "task"):
        with progress(5, "extracting", "sample") as inner:
            inner.update(5)
            assert current_progress() == "extracting: 5 of 5 samples"
        assert current_progress() == "learning: 0 of 2 tasks"
    assert current_progress() == ""


def test_work_goes_on_where_nobody_reads_its_progress(clock, monkeypatch):
    """`fcl-bench ... 2>&1 | head` ended a run half-way, at the first line of progress, and with exit code 0."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as err:
        monkeypatch.setattr(sys, "stderr", err)
        work = ProgressLines(3, "learning", "round")
        for _ in range(2):
            clock(60)
            work.update()
    assert work.text() == "learning: 2 of 3 rounds, about 60 s left"


def test_durations_are_told_in_the_unit_that_suits_them():
    told = [duration(seconds) for seconds in (0, 89, 90, 5399, 12000)]
    assert told == ["0 s", "89 s", "2 min", "1 h 30 min", "3 h 20 min"]
