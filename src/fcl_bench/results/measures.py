"""What a run measures: which table shows it, under which heading, and which way is better."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

SECTIONS = ("accuracy", "communication", "runtime")
#: What is said of `A_T_best` wherever it is shown: it is no result of a method, which has no test data to choose by.
BEST_ROUND = "best over rounds, chosen on test data"


@dataclass(frozen=True)
class Measure:
    """One column of `collect`.

    Attributes:
        name: of the column, and of `--metrics`.
        header: in tables, with its unit.
        section: the table it stands in.
        higher: whether more is better.
        plain: percent and points, with two decimals at any size; others keep three digits that count.
        shown: unasked "always", only where any run has it ("defined") or has some of it ("positive"), or not ("asked").
    """

    name: str
    header: str
    section: str
    higher: bool = False
    plain: bool = False
    shown: str = "defined"

    def shown_for(self, means: Iterable[float]) -> bool:
        """Whether a table with these values, NaN where there is none, shows the measure unasked."""
        if self.shown == "positive":
            return any(mean > 0 for mean in means)
        return self.shown == "always" or (self.shown == "defined" and not all(map(math.isnan, means)))


def _percent(name: str, header: str, higher: bool = True, shown: str = "asked") -> Measure:
    return Measure(name, f"{header} (%)", "accuracy", higher, plain=True, shown=shown)


#: By name, in percent, MiB and seconds; NaN where not defined. `A_T_aware`: with the task of each test sample given;
#: `A_T_unrouted`: with all classes competing, of a method that predicts tasks; `routing`: how often it is right about
#: the task, after the last one.
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
        _percent("stability", "stability"),
        _percent("plasticity", "plasticity"),
        _percent("A_T_aware", "A_T, task given", shown="defined"),
        _percent("A_T_unrouted", "A_T, all compete", shown="defined"),
        _percent("routing", "task right", shown="defined"),
        Measure("up_max_mib", "upload (MiB)", "communication", shown="always"),
        Measure("raw_mib", "raw samples (MiB)", "communication"),
        Measure("times_raw", "uploads / raw samples", "communication"),
        Measure("up_total_max_mib", "upload of all tasks (MiB)", "communication"),
        Measure("down_max_mib", "download (MiB)", "communication"),
        Measure("adapt_up_mib", "first stage's upload (MiB)", "communication"),
        Measure("client_storage_mib", "kept by a client (MiB)", "communication", shown="positive"),
        Measure("client_samples_kept", "raw samples kept", "communication", shown="positive"),
        Measure("told_percent", "samples told alone (%)", "communication", shown="positive"),
        Measure("one_sample_sums", "sums of one sample", "communication", shown="positive"),
        Measure("one_sample_moments", "moments of one sample", "communication", shown="positive"),
        Measure("synthetic_images", "synthetic images sent", "communication", shown="positive"),
        Measure("sample_gradients", "samples' gradients sent", "communication", shown="positive"),
        Measure("reconstructed_images", "images reconstructed", "communication", shown="positive"),
        Measure("fedran_mib", "FedRAN's count (MiB)", "communication"),
        Measure("stsa_mib", "STSA's count (MiB)", "communication"),
        Measure("seconds_per_task", "seconds per task", "runtime", shown="always"),
        Measure("client_seconds", "clients' seconds", "runtime"),
        Measure("server_seconds", "server's seconds", "runtime"),
        Measure("feature_seconds", "seconds for features, as run", "runtime", shown="asked"),
        Measure("feature_cost_seconds", "seconds for features, uncached", "runtime", shown="asked"),
        Measure("total_seconds", "seconds in all", "runtime", shown="asked"),
        Measure("peak_memory_mib", "peak memory (MiB)", "runtime", shown="asked"),
    )
}


def direction(metric: str) -> Measure | None:
    """The measure that a paper's metric is (task_aware.A_T_tasks is an A_T_tasks); None for what is not ours."""
    return MEASURES.get(metric.rpartition(".")[2])
