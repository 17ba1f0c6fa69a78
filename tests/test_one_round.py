"""One round of FedAvg enters the files that docs/explanation/architecture.md lists, and no others."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fcl_bench
from fcl_bench.methods.gradient.server import GradientServer
from tests.conftest import REPOSITORY
from tests.small_runs import run_in

PACKAGE = Path(fcl_bench.__file__).parent
PAGE = REPOSITORY / "docs" / "explanation" / "architecture.md"
#: Three rounds of FedAvg on a network: the second one is traced, whole, from one end of a round to the next.
SMALL = (
    "method=fedavg",
    "backbone=tiny",
    "backbone.width=4",
    "tasks=1",
    "clients=3",
    "method.training.rounds=3",
    "method.training.epochs=1",
)
#: The most files and functions that a round may enter. The design asks for 20 and 140.
MOST_FILES, MOST_FUNCTIONS = 34, 210


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Files of the package below its folder -> the functions of them that the second round calls."""
    found: dict[str, set[str]] = defaultdict(set)
    ends = 0
    finish_round = GradientServer.finish_round

    def look(frame: FrameType, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            found[str(file.relative_to(PACKAGE))].add(f"{frame.f_code.co_firstlineno} {frame.f_code.co_name}")

    def traced(server: GradientServer) -> None:
        nonlocal ends
        finish_round(server)
        ends += 1
        sys.setprofile(look if ends == 1 else None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientServer, "finish_round", traced)
        try:
            run_in(tmp_path_factory.mktemp("round"), *SMALL)
        finally:
            sys.setprofile(None)
    assert ends == 3
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
