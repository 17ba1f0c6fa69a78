"""The loop and the steps of its exchange stay simple; `make lint` refuses what is above 15 anywhere in src."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

#: What runs one round, and what its turns pass: at most this McCabe complexity in each function.
SIMPLE = ("loop", "exchange", "missing", "observation", "transport")
MOST = 8


def test_the_loop_and_the_steps_of_its_exchange_are_simple() -> None:
    pytest.importorskip("ruff")
    files = [str(REPOSITORY / "src" / "fcl_bench" / "engine" / f"{name}.py") for name in SIMPLE]
    limit = f"lint.mccabe.max-complexity={MOST}"
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "C901", "--config", limit, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
