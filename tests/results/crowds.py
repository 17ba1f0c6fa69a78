"""Many methods in a few settings, each run with a folder; and which texts of a figure stand on each other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from fcl_bench.results.figures.selection import METHODS
from tests.results.frames import made_up

TASKS = 10
#: Texts may touch; they intersect from this many pixels on.
_TOUCH = 1.0


def crowd(folder: Path, methods: int, settings: Mapping[str, Sequence[float]], whole: bool = True) -> pd.DataFrame:
    """Runs of two seeds, of so many methods in each combination of `settings`; two ceilings, gates and ranks.

    Args:
        folder: gets the folders of the runs.
        whole: whether they have all files that figures read, or their curves alone.
    """
    names = [*METHODS, *(f"a_method_of_ones_own_{number}" for number in range(methods))][:methods]
    ranked = names[:12:3]
    kinds = [{"method": name} for name in (*names, "centralised_ridge", "centralised") if name not in ranked]
    kinds += [{"method": name, "method_rank": rank} for name in ranked for rank in (8, 64, 512)]
    pairs = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
    rng = np.random.default_rng(0)
    runs: list[dict[str, Any]] = []
    for number, kind in enumerate(kinds):
        level, size = rng.uniform(20, 75), 10 ** rng.uniform(-1, 2)
        for pair, seed in itertools.product(pairs, (0, 1)):
            accuracy = level + rng.normal(0, 2)
            run = {**kind, **pair, "seed": seed, "A_avg": accuracy + 8, "A_T": accuracy, "up_max_mib": size}
            run |= {"seconds_per_task": size / 3, "tasks": TASKS, "gates": "" if number % 7 else "growth"}
            runs.append(run | ({"A_T_best": accuracy, "evaluate_rounds": 2} if number % 2 else {}))
    frame = made_up(*runs)
    frame = frame.assign(folder=frame["run_id"])
    for run, final, tested in zip(frame["run_id"], frame["A_T"], frame["A_T_best"].notna(), strict=True):
        curve = final + np.linspace(25, 0, TASKS)
        (folder / run).mkdir()
        (folder / run / "run.json").write_text(json.dumps({"metrics": {"accuracy": curve.tolist()}}))
        if whole:
            _write(folder / run, curve, tested)
    return frame


def _write(folder: Path, curve: np.ndarray, tested: bool) -> None:
    """The files of a run that figures read: two rounds per task of two clients."""
    matrix = np.where(np.tri(TASKS) > 0, curve[:, None], np.nan)
    pd.DataFrame(matrix).to_csv(folder / "accuracy_matrix.csv", index=False)
    numbers = [(task, round_, client) for task in range(TASKS) for round_ in (0, 1) for client in (0, 1)]
    uploads = pd.DataFrame(numbers, columns=["task", "round", "client"])
    uploads.assign(up_bytes=2**20, client_seconds=1.0, stage="model").to_csv(folder / "uploads.csv", index=False)
    tasks = pd.DataFrame({"task": range(TASKS), "accuracy": curve, "server_seconds": 0.5})
    tasks.to_csv(folder / "tasks.csv", index=False)
    if tested:
        rounds = uploads.loc[uploads["client"] == 0, ["task", "round"]].assign(accuracy=np.repeat(curve, 2))
        rounds.to_csv(folder / "rounds.csv", index=False)


def texts_of(figure: Figure) -> list[Text]:
    """The texts that a drawing of the figure shows."""
    shown: list[Text] = []
    draw = Text.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", lambda text, *given: shown.append(text) or draw(text, *given))
        figure.draw_without_rendering()
    drawn_last = dict.fromkeys(text for text in shown if text.get_visible() and text.get_text().strip())
    return list(drawn_last)


def troubles(figure: Figure) -> Iterator[str]:
    """Pairs of texts that intersect, and texts that leave the canvas."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts_of(figure)]
    for (one, box), (other, its) in itertools.combinations(boxes, 2):
        if min(box.x1, its.x1) - max(box.x0, its.x0) > _TOUCH and min(box.y1, its.y1) - max(box.y0, its.y0) > _TOUCH:
            yield f"{one!r} and {other!r} intersect"
    canvas = figure.bbox.padded(_TOUCH)
    yield from (
        f"{text!r} leaves the canvas"
        for text, box in boxes
        if box.x0 < canvas.x0 or box.y0 < canvas.y0 or box.x1 > canvas.x1 or box.y1 > canvas.y1
    )
