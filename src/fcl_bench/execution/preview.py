"""`preview=true`: what the split and the partition give, as a table, a picture and a file of counts; nothing is run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from rich.table import Table

from fcl_bench.config import Settings
from fcl_bench.data.partitions.skew import skew
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import run_id
from fcl_bench.execution.plan import Dealt, deal
from fcl_bench.execution.screen import ScreenConsole, partition_name, screen_table, skew_line
from fcl_bench.files import locked, remove_leftovers, replacing, slug, user_path, writable

#: What the preview depends on, of a run's identity.
_KEYS = ("seed", "beta", "clients", "tasks", "label_rate", "data", "split", "partition")
#: Clients that get a column in each task of the picture; of more, the first so many are drawn.
_CLIENTS = 100
#: Columns of the whole picture that can still be told apart.
_COLUMNS = 2000
#: Tasks with a line between them.
_BORDERS = 200
#: Classes whose labels fit beside the picture.
_NAMED = 40


def preview(settings: Settings) -> Path:
    """Print the split, and draw it and write its counts to `<out>/previews/<label>/`; returns that folder.

    No backbone is opened and no feature extracted.

    Raises:
        UserError: the data, the split or the partition can't work.
    """
    dealt = deal(settings)
    if dealt.dataset.elsewhere:
        raise UserError(
            f"preview=true: the training samples of data={settings.data.name} stay at the clients' sites",
            "data that are here",
        )
    counts = count(dealt)
    whole = settings.identity()
    identity = run_id({**{key: whole[key] for key in _KEYS}, "data_fingerprint": dealt.dataset.fingerprint})
    label = "-".join(map(slug, (settings.data.name, settings.split.name, settings.partition.name, identity)))
    out = settings.scalars.out
    folder = writable(f"out={out}", user_path("out", out) / "previews" / label)
    title = _headline(settings)
    figure = preview_figure(title, counts, dealt.stream.class_order, len(dealt.shards[0]))
    with locked(folder / ".lock", f"writing to {folder}"):
        for name in ("counts.csv", "split.png"):
            remove_leftovers(folder / name)
        with replacing(folder / "counts.csv") as temporary:
            _with_tests(dealt, counts).to_csv(temporary, index=False)
        with replacing(folder / "split.png") as temporary:
            figure.savefig(temporary, dpi=120)
    console = ScreenConsole()
    console.print(f"\n[bold]{title}[/bold]", soft_wrap=True)
    console.print(_tasks(dealt, counts, hidden=settings.scalars.label_rate < 1))
    stream, dataset = dealt.stream, dealt.dataset
    train, test = (sum(map(len, side)) for side in (stream.train, stream.test))
    console.print(
        f"together: {len(stream.class_order)} classes, {train} of {len(dataset.train)} training samples,"
        f" {test} of {len(dataset.test)} test samples",
        soft_wrap=True,
    )
    console.print(skew_line(skew(settings.partition, stream.train_columns, dealt.shards)), soft_wrap=True)
    console.print(f"preview: {folder} (split.png, counts.csv)", soft_wrap=True)
    return folder


def count(dealt: Dealt) -> pd.DataFrame:
    """The samples per task, client and class: one row for each combination that has any, in this order.

    The columns are `task`, `client` and `column` (all from 0), `samples`, and `labelled`: how many have a label.
    """
    samples = np.concatenate([clients.indices for clients in dealt.shards])
    sizes = np.concatenate([clients.sizes() for clients in dealt.shards])
    task, client = np.divmod(np.repeat(np.arange(len(sizes)), sizes), len(dealt.shards[0]))
    place = {"task": task, "client": client, "column": dealt.stream.train_columns[samples]}
    each = pd.DataFrame({**place, "labelled": dealt.labelled[samples]})
    return each.groupby(list(place), as_index=False).agg(samples=("labelled", "size"), labelled=("labelled", "sum"))


def _with_tests(dealt: Dealt, counts: pd.DataFrame) -> pd.DataFrame:
    """counts.csv: beside the training samples the test samples, which no client holds, per task and class.

    Classes are the data set's labels.
    """
    stream = dealt.stream
    task = np.repeat(np.arange(len(stream.test)), [len(indices) for indices in stream.test])
    tests = pd.DataFrame({"task": task, "column": stream.test_columns[np.concatenate(stream.test)]})
    tested = tests.groupby(["task", "column"], as_index=False).agg(samples=("column", "size"))
    both = pd.concat([counts.assign(side="train"), tested.assign(side="test")])
    both["class"] = stream.class_order[both["column"]]
    # Test samples have no client, and a column of integers with a gap would become one of floats.
    both = both.astype({"client": "Int64", "labelled": "Int64"})
    return both[["side", "task", "client", "class", "samples", "labelled"]]


def _headline(settings: Settings) -> str:
    scalars = settings.scalars
    return (
        f"{settings.data.name}, {settings.split.name}: {scalars.tasks} tasks, {scalars.clients} clients,"
        f" {partition_name(settings.partition.name, settings.beta)}, seed {scalars.seed}"
    )


def _tasks(dealt: Dealt, counts: pd.DataFrame, hidden: bool) -> Table:
    """The tasks, one per row; where labels are `hidden`, how many are not."""
    stream = dealt.stream
    rows = []
    for task in stream.tasks:
        here = counts[counts["task"] == task.index]
        sizes = dealt.shards[task.index].sizes()
        known = [here["labelled"].sum()] if hidden else []
        numbers = (task.index + 1, len(task.columns), len(task.new_columns), sizes.sum(), *known)
        classes = here.groupby("column")["samples"].sum()
        clients = (f"{sizes.min()}-{sizes.max()}", f"{len(here) / len(sizes):.1f}", f"{classes.min()}-{classes.max()}")
        rows.append([*map(str, (*numbers, len(stream.test[task.index]))), *clients])
    labels = ["labelled"] if hidden else []
    headers = ("task", "classes", "new", "training samples", *labels, "test samples")
    return screen_table("Tasks", (*headers, "samples per client", "classes per client", "samples per class"), rows)


def preview_figure(title: str, counts: pd.DataFrame, class_order: np.ndarray, clients: int) -> Figure:
    """A heat map of training samples: one row per class, in order of appearance; the tasks side by side, each with one
    column per client; empty cells are white.

    Args:
        class_order: (C,) the labels of the columns.
    """
    task, client, column, number = (counts[name].to_numpy() for name in ("task", "client", "column", "samples"))
    tasks, classes = int(task.max()) + 1, len(class_order)
    drawn = min(clients, _CLIENTS, max(1, _COLUMNS // tasks))
    if drawn < clients:
        title += f"\n(the first {drawn} of {clients} clients)"
    samples = np.zeros((classes, tasks, drawn))
    there = client < drawn
    samples[column[there], task[there], client[there]] = number[there]

    width, height = np.clip(tasks * drawn / 90, 8, 18), np.clip(classes / 24, 4, 12)
    figure = Figure(figsize=(width + 1.5, height + 1.2), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title)
    image = axes.imshow(
        np.ma.masked_equal(samples.reshape(classes, -1), 0),
        norm=LogNorm(1, max(2, number.max(initial=1))),
        cmap="viridis_r",
        aspect="auto",
        interpolation="nearest",
    )
    # More borders than this would hide the cells between them.
    for border in np.arange(1, tasks) * drawn - 0.5 if tasks <= _BORDERS else ():
        axes.axvline(border, color="black", linewidth=0.6)
    ticks = np.arange(tasks)[:: max(1, tasks // 20)]
    axes.set_xticks((ticks + 0.5) * drawn - 0.5, ticks + 1)
    axes.set_xlabel(f"task, and in each its clients 1 to {drawn}")
    if classes <= _NAMED:
        axes.set_yticks(np.arange(classes), class_order, fontsize=8)
    axes.set_ylabel("class, in order of appearance")
    figure.colorbar(image, ax=axes, label="training samples")
    return figure
