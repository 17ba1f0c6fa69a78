"""A run record on the terminal: one table of accuracies and costs, what may be a mistake, and the run's folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from fcl_bench.data.partitions.skew import Skew
from fcl_bench.engine.reports import Guarantee
from fcl_bench.execution.run_json import TASK_AGNOSTIC, Result, RunRecord

#: The most tasks of a long stream that are shown, spread over it.
_SHOWN = 12


def bytes_text(size: int) -> str:
    if size < 1024:
        return f"{size} B"
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 / 10 else f"{size / 1024:.1f} KiB"


class ScreenConsole(Console):
    """A console as wide as its lines where it is no terminal, unless COLUMNS says how wide.

    A reader's early departure (`| head`) is left to the command; rich's own would exit with 1.
    """

    def __init__(self, highlight: bool = False, file: IO[str] | None = None) -> None:
        super().__init__(highlight=highlight, file=file)
        if not self.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
            self.width = 10_000

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def headline(record: Result) -> str:
    """What ran, in one line: method, data, backbone, stream, partition, seed."""
    return (
        f"{record['method']} on {record['data']} ({record['backbone']}): {record['tasks']} tasks,"
        f" {record['clients']} clients, {partition_name(record['partition'], record['beta'])}, seed {record['seed']}"
    )


def partition_name(name: str, beta: float | None) -> str:
    """The partition, with its concentration if it has one."""
    return name if beta is None else f"{name} beta {beta:g}"


def skew_line(skew: Skew) -> str:
    """How skewed the partition is, in one line."""
    if skew["total_variation"] is None:
        return f"partition: its total variation is not known, since {skew['why']}"
    among = f"percentile {skew['percentile']:g} of {skew['draws']} other draws" if skew["draws"] else skew["why"]
    return f"partition: total variation {skew['total_variation']:.3f} from the classes of each task; {among}"


def indifference(names: Sequence[str], moot: Collection[str], seeds: bool) -> str:
    """The sentence that the results of `names` do not depend on keys, nor much on `seeds`; "" without names."""
    claims = [f"accuracy does not depend on {', '.join(sorted(moot))}, but for rounding"] if moot else []
    claims += ["seeds change the class order and the projection only"] if seeds else []
    return f"{', '.join(names)}: {'; '.join(claims)}." if names and claims else ""


def print_record(record: RunRecord, folder: str, details: bool = False) -> None:
    """Print accuracies and costs, what may be a mistake or is promised, the run's folder, and what to do next.

    Args:
        details: whether all that run.json has of bytes, counts and seconds is printed too.
    """
    console = ScreenConsole()
    console.print(f"\n[bold]{headline(record)}[/bold]")
    if (held := record["validation"]) is not None:
        tested = "in the test set's place" if held["replaces_test"] else "tested beside the test set"
        console.print(f"{held['samples']:,} validation samples, held out of training, are {tested}.", soft_wrap=True)
    console.print(_result(record))
    if details:
        console.print(_details(record), markup=False, highlight=False, soft_wrap=True)
    for line in _remarks(record):
        console.print(line, soft_wrap=True)
    console.print(f"run folder: {folder}", soft_wrap=True)
    out = Path(folder).parent.parent
    tables = "fcl-tables" if str(out) == "outputs" else f"fcl-tables --out {shlex.quote(str(out))}"
    more = "" if details else "; the same command with details=true prints all that was measured"
    console.print(f"next: {tables} puts runs side by side{more}", soft_wrap=True, highlight=False)


def _result(record: RunRecord) -> Table:
    """The one table of a run: A_t after each task, and in three more parts metrics, uploads and seconds."""
    metrics, sent, runtime = record["metrics"], record["communication"], record["runtime"]
    values = metrics["accuracy"]
    step = max(1.0, (len(values) - 1) / (_SHOWN - 1))
    shown = [round(i * step) for i in range(min(_SHOWN, len(values)))]
    protocol = "" if record["protocol"] == TASK_AGNOSTIC else f" ({record['protocol']})"
    parts = (
        [(f"after task {t + 1}", _number(values[t])) for t in shown],
        [(name, _number(metrics[name])) for name in ("A_avg", "A_T", "forgetting")],
        [("upload, busiest client and task", bytes_text(sent["up_max_bytes"]))],
        [
            ("seconds per task (mean client + server)", f"{runtime['seconds_per_task']:.3f} s"),
            ("seconds in all", f"{runtime['total_seconds']:.2f} s"),
        ],
    )
    table = screen_table("", (f"accuracy on all classes seen{protocol}", "%"), ())
    for part in parts:
        for row in part:
            table.add_row(*row)
        table.add_section()
    return table


def _details(record: Mapping[str, Any]) -> str:
    """The metrics, bytes, counts and seconds of run.json: a line each, under their keys."""
    from pandas import json_normalize  # only now: few runs are asked for them

    parts = [key for key in record if isinstance(record[key], dict) or key.startswith("client_")]
    measured = {key: record[key] for key in parts if key not in ("files", "features")}
    return str(json_normalize(measured).T.to_string(header=False, max_colwidth=100))


def screen_table(title: str, headers: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table whose first column is of names and whose others are of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.2f}"


def _remarks(record: RunRecord) -> Iterator[str]:
    """Gates, and what noise and masks promise."""
    for gate in dict.fromkeys(found["gate"] for found in record["gates"]):
        met = [found for found in record["gates"] if found["gate"] == gate]
        tasks = ", ".join(str(found["task"] + 1) for found in met)
        where = f"after task {tasks}" if len(met) == 1 else f"after tasks {tasks}; of the last"
        yield f"[yellow]gate {gate}:[/] this run is no fair sample of its method ({where}: {met[-1]['text']})"
    if guarantee := record["privacy"]["guarantee"]:
        yield _guarantee(guarantee)
    if record["secure"] != "none":
        simulated = record["secure"].startswith("simulated")
        whose = "that follow from the run's seed" if simulated else "of keys that the clients' processes drew"
        text = f"{record['secure']}: of each round's statistics or models the server absorbed the sum over the clients"
        yield f"{text} alone, under masks {whose}; bytes are of masked numbers, keys and shares"


def _guarantee(guarantee: Guarantee) -> str:
    epsilon, unit = guarantee["epsilon"], guarantee["unit"]
    if epsilon is None:
        return f"Noise: none, {unit}s are clipped to {guarantee['clip']:g} and nothing is promised"
    whom = "the sum of each round's uploads" if guarantee["of_sums"] else "each client's uploads"
    whose = "under keys of the sites" if guarantee.get("against_server") else "simulated: the server knows the seed"
    return (
        f"Noise: {whom}: ({epsilon:.4g}, {guarantee['delta']:g})-private per {unit} (clip"
        f" {guarantee['clip']:g}, multiplier {guarantee['multiplier']:.4g}, releases {guarantee['releases']}; by"
        f" {guarantee['accountant']}; {whose})"
    )
