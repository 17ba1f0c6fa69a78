"""What waits for a process that has ended says so at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.flower.processes import commands, waited_for


def test_a_process_that_ends_is_not_waited_for(tmp_path):
    begin = time.monotonic()
    with commands(tmp_path) as start:
        needed = {"link": start("link", "sh", "-c", "echo no port; exit 3")}
        with pytest.raises(AssertionError, match=r"link ended with 3: no port"):
            waited_for(lambda: False, tmp_path, needed)
        waited_for(lambda: True, tmp_path, needed)
    assert time.monotonic() - begin < 30


def test_what_a_process_leaves_behind_ends_with_the_block(tmp_path):
    with commands(tmp_path) as start:
        needed = {"parent": start("parent", "sh", "-c", "sleep 600 & echo $! > part; mv part child; wait")}
        waited_for((tmp_path / "child").exists, tmp_path, needed)
        pid = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{pid}/stat")
    until = time.monotonic() + 30
    while state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)
