"""`preview=true`: what the split and the partition give, as a table, a picture and a file of counts; nothing is run."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fcl_bench.config import Settings
from fcl_bench.files import replacing, slug, writable
from fcl_bench.runs.folder import run_id
from fcl_bench.runs.pictures.preview import preview_figure
from fcl_bench.runs.plan import Dealt, deal
from fcl_bench.runs.screen import ScreenConsole, screen_table

#: What the preview depends on, of a run's identity.
_KEYS = ("seed", "beta", "clients", "tasks", "label_rate", "data", "split", "partition")


@dataclass(frozen=True)
class Counts:
    """Training samples by task, client and class, where there are any.

    Attributes:
        task, client, column: (m,) of each count, ascending.
        samples, labelled: (m,) how many, and how many of those have a label.
    """

    task: np.ndarray
    client: np.ndarray
    column: np.ndarray
    samples: np.ndarray
    labelled: np.ndarray


def count(dealt: Dealt) -> Counts:
    """What every client holds of every class in every task."""
    classes, clients = len(dealt.stream.class_order), len(dealt.shards[0])
    parts = [part for task in dealt.shards for part in task]
    samples = np.concatenate(parts)
    holder = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    cell, of_cell, number = np.unique(
        holder * classes + dealt.stream.train_columns[samples], return_inverse=True, return_counts=True
    )
    labelled = np.bincount(of_cell[dealt.labelled[samples]], minlength=len(cell))
    holder, column = np.divmod(cell, classes)
    task, client = np.divmod(holder, clients)
    return Counts(task, client, column, number, labelled)


def preview(settings: Settings) -> Path:
    """Print the split, and draw it and write its counts to `<out>/previews/<label>/`; returns that folder.

    No backbone is opened and no feature extracted.

    Raises:
        UserError: the data, the split or the partition can't work.
    """
    dealt = deal(settings)
    counts = count(dealt)
    whole = settings.identity()
    identity = run_id({**{key: whole[key] for key in _KEYS}, "data_fingerprint": dealt.dataset.fingerprint})
    label = "-".join(map(slug, (settings.data.name, settings.split.name, settings.partition.name, identity)))
    out = settings.scalars.out
    folder = writable(f"out={out}", Path(out).expanduser() / "previews" / label)
    title = _headline(settings)
    with replacing(folder / "counts.csv") as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("side", "task", "client", "class", "samples", "labelled"))
        writer.writerows(_rows(dealt, counts))
    with replacing(folder / "split.png") as temporary:
        figure = preview_figure(title, _cells(counts), dealt.stream.class_order, len(dealt.shards[0]))
        figure.savefig(temporary, dpi=120)
    _print(title, dealt, counts, settings.scalars.label_rate < 1)
    ScreenConsole(highlight=False).print(f"preview: {folder} (split.png, counts.csv)", soft_wrap=True)
    return folder


def _headline(settings: Settings) -> str:
    scalars, split = settings.scalars, settings.split
    partition = (
        settings.partition.name if settings.beta is None else f"{settings.partition.name} beta {settings.beta:g}"
    )
    order = "" if split.order_seed is None else f" (order seed {split.order_seed})"
    return (
        f"{settings.data.name}, {split.name}{order}: {scalars.tasks} tasks, {scalars.clients} clients,"
        f" {partition}, seed {scalars.seed}"
    )


def _cells(counts: Counts) -> np.ndarray:
    return np.stack([counts.task, counts.client, counts.column, counts.samples])


def _rows(dealt: Dealt, counts: Counts) -> list[list[Any]]:
    """counts.csv: of the training samples per task, client and class; of the test samples, which no client holds, per
    task and class. Classes are the data set's labels; tasks and clients count from 0.
    """
    stream = dealt.stream
    train = zip(
        *(values.tolist() for values in (counts.task, counts.client, stream.class_order[counts.column])),
        *(values.tolist() for values in (counts.samples, counts.labelled)),
        strict=True,
    )
    rows: list[list[Any]] = [["train", *values] for values in train]
    for task, indices in enumerate(stream.test):
        columns, numbers = np.unique(stream.test_columns[indices], return_counts=True)
        labels = stream.class_order[columns].tolist()
        rows += [["test", task, "", label, number, ""] for label, number in zip(labels, numbers.tolist(), strict=True)]
    return rows


def _print(title: str, dealt: Dealt, counts: Counts, hidden: bool) -> None:
    """The tasks, one a row, and what is left out."""
    console = ScreenConsole(highlight=False)
    console.print(f"\n[bold]{title}[/bold]", soft_wrap=True)
    console.print(_tasks(dealt, counts, hidden))
    stream, dataset = dealt.stream, dealt.dataset
    train, test = (sum(map(len, side)) for side in (stream.train, stream.test))
    console.print(
        f"together: {len(stream.class_order)} classes, {train} of {len(dataset.train)} training samples,"
        f" {test} of {len(dataset.test)} test samples",
        soft_wrap=True,
    )


def _tasks(dealt: Dealt, counts: Counts, hidden: bool) -> Table:
    labels = ["labelled"] if hidden else []
    headers = (
        "task",
        "classes",
        "new",
        "training samples",
        *labels,
        "test samples",
        "samples a client",
        "classes a client",
    )
    table = screen_table("Tasks", *headers)
    stream = dealt.stream
    for task in stream.tasks:
        here = counts.task == task.index
        sizes = [len(part) for part in dealt.shards[task.index]]
        known = [counts.labelled[here].sum()] if hidden else []
        tests = len(stream.test[task.index])
        values = (task.index + 1, len(task.columns), len(task.new_columns), sum(sizes), *known, tests)
        table.add_row(*map(str, values), f"{min(sizes)}-{max(sizes)}", f"{here.sum() / len(sizes):.1f}")
    return table
