"""Peak memory of whole runs: one measurement each, beside a run that differs in one thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite import children
from suite.lines import ABOVE, TIMES
from suite.sides import Beside, each, limit, ours, sizes

pytestmark = pytest.mark.usefixtures("cpu_only")

#: Memory is not noisy, and these take too long for rounds: one measurement, no warm-up.
ONCE = True


class Peak:
    """Runs a command and keeps its peak."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self.gib = 0.0

    def __call__(self) -> None:
        self.gib = children.peak_gib(self._command)


@sizes(smoke=[{"M": 64, "r": 16}], long=[{"M": 16384, "r": 1024}])
def bench_memory_fedran(case, beside: Beside, features_file: Path, tmp_path: Path) -> None:
    """Above a run of the same features with next to no statistics."""
    knobs = ["method=fedran", f"method.M={case.M}", f"method.rank={case.r}"]
    large = Peak(children.whole_run(features_file, tmp_path / "large", *knobs))
    tiny = Peak(children.whole_run(features_file, tmp_path / "tiny", "method=stsa", "method.M=16"))
    beside(ours("fcl-bench", each(large)), limit("the same features, STSA at M=16", each(tiny)))
    beside.add_values({ABOVE: large.gib - tiny.gib, "GiB at the peak": large.gib})


@sizes(long=[{"method": "afl", "K": 10000}])
def bench_memory_clients(case, beside: Beside, features_file: Path, tmp_path: Path) -> None:
    """Over the same run with 100 clients."""

    def run(clients: int) -> Peak:
        knobs = [f"method={case.method}", f"clients={clients}", "partition.min_size=0"]
        return Peak(children.whole_run(features_file, tmp_path / str(clients), *knobs))

    many, few = run(case.K), run(100)
    beside(ours("fcl-bench", each(many)), limit("K=100", each(few)))
    beside.add_values({TIMES: many.gib / few.gib, "GiB at the peak": many.gib})
