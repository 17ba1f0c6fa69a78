"""A small share of `make fuzz`: malformed input is read, or refused in one line, and what is planted is found."""

from __future__ import annotations

import pytest

from benchmarks.faults.part import draw
from benchmarks.fuzz.messages import Frames
from benchmarks.fuzz.target import quietly, trouble_of
from benchmarks.fuzz.targets import TARGETS

#: Decoders whose inputs, or whose good input, take long to make or to read.
_SLOW = {"uploads": 2000, "runs": 20, "tables": 8, "parquet": 8, "split files": 40, "policies": 40}


def findings(target, inputs: int) -> list[str]:
    found: list[str] = []

    def work() -> int:
        found.extend(trouble_of(target, target.drawn(draw(1, target.name, number))) for number in range(inputs))
        return 0

    quietly(work)
    return [trouble for trouble in found if trouble]


@pytest.mark.slow_cases(*_SLOW)
@pytest.mark.parametrize("name", TARGETS)
def test_malformed_input_is_read_or_refused_in_one_line(name, tmp_path):
    assert findings(TARGETS[name](tmp_path), _SLOW.get(name, 60)) == []


def test_an_error_of_another_kind_is_a_finding(tmp_path):
    class Broken(Frames):
        def read(self, given: bytes) -> object:
            raise KeyError("of ours") if len(given) % 2 else ConnectionError("two\nlines")

    found = findings(Broken(tmp_path), 20)
    assert len(found) == 20
    assert {trouble.partition(":")[0] for trouble in found} == {"KeyError", "a message that is no line"}


def test_shares_are_of_a_million():
    assert sum(target.share for target in TARGETS.values()) == 1_000_000
