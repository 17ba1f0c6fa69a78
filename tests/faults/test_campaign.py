"""The campaign in its quick size, and that each of its parts finds what is planted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

#: Cases of each part; `make faults` tries thousands.
QUICK = {"writes": 12, "kills": 4, "concurrency": 2, "configurations": 16, "combinations": 4, "files": 12, "uploads": 8}


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow_cases("combinations", "concurrency", "configurations", "files", "kills", "uploads", "writes")
@pytest.mark.parametrize("part", QUICK)
def test_nothing_fails(part):
    done = in_a_process("benchmarks.faults", part, "--most", str(QUICK[part]))
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"^(\w+): (\d+) tried, (\d+) held, 0 failed", done.stdout, re.MULTILINE)
    assert told, done.stdout
    assert told[1] == part
    assert told[2] == told[3]
    assert int(told[2]) >= 0.7 * QUICK[part]


@pytest.fixture(scope="module")
def planted() -> dict[str, dict[str, int]]:
    done = in_a_process("tests.faults.planted")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_what_is_planted_is_found(planted):
    assert len(planted) == 7
    for name, found in planted.items():
        assert found["honest"] == 0, name
        assert found["planted"] > 0, name


@pytest.mark.slow
def test_a_wrong_part_is_a_line_of_the_parser():
    done = in_a_process("benchmarks.faults", "nothing")
    assert done.returncode == 2
    assert "the parts are writes, kills, concurrency, configurations, combinations, files, uploads" in done.stderr
