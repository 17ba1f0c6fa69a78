"""The measures of a run: which table shows each, under which heading, and whether higher is better."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
    """

    name: str
    header: str
    section: str
    higher: bool = False
    plain: bool = False
    shown: str = "defined"

    def shown_for(self, means: Iterable[float]) -> bool:
        """Return whether a table with these values (NaN where there is none) shows the measure without being asked."""
        if self.shown == "positive":
            return any(mean > 0 for mean in means)
        return self.shown == "always" or (self.shown == "defined" and not all(map(math.isnan, means)))


def _percent(name: str, header: str, higher: bool = True, shown: str = "on request") -> Measure:
    return Measure(name, f"{header} (%)", "accuracy", higher, plain=True, shown=shown)


#: Name -> measure, in percent, MiB and seconds; NaN where not defined. `A_T_aware` is the accuracy with the task of
#: each test sample given; `A_T_unrouted` is the accuracy with all classes competing, for a method that predicts tasks;
#: `routing` is how often such a method predicts the task correctly after the last task.
MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        _percent("A_avg", "A_avg", shown="always"),
        _percent("A_T", "A_T", shown="always"),
        _percent("forgetting", "forgetting", higher=False, shown="always"),
        _percent("A_T_best", f"A_T, {BEST_ROUND}", shown="defined"),
        _percent("A_avg_tasks", "A_avg, mean over tasks"),
        _percent("A_T_tasks", "A_T, mean over tasks"),
        _percent("forgetting_fedprotip", "forgetting, over T", higher=False),
        _percent("retention", "retention"),
        _percent("stability", "stability, mean over tasks"),
        _percent("plasticity", "plasticity, mean over tasks"),
        _percent("S_T", "S_T, stability"),
        _percent("P_T", "P_T, plasticity"),
        _percent("R_T", "R_T, retention"),
        _percent("A_T_aware", "A_T, task given", shown="defined"),
        _percent("A_T_unrouted", "A_T, all compete", shown="defined"),
        _percent("routing", "task right", shown="defined"),
        Measure("up_max_mib", "upload (MiB)", "communication", shown="always"),
        Measure("raw_mib", "raw samples (MiB)", "communication"),
        Measure("times_raw", "uploads / raw samples", "communication"),
        Measure("up_total_max_mib", "upload of all tasks (MiB)", "communication"),
        Measure("down_max_mib", "download (MiB)", "communication"),
        Measure("adapt_up_mib", "first stage's upload (MiB)", "communication"),
        Measure("model_mib", "upload of models, last task (MiB)", "communication", shown="on request"),
        Measure("bases_mib", "upload of bases, last task (MiB)", "communication", shown="on request"),
        Measure("references_mib", "upload of references, last task (MiB)", "communication", shown="on request"),
        Measure("client_storage_mib", "kept by a client (MiB)", "communication", shown="positive"),
        Measure("client_samples_kept", "raw samples kept", "communication", shown="positive"),
        Measure("revealed_percent", "samples told alone (%)", "communication", shown="positive"),
        Measure("one_sample_sums", "sums of one sample", "communication", shown="positive"),
        Measure("one_sample_moments", "moments of one sample", "communication", shown="positive"),
        Measure("epsilon", "epsilon", "communication"),
        Measure("synthetic_images", "synthetic images sent", "communication", shown="positive"),
        Measure("sample_gradients", "samples' gradients sent", "communication", shown="positive"),
        Measure("reconstructed_images", "images reconstructed", "communication", shown="positive"),
        Measure("fedran_mib", "FedRAN's count (MiB)", "communication"),
        Measure("stsa_mib", "STSA's count (MiB)", "communication"),
        Measure("seconds_per_task", "seconds per task", "runtime", shown="always"),
        Measure("client_seconds", "clients' seconds", "runtime"),
        Measure("server_seconds", "server's seconds", "runtime"),
        Measure("feature_seconds", "seconds for features, as run", "runtime", shown="on request"),
        Measure("feature_cost_seconds", "seconds for features, uncached", "runtime", shown="on request"),
        Measure("cumulative_seconds", "seconds of all clients, server, features", "runtime", shown="on request"),
        Measure("total_seconds", "seconds in all", "runtime", shown="on request"),
        Measure("peak_memory_mib", "peak memory (MiB)", "runtime", shown="on request"),
        Measure("client_gradient_steps", "clients' gradient steps", "runtime", shown="on request"),
        Measure("client_samples_trained", "samples trained on, clients", "runtime", shown="on request"),
        Measure("client_samples_forward", "samples passed forward, clients", "runtime", shown="on request"),
        Measure("server_gradient_steps", "server's gradient steps", "runtime", shown="on request"),
    )
}


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
