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
from typing import Any, NamedTuple

import numpy as np
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
Shares = Callable[[str, float, str], tuple[np.ndarray, np.ndarray] | None]
_ANSWERS = ["after", "sample", "label", "prediction"]
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
    sides = {place: _side(rivals[first], row, measure, sign, shares) for place, row in rivals.items() if place != first}
    sampled = _resampled({place: side.parts for place, side in sides.items() if side.parts is not None})
    verdicts = {place: _verdict(side, sampled.get(place)) for place, side in sides.items()}
    verdicts[first] = Verdict("bold", BEST, 0.0)
    return [verdicts.get(place, Verdict()) for place in range(len(rows))]


def remarks(verdicts: Iterable[tuple[str, Verdict]]) -> str:
    """Return what has to be said of (label, verdict) below a table: what has no interval, and what is not compared."""
    verdicts = list(verdicts)
    apart = dict.fromkeys(label for label, verdict in verdicts if verdict.why == UNPAIRED)
    alone = any(ONE_SEED in verdict.why for _, verdict in verdicts)
    unpaired = "Without an interval (one seed, no predictions=true) the best number alone is bold." if alone else ""
    return " ".join(filter(None, [unpaired, f"Not compared, no seed in common: {', '.join(apart)}." if apart else ""]))


class _Side(NamedTuple):
    """A row beside the best.

    Attributes:
        differences: (n,) how far it is behind in each seed that both have.
        parts: (N,) what each test sample adds to their mean; None without answers.
        others: why there are no answers, if they are of other test samples.
    """

    differences: np.ndarray
    parts: np.ndarray | None
    others: str


def _side(best: Runs, row: Runs, measure: str, sign: float, shares: Shares) -> _Side:
    seeds = sorted(best.keys() & row.keys(), key=str)
    differences = np.array([sign * (best[seed][0] - row[seed][0]) for seed in seeds])
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for seed in seeds:
        ours, theirs = (shares(measure, *runs[seed]) for runs in (best, row))
        if ours is None or theirs is None:
            return _Side(differences, None, "")
        if not np.array_equal(ours[0], theirs[0]):
            return _Side(differences, None, ", of other test samples")
        parts.append((ours[0], sign * (ours[1] - theirs[1]) / len(seeds)))
    if not parts:
        return _Side(differences, None, "")
    samples = parts[0][0]
    if not all(np.array_equal(samples, own) for own, _ in parts):
        samples = functools.reduce(np.union1d, [own for own, _ in parts])
    total = np.zeros(len(samples))
    for own, adds in parts:
        total[np.searchsorted(samples, own)] += adds
    return _Side(differences, total, "")


def _verdict(side: _Side, sampled: np.ndarray | None) -> Verdict:
    """Judge a row by E = d + (sampled - d) + t s / sqrt(n), of which the tails are cut off.

    Args:
        sampled: (_DRAWS,) sampled - d; None without answers.
    """
    n = len(side.differences)
    if not n:
        return Verdict(why=UNPAIRED)
    behind = float(side.differences.mean())
    draws = np.full(_DRAWS, behind) if sampled is None else behind + sampled
    if n > 1:
        draws = draws + side.differences.std(ddof=1) / math.sqrt(n) * _student(n - 1)
    known = n > 1 or sampled is not None
    low, high = np.quantile(draws, [_TAIL, 1 - _TAIL], method="hazen").tolist() if known else (math.nan, math.nan)
    samples = 0 if side.parts is None else len(side.parts)
    over = f"{n} seed{'s' if n > 1 else ''}{f', {samples} test samples' if samples else side.others}"
    why = f"behind the best by {behind:.3g} [{low:.3g}, {high:.3g}] ({over})" if known else ONE_SEED + side.others
    is_behind = (low if known else behind) > 0
    return Verdict("" if is_behind else "bold", why, behind, low, high, samples)


def _resampled(parts: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Return (_DRAWS,) per row: how much the sums of its parts, (N,), change when samples are drawn anew."""
    found: dict[int, np.ndarray] = {}
    for samples in {len(one) for one in parts.values()}:
        alike = {place: one for place, one in parts.items() if len(one) == samples}
        columns = np.stack(list(alike.values()), axis=1)
        # All rows at once, and in blocks, since the products are of 64-bit numbers.
        drawn = np.concatenate([block @ columns for block in np.array_split(_weights(samples), 20)])
        found |= zip(alike, (drawn - columns.sum(axis=0)).T, strict=True)
    return found


def stored_shares(measure: str, value: float, folder: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return test samples in order, and what the answers to each add to a run's accuracy, which they sum up to; None
    if that is not stored.
    """
    single = by_task(measure)
    task = single.task if single is not None and single.last == "A_T" else 0
    if not folder or not (task or measure in ("A_T", "A_avg")):
        return None
    found = _shares(folder, task).get("A_T" if task else measure)
    # Answers to something else than what was measured are of no use.
    return found if found is not None and np.isclose(found[1].sum(), value, rtol=0, atol=1e-6) else None


@functools.lru_cache(maxsize=512)  # 80 MB for 10,000 samples
def _shares(folder: str, task: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return `A_T` -> the result of `stored_shares` after a task, from 1; for 0 after the last one, and `A_avg`."""
    file = Path(folder) / "predictions.parquet"
    if not file.is_file():
        return {}
    import pyarrow.parquet  # only now, since few runs keep their answers

    read = pyarrow.parquet.ParquetFile(file, memory_map=True).read(_ANSWERS, use_threads=False)
    after, sample, label, prediction = (read[name].to_numpy() for name in _ANSWERS)
    right, last = label == prediction, after == (task - 1 if task else after.max())
    chosen = {"A_T": last} if task else {"A_T": last, "A_avg": np.ones_like(last)}
    return {measure: _summed(after[which], sample[which], right[which]) for measure, which in chosen.items()}


def _summed(after: np.ndarray, sample: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples that occur, and 100 times the mean over tasks of the share of right answers, by sample."""
    sizes = np.bincount(after)
    shares = np.bincount(sample, 100.0 * right / sizes[after] / np.count_nonzero(sizes))
    samples = np.flatnonzero(np.bincount(sample))
    return samples, shares[samples]


@functools.cache
def _student(freedom: int) -> np.ndarray:
    """Return (_DRAWS,) quantiles of Student's t, equally likely."""
    return stdtrit(freedom, (np.arange(_DRAWS) + 0.5) / _DRAWS)


@functools.lru_cache(maxsize=1)  # 10 MB for 10,000 samples
def _weights(samples: int) -> np.ndarray:
    """Return (_DRAWS, samples): how often each draw, with replacement, has each test sample."""
    drawn = generator(0, "bootstrap").multinomial(samples, np.full(samples, 1 / samples), size=_DRAWS)
    return drawn.astype(np.uint8)  # more than 255 times needs more samples, of which none is drawn so often
