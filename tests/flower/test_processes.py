"""What waits for a process that has ended says so at once."""

from __future__ import annotations

import time

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
