"""The installed command from its start to its end, beside importing torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite import children
from suite.sides import Beside, Side, each, limit, ours, sizes

pytestmark = pytest.mark.usefixtures("cpu_only")


def import_torch() -> Side:
    """A new one for each case, since a side keeps its seconds."""
    return limit("import torch", each(lambda: children.run(*children.python("import torch"))))


@sizes(
    full=[{"what": "afl"}, {"what": "stsa_e method.M=1250"}, {"what": "fedran method.M=2048 method.rank=512"}],
)
def bench_whole_run(case, beside: Beside, features_file: Path, tmp_path: Path) -> None:
    method, *knobs = case.what.split()
    command = children.whole_run(features_file, tmp_path, f"method={method}", *knobs)
    beside(ours("fcl-bench", each(lambda: children.run(*command))), import_torch())


#: By name, the commands of the case.
STARTS = {
    "fcl-bench --help": [children.COMMAND, "--help"],
    "import fcl_bench": children.python("import fcl_bench"),
}


@sizes(smoke=[{"what": "import fcl_bench"}], quick=[{"what": what} for what in STARTS])
def bench_start_up(case, beside: Beside) -> None:
    beside(ours(case.what, each(lambda: children.run(*STARTS[case.what]))), import_torch())
