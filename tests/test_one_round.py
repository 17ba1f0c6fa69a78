"""One round of FedAvg enters the files that docs/explanation/architecture.md lists; few modules are imported before."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fcl_bench
from fcl_bench.engine.exchange import Held
from fcl_bench.engine.loop import Federation
from fcl_bench.protocol.context import Task
from tests.conftest import REPOSITORY
from tests.small_runs import run_in

PACKAGE = Path(fcl_bench.__file__).parent
PAGE = REPOSITORY / "docs" / "explanation" / "architecture.md"
#: Three rounds of FedAvg on a network. The second one is traced: `Federation._round` from its call to its return.
SMALL = (
    "method=fedavg",
    "backbone=tiny",
    "backbone.width=4",
    "tasks=1",
    "clients=3",
    "method.training.rounds=3",
    "method.training.epochs=1",
)
#: The most files that a round may enter, and the most functions (`def`; frames of comprehensions, generator expressions
#: and lambdas are none).
MOST_FILES, MOST_FUNCTIONS = 20, 140
#: A closed form on digits, whose first task is over in milliseconds.
CLOSED = ("method=afl", "data=digits")
#: What a run may import before its first task beside torch and what torch imports; other libraries wait.
LIBRARIES = {
    *("numpy", "scipy", "PIL", "safetensors", "threadpoolctl", "filelock", "packaging"),
    *("hydra", "hydra_plugins", "omegaconf", "antlr4", "yaml", "attr", "charset_normalizer"),
}
#: Parts of a library in that list that take long to import.
SLOW_PARTS = {"scipy.stats", "scipy.optimize", "scipy.sparse", "scipy.spatial", "torch._dynamo", "torch._inductor"}
#: The command up to the first line of `Federation.run`, where it prints all modules and leaves.
PROGRAM = """
import sys
import torch
brought = {*sys.modules}
from fcl_bench.cli.app import main
from fcl_bench.engine.loop import Federation

def begun(*_):
    print(*(name for name in sys.modules if name not in brought))
    raise SystemExit

Federation.run = begun
main()
"""


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Files of the package below its folder -> the functions of them that the second round calls."""
    found: dict[str, set[str]] = defaultdict(set)
    numbers: list[int] = []
    one_round = Federation._round

    def look(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        file = Path(code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE) and not code.co_name.startswith("<"):
            found[str(file.relative_to(PACKAGE))].add(f"{code.co_firstlineno} {code.co_name}")

    def traced(federation: Federation, task: Task, number: int, held: Held) -> None:
        numbers.append(number)
        sys.setprofile(look if number == 1 else None)
        try:
            one_round(federation, task, number, held)
        finally:
            sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "_round", traced)
        run_in(tmp_path_factory.mktemp("round"), *SMALL)
    assert numbers == [0, 1, 2]
    return found


def listed() -> set[str]:
    section = PAGE.read_text().partition("## The files that one round enters")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return set(re.findall(r"`([\w/]+\.py)`", "\n".join(rows)))


def test_the_page_lists_the_files_that_a_round_of_fedavg_enters(entered: dict[str, set[str]]) -> None:
    assert {*entered} == listed()


def test_a_round_enters_few_files_and_functions(entered: dict[str, set[str]]) -> None:
    assert len(entered) <= MOST_FILES
    assert sum(map(len, entered.values())) <= MOST_FUNCTIONS


def imported(out: Path, *typed: str) -> list[str]:
    """All modules that a command imports before the first line of `Federation.run`, in a fresh interpreter."""
    command = [sys.executable, "-c", PROGRAM, *typed, f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()  # notes may come before


@pytest.mark.slow
def test_few_modules_are_imported_before_the_loop_begins(tmp_path: Path) -> None:
    own = [name for name in imported(tmp_path, *SMALL) if name.partition(".")[0] == "fcl_bench"]
    assert "fcl_bench.methods.averaging.fedavg" in own
    [most] = re.findall(r"imported at most (\d+) modules", PAGE.read_text())
    assert len(own) <= int(most)


@pytest.mark.slow
@pytest.mark.parametrize("typed", [SMALL, CLOSED], ids=["a network", "a closed form"])
def test_no_library_is_imported_before_it_is_needed(typed: tuple[str, ...], tmp_path: Path) -> None:
    names = imported(tmp_path, *typed)
    libraries = {name.partition(".")[0] for name in names if not name.startswith("_")}
    assert "hydra" in libraries
    assert libraries - {*sys.stdlib_module_names, "fcl_bench", "torch"} <= LIBRARIES
    assert not SLOW_PARTS & {*names}
