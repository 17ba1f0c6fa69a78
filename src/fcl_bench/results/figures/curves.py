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
from fcl_bench.results.figures.canvas import ALIKE
from fcl_bench.results.figures.selection import Panel
from fcl_bench.results.figures.style import Look

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


def references(shown: list[Panel], folders: Mapping[str, Path], reference: str) -> dict[str, np.ndarray]:
    """Return title of a panel -> (T,), the mean curve of the configuration with which the others are compared.

    Args:
        shown: the panels; those without the reference have no entry.
        folders: run id -> its folder.
        reference: a label of the tables, or a method with one configuration in each panel.

    Raises:
        UserError: no panel has it, or one has it several times.
    """
    found: dict[str, np.ndarray] = {}
    for panel in shown:
        exact = panel.rows[panel.rows["label"] == reference]
        own = exact if len(exact) else panel.rows[panel.rows["method"] == reference]
        if len(own) > 1:
            raise UserError(f"--difference-to {reference} is several here", choices(list(own["label"]), most=8))
        if len(own):
            found[panel.title] = accuracies(own["run_ids"].iloc[0], folders).mean(axis=0)
    if not found:
        labels = dict.fromkeys(label for panel in shown for label in panel.rows["label"])
        raise UserError(f"--difference-to {reference} is no method here", choices(list(labels), reference, most=12))
    return found


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


def draw_curves(
    axes: Axes,
    panel: Panel,
    folders: Mapping[str, Path],
    looks: Mapping[str, Look],
    reference: np.ndarray | None = None,
) -> list[list[str]]:
    """Draw the mean over seeds of A_t for each configuration, and a band of one standard deviation.

    Coinciding lines are drawn on each other from the widest to the thinnest, so that each can be seen.

    Args:
        axes: the axes to draw on.
        panel: the configurations.
        folders: run id -> its folder.
        looks: label -> how its line looks.
        reference: (T,) the curve that is subtracted from every curve.

    Returns:
        Groups of labels whose curves coincide.
    """
    runs = {row["label"]: accuracies(row["run_ids"], folders) for _, row in panel.rows.iterrows()}
    if reference is not None:
        runs = {label: curves - reference for label, curves in runs.items()}
    groups = coinciding({label: curves.mean(axis=0) for label, curves in runs.items()})
    above = {label: len(group) - 1 - place for group in groups for place, label in enumerate(group)}
    for label, curves in runs.items():
        look, middle, tasks = looks[label], curves.mean(axis=0), np.arange(1, curves.shape[1] + 1)
        axes.plot(tasks, middle, **_wider(look, above.get(label, 0)))
        if len(curves) > 1:
            spread = curves.std(axis=0, ddof=1)
            axes.fill_between(tasks, middle - spread, middle + spread, color=look["color"], alpha=0.18, linewidth=0)
    axes.set_xlabel("task")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return groups


def coincidences(groups: list[list[str]], named: Mapping[str, str]) -> str:
    """Return the caption's sentence about coinciding lines."""
    coinciding = list(dict.fromkeys(" and ".join(named[label] for label in group) for group in groups))
    if not coinciding:
        return ""
    return f"Within {ALIKE:g} points of each other, the thinner line above: {'; '.join(coinciding)}."


def _wider(look: Look, above: int) -> Look:
    """Return the look of a line with `above` others drawn on it."""
    width, size = look.get("linewidth", 1.5), look.get("markersize", 6.0)
    wider = {"linewidth": width + _WIDER * above, "alpha": 0.6} if above else {}
    return {**look, **wider, **({"markersize": size + _LARGER * above} if above and "marker" in look else {})}
