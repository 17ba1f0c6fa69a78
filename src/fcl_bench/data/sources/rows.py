"""Labelled rows of a table, in files of the user's or a hub repository: texts, images, or numbers.

A column `split` says train or test. Without one a fifth of each class is tested, by the rule of `held_out`: no seed
takes part. The column `task` becomes the samples' domain, and `client` says who holds them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.images.stored import EncodedImages
from fcl_bench.data.sources.base import Dataset, Split, array_hash, existing_path
from fcl_bench.data.sources.hub import HubFiles, Repository, label_names, read_table
from fcl_bench.data.sources.hub_images import image_hashes, undecoded
from fcl_bench.data.sources.image_source import rows_of
from fcl_bench.data.sources.imagenet_r import held_out
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash

#: Columns with a meaning of their own, besides the label's.
_OWN = ("split", "task", "client")


@dataclass
class LabelledRows(HubFiles):
    """Rows with a label: `data.path=FILE`, `data.path=FOLDER` with files of each side, or a hub repository's splits."""

    repo: str | None = knob(None)  # type: ignore[assignment]  # files of the user's are in none
    revision: str | None = knob(None)
    label_column: str = knob("label", filled=True, words="a column of the file")
    leave_out: str | None = knob(None)

    endings: ClassVar[tuple[str, ...]] = (".csv", ".jsonl", ".parquet")

    def load(self) -> Dataset:
        tables = self._tables()
        rows = self._frame(tables)
        if self.leave_out is not None:
            rows = rows[rows[self.label_column].astype(str) != self.leave_out]
        labels, names = self._numbered(rows, self.label_column)
        if len(names) < 2:
            raise UserError(
                f"{self._key} has {len(labels)} rows of {len(names)} classes", "rows of two classes, or more"
            )
        inputs, digests = self.inputs(rows, list(tables.values()))
        if "split" in rows:
            wrong = ~rows["split"].isin(["train", "test"])
            self._require("split", wrong, "holds something else than train and test", "train or test in each row")
            test = (rows["split"] == "test").to_numpy(dtype=bool)
        else:
            test = held_out(labels, digests)
        if len(unseen := np.setdiff1d(labels[test], labels[~test])):
            raise UserError(f"{self._key}: no training row has the label {names[unseen[0]]}", "at least one")
        tasks, task_names = self._numbered(rows, "task") if "task" in rows else (None, ())
        clients = self._numbered(rows[~test], "client")[0] if "client" in rows else None
        whole = Split(labels, self.scaled(inputs, ~test), " ".join(digests), tasks)
        train, tests = (rows_of(whole, np.flatnonzero(side)) for side in (~test, test))
        origin = self.origin() if self.repo else ""
        return Dataset(
            self.name, replace(train, clients=clients), tests, class_names=names, domain_names=task_names, origin=origin
        )

    def repositories(self) -> list[Repository]:
        return super().repositories() if self.repo else []

    def columns(self) -> tuple[str, ...]:
        """The columns that the file must have."""
        return (self.label_column,)

    @abstractmethod
    def inputs(self, rows: Any, tables: Sequence[Any]) -> tuple[Any, list[str]]:
        """The rows' inputs and a hash of each; the index of `rows` counts the rows of the tables, one after another.

        Raises:
            UserError: an input is none.
        """

    def scaled(self, inputs: Any, train: np.ndarray) -> Any:
        """The inputs as a backbone gets them, given which of them are training rows (n,) bool."""
        return inputs

    def small(self, table: Any) -> Any:
        """A table without columns that are too large for a data frame."""
        return table

    def _tables(self) -> dict[str, Any]:
        """The tables by their side; one without sides has the key ""."""
        if self.repo is None or self.path is not None:
            ends = ", ".join(self.endings)
            path = existing_path(self.path, self.name, f"a file that ends in {ends}, or a folder with train* and test*")
            if not path.is_dir():
                if path.suffix not in self.endings or not path.is_file():
                    raise UserError(f"{self._key} is of another kind", f"a file that ends in {ends}")
                return {"": read_table([path], self.columns(), self._key, "it")}
        return {side: self.table(side, *self.columns()) for side in ("train", "test")}

    def _frame(self, tables: dict[str, Any]) -> Any:
        """A data frame of all rows, with the labels' names where the file holds them; `split` is the table's side."""
        import pandas as pd

        frames = []
        for side, table in tables.items():
            rows, names = self.small(table).to_pandas(), label_names(table, self.label_column)
            if names:
                rows[self.label_column] = rows[self.label_column].map(dict(enumerate(names)))
            frames.append(rows.assign(split=side) if side else rows)
        return pd.concat(frames, ignore_index=True)

    def _numbered(self, rows: Any, column: str) -> tuple[np.ndarray, tuple[str, ...]]:
        """Each row's value as a number (n,) int64, and all values in the order of the numbers, which is their own."""
        values = rows[column]
        self._require(column, values.isna() | (values.astype(str).str.strip() == ""), "is empty", "a value in each row")
        if values.dtype.kind == "f":
            raise UserError(f"{self._key}: column {column} holds decimals", "names or whole numbers")
        array = values.to_numpy() if values.dtype.kind in "iu" else values.astype(str).to_numpy(dtype=str)
        found, numbers = np.unique(array, return_inverse=True)
        return numbers.astype(np.int64), tuple(map(str, found))

    def _require(self, column: str, wrong: Any, what: str, remedy: str) -> None:
        """Raise a `UserError` that names the first of the rows `wrong` (n,) bool, counted from 1."""
        if (bad := np.flatnonzero(np.asarray(wrong, dtype=bool))).size:
            raise UserError(f"{self._key}: column {column} {what} in row {int(bad[0]) + 1}", remedy)


