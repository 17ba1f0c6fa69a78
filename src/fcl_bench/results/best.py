"""Who is the best of several rows, and who is not distinguishable from it: intervals of paired differences.

The same seed is the same stream, so rows are compared seed by seed, and test sample by test sample where the runs keep
their answers. docs/how-to/tables.md has the formula, its sources, and what it does not cover.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from fcl_bench.randomness import generator
from fcl_bench.results.measures import by_task

#: What tables say beside their marks.
LEGEND = (
    "In each setting the best is bold, and with it all that are not distinguishable from it: the 95 % interval of the "
    "difference, paired by seed and by stored answers, holds 0."
)
#: Words of verdicts: the best itself, and what has no interval.
BEST = "the best"
ONE_SEED, UNPAIRED = "one seed, no interval", "no seed in common with the best, not compared"
#: The runs of one row, see `judged`.
Runs = Mapping[Any, tuple[float, str]]
#: From a measure, a run's number and its folder to what each test sample adds to it, see `stored_shares`.
Shares = Callable[[str, float, str], "pd.Series | None"]
_TAIL = 0.025
_DRAWS = 1000


@dataclass(frozen=True)
class Verdict:
    """How a row stands beside the best of its group.

    Attributes:
        mark: "bold" for the best and what is not distinguishable from it; "" for others, and where nothing competes.
        why: the same in words; "" where nothing competes.
        behind: how far the row is behind the best in the seeds that both have, in the measure's own unit.
        low, high: the ends of its 95 % interval; NaN without one.
        samples: the number of test samples that the interval is over; 0 for seeds alone.
    """

    mark: str = ""
    why: str = ""
    behind: float = math.nan
    low: float = math.nan
    high: float = math.nan
    samples: int = 0


def judged(rows: Sequence[Runs | None], measure: str, higher: bool, shares: Shares | None = None) -> list[Verdict]:
    """Return a verdict for each row of one group.

    Rows without runs (None) or with a number that is not finite do not compete, and nothing is marked if fewer than two
    do. The best has the highest (lowest) mean over its own seeds, among rows of several seeds where there are any; each
    other row is compared with it in the seeds that both have. Neither the order of rows nor that of runs matters.

    Args:
        rows: the runs of each row: seed -> the number, and the run's folder ("" where there is none).
        measure: what the numbers are; the accuracies `A_T`, `A_avg` and `A_3` are compared by sample too.
        higher: whether higher is better.
        shares: where the answers of runs are, if not in their folders; `stored_shares` if None.
    """
    shares = shares or stored_shares
    sign = 1.0 if higher else -1.0
    rivals = {p: row for p, row in enumerate(rows) if row and all(math.isfinite(value) for value, _ in row.values())}
    if len(rivals) < 2:
        return [Verdict()] * len(rows)

    def rank(place: int) -> tuple[object, ...]:
        own = [rivals[place][seed] for seed in sorted(rivals[place], key=str)]
        values = [sign * value for value, _ in own]
        return len(values) > 1, float(np.mean(values)), len(values), values, [folder for _, folder in own]

    first = max(rivals, key=rank)
    verdicts = {place: _beside(rivals[first], row, measure, sign, shares) for place, row in rivals.items()}
    verdicts[first] = Verdict("bold", BEST, 0.0)
    return [verdicts.get(place, Verdict()) for place in range(len(rows))]


def remarks(verdicts: Iterable[tuple[str, Verdict]]) -> str:
    """Return what has to be said of (label, verdict) below a table: what has no interval, and what is not compared."""
    verdicts = list(verdicts)
    apart = dict.fromkeys(label for label, verdict in verdicts if verdict.why == UNPAIRED)
    alone = any(ONE_SEED in verdict.why for _, verdict in verdicts)
    said = "Without an interval (one seed, no predictions=true) the best number alone is bold." if alone else ""
    return " ".join(filter(None, [said, f"Not compared, no seed in common: {', '.join(apart)}." if apart else ""]))


def _beside(best: Runs, row: Runs, measure: str, sign: float, shares: Shares) -> Verdict:
    """Compare one row with the best: E = d + (sampled - d) + t s / sqrt(n), of which the tails are cut off."""
    seeds = sorted(best.keys() & row.keys(), key=str)
    if not seeds:
        return Verdict(why=UNPAIRED)
    differences = np.array([sign * (best[seed][0] - row[seed][0]) for seed in seeds])
    behind, n = float(differences.mean()), len(seeds)
    parts, others = _parts(best, row, seeds, measure, shares)
    draws = np.full(_DRAWS, behind)
    if n > 1:
        draws += differences.std(ddof=1) / math.sqrt(n) * _student(n - 1)
    if parts is not None:
        # In blocks, since the product is of 64-bit numbers.
        drawn = [block @ parts for block in np.array_split(_weights(len(parts)), 20)]
        draws += sign * (np.concatenate(drawn) - parts.sum())
    known = n > 1 or parts is not None
    low, high = np.quantile(draws, [_TAIL, 1 - _TAIL], method="hazen").tolist() if known else (math.nan, math.nan)
    over = f"{n} seed{'s' if n > 1 else ''}{others if parts is None else f', {len(parts)} test samples'}"
    told = f"behind the best by {behind:.3g} [{low:.3g}, {high:.3g}] ({over})" if known else ONE_SEED + others
    is_told = (low if known else behind) > 0
    samples = 0 if parts is None else len(parts)
    return Verdict("" if is_told else "bold", told, behind, low, high, samples)


def _parts(best: Runs, row: Runs, seeds: Sequence[Any], measure: str, shares: Shares) -> tuple[np.ndarray | None, str]:
    """Return (N,) what each test sample adds to the mean difference over the seeds; None and why without answers."""
    total = pd.Series(dtype=float)
    for seed in seeds:
        ours, theirs = (shares(measure, *runs[seed]) for runs in (best, row))
        if ours is None or theirs is None:
            return None, ""
        if not ours.index.equals(theirs.index):
            return None, ", of other test samples"
        total = (ours - theirs).add(total, fill_value=0.0)
    return total.to_numpy() / len(seeds), ""


@functools.lru_cache(maxsize=128)
def stored_shares(measure: str, value: float, folder: str) -> pd.Series | None:
    """Return sample -> what its answers add to a run's accuracy, which they sum up to; None if that is not stored."""
    single = by_task(measure)
    file = Path(folder) / "predictions.parquet"
    wanted = measure in ("A_T", "A_avg") or (single is not None and single.last == "A_T")
    if not wanted or not folder or not file.is_file():
        return None
    answers = pd.read_parquet(file, columns=["after", "sample", "label", "prediction"])
    if measure != "A_avg":
        after = answers["after"].max() if single is None else single.task - 1
        answers = answers[answers["after"] == after]
    after = answers["after"]
    shares = 100.0 * (answers["label"] == answers["prediction"]) / after.map(after.value_counts()) / after.nunique()
    # Answers to something else than what was measured are of no use.
    return shares.groupby(answers["sample"]).sum() if np.isclose(shares.sum(), value, rtol=0, atol=1e-6) else None


@functools.cache
def _student(freedom: int) -> np.ndarray:
    """Return (_DRAWS,) quantiles of Student's t, equally likely."""
    return stdtrit(freedom, (np.arange(_DRAWS) + 0.5) / _DRAWS)


@functools.lru_cache(maxsize=1)  # 10 MB for 10,000 samples
def _weights(samples: int) -> np.ndarray:
    """Return (_DRAWS, samples): how often each draw, with replacement, has each test sample."""
    drawn = generator(0, "bootstrap").multinomial(samples, np.full(samples, 1 / samples), size=_DRAWS)
    return drawn.astype(np.uint8)  # more than 255 times needs more samples, of which none is drawn so often
