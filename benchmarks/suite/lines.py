"""The suite's performance bounds ("lines") in one place: their cases, ratios and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from suite.results import Case, Results, rate_ratio, ratio
from suite.sides import LIMIT, PEER

#: rate: operations per second over the limit's; limit: seconds over the limit's; peer: the peer's seconds over ours;
#: seconds: ours; value: one of the case's further numbers.
Kind = Literal["rate", "limit", "peer", "seconds", "value"]


@dataclass(frozen=True)
class Line:
    """One bound on one case.

    Attributes:
        case: its name.
        kind: what is bounded.
        bound: at least it for "rate" and "peer", at most it otherwise.
        beside: what the limit, the peer or the value is called; "": the first.
    """

    case: str
    kind: Kind
    bound: float
    beside: str = ""

    @property
    def at_least(self) -> bool:
        return self.kind in ("rate", "peer")

    def measured(self, case: Case) -> float | None:
        """The bounded number; None if the case does not have it."""
        if self.kind == "seconds":
            return case.ours.median
        if self.kind == "value":
            return case.values.get(self.beside)
        sides = case.beside(PEER if self.kind == "peer" else LIMIT)
        for side in sides:
            if self.beside in ("", side.what):
                if self.kind == "rate":
                    return rate_ratio(case.ours, side)
                return ratio(side, case.ours) if self.kind == "peer" else ratio(case.ours, side)
        return None

    def holds(self, measured: float) -> bool:
        return measured >= self.bound if self.at_least else measured <= self.bound

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        words = {
            "rate": f"{100 * self.bound:g} % of the limit's rate",
            "limit": f"{self.bound:g} x the limit",
            "peer": f"{self.bound:g} x faster than the peer",
            "seconds": f"{self.bound:g} s",
            "value": f"{self.bound:g} {self.beside}",
        }
        return f"{sign} {words[self.kind]}" + (f" ({self.beside})" if self.beside and self.kind != "value" else "")


SVD = "thin SVD"
PAPERS_MERGE = "QR and SVD"
GRAM_MERGE = "product and eigh"
PAIRWISE = "the pairwise update of Eq. 8-11"
GRAM_ERROR = "Gram error over the optimum, less 1"
ABOVE = "GiB above the tiny run"
TIMES = "times the memory at K=100"

_STATISTICS = "statistics: n=10000 d=512 M=5000 C=10 {}"
_SUMMARY = "client_summary: n=2000 M=8192 r=1024 {}"
_MERGE = "merge: M=8192 r=1024 K=5 {}"
_AFL = "afl_server: K=1000 d=512 C={} float64"
_STSA_E = "stsa_e_server: M={} K={} K_D=10 C=10 float64"
DTYPES = ("float32", "float64")

LINES: tuple[Line, ...] = (
    *(Line(_STATISTICS.format(dtype), "rate", 0.7) for dtype in DTYPES),
    *(Line(_SUMMARY.format(dtype), "peer", 5, SVD) for dtype in DTYPES),
    *(Line(_SUMMARY.format(dtype), "value", 1e-6, GRAM_ERROR) for dtype in DTYPES),
    *(Line(_MERGE.format("float64"), "limit", 1.5, what) for what in (PAPERS_MERGE, GRAM_MERGE)),
    Line(_STSA_E.format(5000, 25), "limit", 2),
    Line(_STSA_E.format(5000, 25), "peer", 50),
    *(Line(_AFL.format(C), "limit", 1.3) for C in (10, 100)),
    *(Line(_AFL.format(C), "peer", 50, PAIRWISE) for C in (10, 100)),
    Line("whole_run: afl", "seconds", 4),
    Line("whole_run: stsa_e method.M=1250", "seconds", 6),
    Line("whole_run: fedran method.M=2048 method.rank=512", "seconds", 20),
    Line("start_up: fcl-bench --help", "seconds", 1),
    Line("start_up: import fcl_bench", "seconds", 0.3),
    Line("memory_fedran: M=16384 r=1024", "value", 1.5, ABOVE),
    Line("memory_clients: afl K=10000", "value", 1.1, TIMES),
)


@dataclass(frozen=True)
class Checked:
    """A line and what was measured for it; `measured` None: its case was not run."""

    line: Line
    measured: float | None

    @property
    def holds(self) -> bool | None:
        return None if self.measured is None else self.line.holds(self.measured)


def check(results: Results) -> list[Checked]:
    """Compare every line with its measurement in `results`."""
    checked = []
    for line in LINES:
        case = results.cases.get(line.case)
        checked.append(Checked(line, None if case is None else line.measured(case)))
    return checked
