"""A newcomer's first hour: its commands stand on the pages that a newcomer reads, and they do what they should."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import first_hour
import pytest

from tests.conftest import REPOSITORY

#: A row of the quick start's table: task and processor seconds.
ROW = re.compile(r"^\| ([a-z][\w' ,-]+) \| .* \| ([\d.]+) \|$", flags=re.M)


@pytest.mark.parametrize("task", [first_hour.SETUP, *first_hour.TASKS], ids=lambda task: task.name)
def test_the_commands_are_those_of_the_pages(task):
    """What the reader's own files are called, and what is typed wrongly on purpose, aside."""
    assert bool(first_hour.opened(task)) == (task.code == 0)


def test_a_command_that_no_page_has_is_refused():
    with pytest.raises(ValueError, match="no page has fcl-bench method=nobody"):
        first_hour.opened(first_hour.Task("x", ("fcl-bench method=nobody",), ""))


@pytest.mark.parametrize(
    ("command", "says", "code", "trouble"),
    [
        ("exit 3", "", 0, "ended with 3, not 0"),
        ("echo this", "that", 0, "nothing like 'that'"),
        ("true", "", 2, "not 2"),
    ],
)
def test_a_command_that_does_something_else_ends_the_script(command, says, code, trouble, tmp_path):
    with pytest.raises(RuntimeError, match=trouble):
        first_hour.carried_out(first_hour.Task("x", (command,), says, code), tmp_path, {}, {})


def test_a_command_that_ends_before_it_is_interrupted_is_told(tmp_path):
    task = first_hour.Task("x", ("sh -c 'echo broken; exit 1'", "true"), "", interrupted="never")
    with pytest.raises(RuntimeError, match="ended with 1, not 130:\nbroken"):
        first_hour.carried_out(task, tmp_path, {"PATH": os.environ["PATH"]}, {})


WAITING = """\
import pathlib, sys, time
try:
    pathlib.Path("begun").touch()
    time.sleep(3)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_script_in_the_background_interrupts_too(tmp_path):
    """There, SIGINT is ignored, and child processes ignore it too unless somebody says otherwise."""
    task = first_hour.Task(
        "x", (f"{sys.executable} waits.py", "true"), "", interrupted="begun", writes={"waits.py": WAITING}
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        first_hour.carried_out(task, tmp_path, {"PATH": os.environ["PATH"]}, {})
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_hangs_is_given_up_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "PATIENCE", 2.5)
    task = first_hour.Task("x", ("echo $$ > number; echo begun; exec sleep 20",), "")
    with pytest.raises(RuntimeError, match="is not done after 2.5 s:\nbegun"):
        first_hour.carried_out(task, tmp_path, {"PATH": os.environ["PATH"]}, {})
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "number").read_text()), 0)


def test_the_quick_start_takes_the_numbers_and_keeps_what_was_not_measured():
    page = first_hour.PAGE.read_text()
    used = {"a typing error": 1000.04, "printed numbers beside ours": 7.26, "own features to a paper's table": 9}
    new = first_hour.renewed(page, used)
    rows = dict(ROW.findall(page))
    changed = {**rows, **{task: f"{seconds:.1f}" for task, seconds in used.items()}}
    together = sum(float(seconds) for task, seconds in changed.items() if task != "together")
    assert dict(ROW.findall(new)) == {
        **changed,
        "together": f"{together:.0f}",
    }
    order = [
        line.split(" | ")[0][2:] for line in new.split(first_hour.HEADING)[1].splitlines() if line.startswith("| ")
    ]
    assert order == [*(task.name for task in (first_hour.SETUP, *first_hour.TASKS)), "together"]
    assert first_hour.renewed(new, {}) == new
    assert new.split(first_hour.HEADING)[0] == page.split(first_hour.HEADING)[0]


@pytest.mark.slow
def test_every_task_of_the_first_hour_works(tmp_path):
    """Nine minutes of a free core: pytest -m slow tests/benchmarks/test_first_hour.py"""
    file = tmp_path / "hour.md"
    script = REPOSITORY / "benchmarks" / "first_hour.py"
    done = subprocess.run([sys.executable, script, "--markdown", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = json.loads(file.with_suffix(".json").read_text())["rows"]
    assert [run["task"] for run in runs] == [task.name for task in first_hour.TASKS]
    assert sum(line.startswith("| ") for line in file.read_text().splitlines()) == len(runs) + 3
