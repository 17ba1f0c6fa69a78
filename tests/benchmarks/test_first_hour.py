"""A newcomer's first hour: its commands stand on the pages that a newcomer reads, and they do what they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import first_hour
import pytest

from tests.conftest import REPOSITORY

PAGES = "\n".join((REPOSITORY / page).read_text() for page in ("README.md", "docs/quickstart.md"))


@pytest.mark.parametrize("task", first_hour.TASKS, ids=lambda task: task.name)
def test_the_commands_are_those_of_the_pages(task):
    """What the reader's own files are called, and what is typed wrongly on purpose, aside."""
    for command in task.commands:
        told = command.replace("{run}", "RUN").partition(" > ")[0].removeprefix("PYTHONPATH=.:$PYTHONPATH ")
        if task.code == 0 and not told.startswith("python "):
            assert told in PAGES or told in (REPOSITORY / "docs" / "adding.md").read_text()


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


@pytest.mark.long
def test_every_task_of_the_first_hour_works(tmp_path):
    """Nine minutes of a free core: pytest -m long tests/benchmarks/test_first_hour.py"""
    file = tmp_path / "hour.md"
    script = REPOSITORY / "benchmarks" / "first_hour.py"
    done = subprocess.run([sys.executable, script, "--markdown", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = json.loads(file.with_suffix(".json").read_text())["runs"]
    assert [run["task"] for run in runs] == [task.name for task in first_hour.TASKS]
    assert sum(line.startswith("| ") for line in file.read_text().splitlines()) == len(runs) + 3
