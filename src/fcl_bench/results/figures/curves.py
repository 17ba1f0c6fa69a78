"""What a run's folder knows beyond the collected frame: accuracy after each task, and the accuracy matrix."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd


def accuracy_curves(folders: list[Path]) -> np.ndarray:
    """(runs, T): [A_1..A_T] in percent of runs of one configuration, NaN where a task has no test sample.

    Raises:
        ValueError: the runs differ in the number of tasks.
    """
    records = [json.loads((folder / "run.json").read_text()) for folder in folders]
    return _stacked([np.array(record["metrics"]["accuracy"], dtype=float) for record in records])


def accuracy_matrices(folders: list[Path]) -> np.ndarray:
    """(runs, T, T): a[t, tau] in percent of runs of one configuration, NaN above the diagonal.

    Raises:
        ValueError: the runs differ in the number of tasks.
    """
    return _stacked([pd.read_csv(folder / "accuracy_matrix.csv").to_numpy(float) for folder in folders])


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(f"runs of one configuration with shapes {sorted({array.shape for array in arrays})}")
    return np.stack(arrays)
