"""`preview=true`: what the split and the partition give, as a table, a picture and a file of counts; nothing is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fcl_bench.config import Settings
from fcl_bench.files import replacing, slug, writable
from fcl_bench.runs.folder import run_id, write_table
from fcl_bench.runs.pictures.preview import preview_figure
from fcl_bench.runs.plan import Dealt, deal
from fcl_bench.runs.screen import ScreenConsole, partition_name, screen_table

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
    samples = np.concatenate([task.indices for task in dealt.shards])
    sizes = np.concatenate([task.sizes() for task in dealt.shards])
    holder = np.repeat(np.arange(len(sizes)), sizes)
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
    header = ("side", "task", "client", "class", "samples", "labelled")
    write_table(folder / "counts.csv", (header, _rows(dealt, counts)))
    with replacing(folder / "split.png") as temporary:
        cells = np.stack([counts.task, counts.client, counts.column, counts.samples])
        figure = preview_figure(title, cells, dealt.stream.class_order, len(dealt.shards[0]))
        figure.savefig(temporary, dpi=120)
    console = ScreenConsole(highlight=False)
    console.print(f"\n[bold]{title}[/bold]", soft_wrap=True)
    console.print(_tasks(dealt, counts, hidden=settings.scalars.label_rate < 1))
    console.print(_together(dealt), soft_wrap=True)
    console.print(f"preview: {folder} (split.png, counts.csv)", soft_wrap=True)
    return folder


def _headline(settings: Settings) -> str:
    scalars, split = settings.scalars, settings.split
    order = "" if split.order_seed is None else f" (order seed {split.order_seed})"
    return (
        f"{settings.data.name}, {split.name}{order}: {scalars.tasks} tasks, {scalars.clients} clients,"
        f" {partition_name(settings.partition.name, settings.beta)}, seed {scalars.seed}"
    )


def _rows(dealt: Dealt, counts: Counts) -> list[list[Any]]:
    """counts.csv: of the training samples per task, client and class; of the test samples, which no client holds, per
    task and class. Classes are the data set's labels; tasks and clients count from 0.
    """
    stream = dealt.stream
    held = (counts.task, counts.client, stream.class_order[counts.column], counts.samples, counts.labelled)
    rows: list[list[Any]] = [["train", *values] for values in zip(*(part.tolist() for part in held), strict=True)]
    for task, indices in enumerate(stream.test):
        columns, numbers = np.unique(stream.test_columns[indices], return_counts=True)
        labels = stream.class_order[columns].tolist()
        rows += [["test", task, "", label, number, ""] for label, number in zip(labels, numbers.tolist(), strict=True)]
    return rows


def _tasks(dealt: Dealt, counts: Counts, hidden: bool) -> Table:
    """The tasks, one per row; where labels are `hidden`, how many are not."""
    stream = dealt.stream
    rows = []
    for task in stream.tasks:
        here = counts.task == task.index
        sizes = dealt.shards[task.index].sizes()
        known = [counts.labelled[here].sum()] if hidden else []
        numbers = (task.index + 1, len(task.columns), len(task.new_columns), sizes.sum(), *known)
        clients = (f"{sizes.min()}-{sizes.max()}", f"{here.sum() / len(sizes):.1f}")
        rows.append([*map(str, (*numbers, len(stream.test[task.index]))), *clients])
    labels = ["labelled"] if hidden else []
    headers = ("task", "classes", "new", "training samples", *labels, "test samples")
    return screen_table("Tasks", (*headers, "samples a client", "classes a client"), rows)


def _together(dealt: Dealt) -> str:
    stream, dataset = dealt.stream, dealt.dataset
    train, test = (sum(map(len, side)) for side in (stream.train, stream.test))
    return (
        f"together: {len(stream.class_order)} classes, {train} of {len(dataset.train)} training samples,"
        f" {test} of {len(dataset.test)} test samples"
    )
