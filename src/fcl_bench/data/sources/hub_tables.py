"""Tables of encoded images and their labels, read from parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fcl_bench.errors import UserError, choices, first_line

#: Bytes of parquet that are read in a few seconds; more shows a progress bar.
_QUICK = 1 << 30


def read_table(files: list[Path], image_column: str, needed: tuple[str, ...], key: str, side: str) -> Any:
    """The parquet files, in order, as one `datasets.Dataset` whose images are left as bytes.

    Raises:
        UserError: they can't be read, or the image column or a `needed` one is not there.
    """
    import datasets

    if sum(file.stat().st_size for file in files) < _QUICK:
        datasets.disable_progress_bars()
    try:
        table: Any = datasets.load_dataset("parquet", data_files={"train": list(map(str, files))}, split="train")
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        names = files[0].name if len(files) == 1 else f"one of {files[0].name} to {files[-1].name}"
        cause = error.__cause__ or error
        raise UserError(
            f"{key}: {names} in {files[0].parent} is not a readable parquet file: {first_line(cause)}",
            "remove it and get it again; fcl-bench-data check names damaged files",
        ) from error
    finally:
        datasets.enable_progress_bars()
    for column in (image_column, *needed):
        if column not in table.column_names:
            raise UserError(f"{key}: no column {column} in {side}", choices(table.column_names, column))
    return table.cast_column(image_column, datasets.Image(decode=False))


def class_labels(table: Any, column: str, key: str, side: str) -> np.ndarray:
    """The class labels (n,) in `column`. A `UserError` if they are no non-negative integers."""
    labels = np.asarray(table.with_format("numpy")[column][:])
    if labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
        raise UserError(f"{key}: column {column} of {side} is not a class label", "non-negative integers")
    return labels.astype(np.int64)


def label_names(table: Any, column: str) -> list[str] | None:
    """The names of the labels in `column`, in the labels' order; None where the table holds none."""
    names = getattr(table.features[column], "names", None)
    return None if names is None else [str(name) for name in names]
