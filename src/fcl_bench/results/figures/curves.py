"""Curves of accuracy over tasks in one panel, with coinciding curves kept visible, or as differences to one curve."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fcl_bench.errors import UserError, choices
from fcl_bench.results.figures.canvas import Drawing, caption, share
from fcl_bench.results.figures.selection import Panel
from fcl_bench.results.figures.style import Look
from fcl_bench.results.summarise import setting, signature

#: Accuracies closer than this many points look alike at any size.
ALIKE = 0.05
#: How much wider each coinciding line is than the next one above it, and how much larger its markers are, in points.
_WIDER, _LARGER = 2.0, 3.5


def accuracies(runs: Sequence[str], folders: Mapping[str, Path]) -> np.ndarray:
    """Return (runs, T): [A_1..A_T] of each run in percent, NaN where a task has no test sample."""
    records = [json.loads((folders[run] / "run.json").read_text()) for run in runs]
    return np.array([record["metrics"]["accuracy"] for record in records], dtype=float)


def mean_matrix(runs: Sequence[str], folders: Mapping[str, Path]) -> np.ndarray:
    """Return (T, T): the mean over runs of a[t, tau] in percent, NaN above the diagonal."""
    files = [folders[run] / "accuracy_matrix.csv" for run in runs]
    return np.mean([pd.read_csv(file).to_numpy(float) for file in files], axis=0)


def coinciding(curves: Mapping[str, np.ndarray]) -> list[list[str]]:
    """Return groups of two or more names whose curves are everywhere within `ALIKE` points of the first one's."""
    groups: list[list[str]] = []
    for name, curve in curves.items():
        for group in groups:
            first = curves[group[0]]
            if first.shape == curve.shape and np.allclose(first, curve, rtol=0, atol=ALIKE, equal_nan=True):
                group.append(name)
                break
        else:
            groups.append([name])
    return [group for group in groups if len(group) > 1]


class Curves:
    """A_t over tasks of a summary's configurations, or how far each is above one of them.

    Args:
        summary: the result of `summarise`.
        folders: run id -> its folder.
        reference: what is subtracted: a label of the tables, or a method with one configuration in each setting; ""
            for nothing.

    Attributes:
        rows: those of the settings that have the reference.
        about: the caption's sentences.

    Raises:
        UserError: no setting has the reference, or one has it several times.
    """

    def __init__(self, summary: pd.DataFrame, folders: Mapping[str, Path], reference: str = "") -> None:
        self._folders, self._reference = folders, reference
        self._subtracted: dict[str, np.ndarray] = {}
        self._alike: list[str] = []
        kinds = signature(summary, setting(summary))
        for kind, rows in summary.groupby(kinds, sort=False) if reference else ():
            exact = rows[rows["label"] == reference]
            own = exact if len(exact) else rows[rows["method"] == reference]
            if len(own) > 1:
                raise UserError(f"--difference-to {reference} is several here", choices(list(own["label"]), most=8))
            if len(own):
                self._subtracted[kind] = accuracies(own["run_ids"].iloc[0], folders).mean(axis=0)
        if reference and not self._subtracted:
            labels = list(dict.fromkeys(summary["label"]))
            raise UserError(f"--difference-to {reference} is no method here", choices(labels, reference, most=12))
        self.rows = summary[kinds.isin(self._subtracted)] if reference else summary
        less = f", less that of {reference}" if reference else ""
        self.about = [
            f"Accuracy on all classes seen so far, after each task{less}.",
            "Line: mean over seeds; band: one standard deviation either way.",
        ]

    def draw(self, looks: Mapping[str, Look], axes: Axes, panel: Panel) -> None:
        """Draw the mean over seeds of each configuration, and a band of one standard deviation.

        Coinciding lines are drawn on each other from the widest to the thinnest, so that each can be seen.
        """
        rows = panel.rows
        less = self._subtracted.get(signature(rows, setting(rows)).iloc[0], 0.0)
        runs = {row["label"]: accuracies(row["run_ids"], self._folders) - less for _, row in rows.iterrows()}
        groups = coinciding({label: curves.mean(axis=0) for label, curves in runs.items()})
        self._alike += [" and ".join(group) for group in groups]
        above = {label: len(group) - 1 - place for group in groups for place, label in enumerate(group)}
        for label, curves in runs.items():
            look, middle, tasks = looks[label], curves.mean(axis=0), np.arange(1, curves.shape[1] + 1)
            axes.plot(tasks, middle, **_wider(look, above.get(label, 0)))
            if len(curves) > 1:
                spread = curves.std(axis=0, ddof=1)
                axes.fill_between(tasks, middle - spread, middle + spread, color=look["color"], alpha=0.18, linewidth=0)
        axes.set_xlabel("task")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(f"$A_t$ less that of {self._reference} (points)" if self._reference else "accuracy, $A_t$ (%)")

    def finish(self, figure: Drawing, panels: Sequence[Axes]) -> None:
        """Give panels of differences one axis beyond 0 to 100, and name coinciding lines in the caption."""
        if self._reference:
            share(panels)
        if self._alike:
            which = "; ".join(dict.fromkeys(self._alike))
            said = f"Within {ALIKE:g} points of each other, the thinner line above: {which}."
            figure.caption = caption(figure.caption, said)


def _wider(look: Look, above: int) -> Look:
    """Return the look of a line with `above` others drawn on it."""
    width, size = look.get("linewidth", 1.5), look.get("markersize", 6.0)
    wider = {"linewidth": width + _WIDER * above, "alpha": 0.6} if above else {}
    return {**look, **wider, **({"markersize": size + _LARGER * above} if above and "marker" in look else {})}