@dataclass
class LabelledTexts(LabelledRows):
    """Texts with a label each."""

    text_column: str = knob("text", filled=True, words="a column of the file")

    def columns(self) -> tuple[str, ...]:
        return (self.label_column, self.text_column)

    def inputs(self, rows: Any, tables: Sequence[Any]) -> tuple[Any, list[str]]:
        strange = rows[self.text_column].map(lambda value: not isinstance(value, str))
        self._require(self.text_column, strange, "holds no text", "a text in each row")
        if not self.repo:  # a published data set is taken as it is
            empty = rows[self.text_column].str.strip() == ""
            self._require(self.text_column, empty, "holds an empty text", "a text in each row")
        texts = rows[self.text_column].to_numpy(dtype=object)
        return texts, [content_hash(text.encode(errors="replace")).hexdigest() for text in texts]


@dataclass
class LabelledImages(LabelledRows):
    """Encoded images with a label each: parquet files, or WebDataset archives, whose members' endings are columns."""

    image_column: str = knob("image", filled=True, words="a column of the file")

    endings = (".parquet", ".tar")

    def columns(self) -> tuple[str, ...]:
        return (self.label_column, self.image_column)

    def small(self, table: Any) -> Any:
        return table.select_columns([name for name in (self.label_column, *_OWN) if name in table.column_names])

    def inputs(self, rows: Any, tables: Sequence[Any]) -> tuple[Any, list[str]]:
        import datasets

        name = self.image_column
        images = [undecoded(table.select_columns([name]), name, f"{self._key}: column {name}") for table in tables]
        chosen = datasets.concatenate_datasets(images).select(rows.index)
        return EncodedImages(chosen, name, self._key), list(image_hashes(chosen, name))


@dataclass
class Table(LabelledRows):
    """Numbers with a label: each column besides label, split, task and client is a feature.

    Args:
        standardise: pooled (less the training rows' mean, over their standard deviation, which clients would get from
            the sums of their counts, values and squares), or none.
    """

    standardise: str = knob("pooled", choices=("pooled", "none"))

    def inputs(self, rows: Any, tables: Sequence[Any]) -> tuple[Any, list[str]]:
        import pandas as pd

        numbers = rows.drop(columns=[self.label_column, *_OWN], errors="ignore").apply(pd.to_numeric, errors="coerce")
        if not len(numbers.columns):
            raise UserError(f"{self._key} has no column of numbers", "one besides label, split, task and client")
        for column in numbers:
            self._require(column, ~np.isfinite(numbers[column]), "holds no finite number", "a number in each row")
        x = numbers.to_numpy(np.float64)
        return x, list(map(array_hash, x))

    def scaled(self, inputs: Any, train: np.ndarray) -> Any:
        if self.standardise == "none":
            return inputs
        mean, deviation = inputs[train].mean(axis=0), inputs[train].std(axis=0)
        return (inputs - mean) / np.where(deviation > 0, deviation, 1)
