"""The measures of a run: which table shows each, under which heading, and whether higher is better."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fcl_bench.config import YAML_LOADER

SECTIONS = ("accuracy", "communication", "runtime")
#: The note on `A_T_best` wherever it is shown: it is not a result of a method, which has no test data to choose by.
BEST_ROUND = "best over rounds, chosen on test data"


@dataclass(frozen=True)
class Measure:
    """One column of `collect`.

    Attributes:
        name: the name of the column, also for `--metrics`.
        header: the heading in tables, with the unit.
        section: the table that shows it.
        higher: whether higher is better.
        plain: whether it always has two decimals (percent and points); others keep three significant digits.
        shown: when a table shows it: "always", if any run has it ("defined"), if any run has some of it ("positive"),
            or only on request ("on request").
        note: what the note below a table says of it; "": nothing.
    """

    name: str
    header: str
    section: str
    higher: bool = False
    plain: bool = False
    shown: str = "defined"
    note: str = ""

    def shown_for(self, means: Iterable[float]) -> bool:
        """Return whether a table with these values (NaN where there is none) shows the measure without being asked."""
        if self.shown == "positive":
            return any(mean > 0 for mean in means)
        return self.shown == "always" or (self.shown == "defined" and not all(map(math.isnan, means)))


_READ = yaml.load(Path(__file__).with_name("measures.yaml").read_text(), Loader=YAML_LOADER)
#: Name -> measure, in the order of tables.
MEASURES: dict[str, Measure] = {name: Measure(name, **about) for name, about in _READ.items()}

_STAGES = "communication.by_stage"
#: For the measures that a record has after every task: the part and the name of the series there, which has bytes if it
#: is one of a stage.
SERIES = {
    "A_T": ("metrics", "accuracy"),
    "S_T": ("metrics", "stability_by_task"),
    "P_T": ("metrics", "plasticity_by_task"),
    "R_T": ("metrics", "retention_by_task"),
    "routing": ("routing", "accuracy"),
    **{f"{stage}_mib": (f"{_STAGES}.{stage}", "up_max_bytes_by_task") for stage in ("model", "bases", "references")},
    "cumulative_seconds": ("runtime", "cumulative_seconds"),
}


@dataclass(frozen=True)
class ByTask:
    """One entry of a series; `S_3` is the stability after the third task.

    Attributes:
        last: the measure that is the series' last entry.
        task: the number of the task, from 1.
    """

    last: str
    task: int

    @property
    def measure(self) -> Measure:
        """Return the measure, like that of the last task."""
        whole = MEASURES[self.last]
        name = f"{self.last.removesuffix('_T')}_{self.task}"
        header = whole.header.replace("_T", f"_{self.task}").replace("last task", f"task {self.task}")
        header = header if header != whole.header else f"{header}, up to task {self.task}"
        return Measure(name, header, whole.section, whole.higher, whole.plain, "on request")

    def of(self, record: Mapping[str, Any], part: str = "") -> float | None:
        """Return the value in a run record or in another `part` of its metrics; None where it is not defined."""
        own, series = SERIES[self.last]
        found: Any = record
        for key in (part or own).split("."):
            found = found.get(key) or {}
        values = found.get(series, [])
        value = values[self.task - 1] if self.task <= len(values) else None
        return value if value is None or not own.startswith(_STAGES) else value / 2**20


def by_task(name: str) -> ByTask | None:
    """Parse `S_3` or `cumulative_seconds_10`; None if `name` is not a measure after one of the tasks."""
    match = re.fullmatch(r"(\w+)_([1-9]\d*)", name)
    last = next((last for last in SERIES if match and last.removesuffix("_T") == match[1]), None)
    return ByTask(last, int(match[2])) if match and last else None


def measure_named(name: str) -> Measure | None:
    """Return one of `MEASURES`, or a measure of a single task; None if `name` is neither."""
    single = by_task(name)
    return single.measure if single else MEASURES.get(name)


def direction(metric: str) -> Measure | None:
    """Return our measure for a paper's metric (A_T_tasks for task_aware.A_T_tasks); None if we have no such measure."""
    return measure_named(metric.rpartition(".")[2])
