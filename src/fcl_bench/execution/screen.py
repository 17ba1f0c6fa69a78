"""A run record on the terminal: accuracies, one table of what was sent and how long it took, and the run's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

from rich.columns import Columns
from rich.console import Console
from rich.table import Table

from fcl_bench.data.partitions.skew import Skew
from fcl_bench.engine.reports import Guarantee, Metrics, Raw
from fcl_bench.execution.run_json import TASK_AGNOSTIC, Result, RunRecord

_METRICS = ("A_avg", "A_T", "forgetting", "retention", "stability", "plasticity")
#: The most tasks of a long stream that are shown, spread over it.
_SHOWN = 12


def _bytes(size: int) -> str:
    if size < 1024:
        return f"{size} B"
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 / 10 else f"{size / 1024:.1f} KiB"


_count, _mib, _seconds, _percent = "{:,}".format, "{:.2f} MiB".format, "{:.2f} s".format, "{:.2f} %".format

#: Heading -> the rows below it: a name, the key of run.json, and the form of its value. A mapping has a row per entry.
#: What is 0, null or not there has no row.
_ROWS: dict[str, tuple[tuple[str, str, Callable[[Any], str]], ...]] = {
    "First stage": (
        ("rounds", "adaptation.rounds", _count),
        ("accuracy on the first task, own head", "adaptation.accuracy", _percent),
        ("upload, busiest client", "adaptation.up_max_bytes", _bytes),
        ("download, busiest client", "adaptation.down_max_bytes", _bytes),
        ("the same client's raw samples", "adaptation.raw.busiest_bytes", _bytes),
        ("samples that left their client alone", "adaptation.revealed.revealed_samples", _count),
        ("clients, together", "adaptation.client_seconds", _seconds),
        ("server", "adaptation.server_seconds", _seconds),
    ),
    "Communication": (
        ("type on the wire", "communication.wire.dtype", str),
        ("upload, busiest client and task", "communication.up_max_bytes", _bytes),
        ("upload, busiest client over the stream", "communication.up_total_max_bytes", _bytes),
        ("upload, everyone", "communication.up_total_bytes", _bytes),
        ("download, busiest client and task", "communication.down_max_bytes", _bytes),
        ("raw samples, same client and task", "communication.raw.busiest_bytes", _bytes),
        ("raw samples, everyone", "communication.raw.total_bytes", _bytes),
        ("counted as a paper does", "communication.accounting", _mib),
    ),
    "Stored by a client between its turns, at most": (
        ("kind", "client_storage_bytes", _bytes),
        ("all kinds together", "client_storage_max_bytes", _bytes),
        ("raw samples (images, features)", "client_samples_kept", _count),
    ),
    "Samples that left the clients, or were made": (
        ("sums of one sample that clients sent", "privacy.one_sample_sums", _count),
        ("second moments of one sample that clients sent", "privacy.one_sample_moments", _count),
        ("training samples that were sent alone", "privacy.revealed_samples", _count),
        ("synthetic images that the server sent", "privacy.synthetic_images", _count),
        ("gradients of single samples that clients sent", "privacy.sample_gradients", _count),
        ("images that the server reconstructed of them", "privacy.reconstructed_images", _count),
    ),
    "Turns of clients that failed": (
        ("no answer", "absences.silent", _count),
        ("left for good", "absences.gone", _count),
        ("lost on the way, or too late", "absences.lost", _count),
        ("upload late", "absences.late", _count),
        ("of these, arrived before the end", "absences.late_arrived", _count),
        ("of these, used", "absences.late_absorbed", _count),
        ("of these, not as expected", "absences.late_dropped", _count),
    ),
    "Labels": (
        ("training samples", "labels.samples", _count),
        ("labelled", "labels.labelled", _count),
        ("given a label by their client", "labels.accepted", _count),
        ("of those, right", "labels.right", _count),
    ),
    "Training, whatever the machine": (
        ("gradient steps, all clients", "compute.client_gradient_steps", _count),
        ("samples forward and backward, all clients", "compute.client_samples_trained", _count),
        ("samples forward alone, all clients", "compute.client_samples_forward", _count),
        ("samples through the frozen backbone, all clients", "compute.client_samples_extracted", _count),
        ("gradient steps, server", "compute.server_gradient_steps", _count),
    ),
    "Runtime": (
        ("device", "environment.device", str),
        ("threads", "environment.threads", _count),
        ("seconds per task (mean client + server)", "runtime.seconds_per_task", "{:.3f} s".format),
        ("clients, together", "runtime.client_seconds", _seconds),
        ("server", "runtime.server_seconds", _seconds),
        ("feature extraction, in this run", "runtime.feature_seconds", _seconds),
        ("feature extraction, when it was made", "runtime.feature_cost_seconds", _seconds),
        ("total", "runtime.total_seconds", _seconds),
        ("peak memory", "runtime.peak_memory_bytes", _bytes),
    ),
}


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


def print_record(record: RunRecord, folder: str) -> None:
    """Print accuracies, then one table of bytes, counts and seconds, then warnings and the run's folder."""
    console = ScreenConsole()
    console.print(f"\n[bold]{headline(record)}[/bold]")
    console.print(skew_line(record["partition_skew"]), soft_wrap=True)
    if (held := record["validation"]) is not None:
        tested = "in the test set's place" if held["replaces_test"] else "tested beside the test set"
        console.print(f"{held['samples']:,} validation samples, held out of training, are {tested}.", soft_wrap=True)
    console.print(Columns([_accuracy(record["metrics"]), _metrics(record)], padding=(0, 4)))
    table = Table.grid(padding=(0, 4))
    table.add_column()
    table.add_column(justify="right")
    for heading in _ROWS:
        if rows := [*_rows(record, heading)]:
            table.add_row(f"[bold]{heading}[/bold]")
            for name, value in rows:
                table.add_row(f"  {name}", value)
    console.print(table)
    for line in _remarks(record):
        console.print(line, soft_wrap=True)
    console.print(f"run folder: {folder}", soft_wrap=True)


def screen_table(title: str, headers: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table whose first column is of names and whose others are of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _rows(record: Mapping[str, Any], heading: str) -> Iterator[tuple[str, str]]:
    for name, key, form in _ROWS[heading]:
        value: Any = record
        for step in key.split("."):
            value = (value or {}).get(step)
        entries = (
            {f"{name}: {entry}": one for entry, one in value.items()} if isinstance(value, dict) else {name: value}
        )
        yield from ((row, form(one)) for row, one in entries.items() if one)


def _number(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.2f}"


def _accuracy(metrics: Metrics) -> Table:
    """A_t after each task."""
    values = metrics["accuracy"]
    step = max(1.0, (len(values) - 1) / (_SHOWN - 1))
    shown = [round(i * step) for i in range(min(_SHOWN, len(values)))]
    return screen_table(
        "All classes seen", ("after task", "A_t (%)"), ((str(t + 1), _number(values[t])) for t in shown)
    )


def _metrics(record: RunRecord) -> Table:
    """The metrics; beside them those with the task given and, of a method that predicts tasks, without prediction."""
    ways = {"%": record["metrics"], "task given": record["task_aware"]}
    if (held := record["validation"]) is not None and held["metrics"] is not None:
        ways["validation"] = held["metrics"]
    routing = record["routing"]
    if routing:
        ways["all compete"] = routing["unrouted"]
    rows = [[name, *(_number(metrics[name]) for metrics in ways.values())] for name in _METRICS]  # type: ignore[literal-required]
    if routing:
        rows.append(["task right, last", _number(routing["accuracy"][-1])])
    protocol = "" if record["protocol"] == TASK_AGNOSTIC else f" ({record['protocol']})"
    return screen_table(f"Over the stream{protocol}", ("metric", *ways), rows)


def _remarks(record: RunRecord) -> Iterator[str]:
    """Gates, a warning where samples cost less than what is sent of them, and what noise and masks promise."""
    for gate in dict.fromkeys(found["gate"] for found in record["gates"]):
        met = [found for found in record["gates"] if found["gate"] == gate]
        tasks = ", ".join(str(found["task"] + 1) for found in met)
        where = f"after task {tasks}" if len(met) == 1 else f"after tasks {tasks}; of the last"
        yield f"[yellow]gate {gate}:[/] this run is no fair sample of its method ({where}: {met[-1]['text']})"
    if (raw := record["communication"]["raw"]) and raw["larger"]:
        yield _larger(raw, record["communication"]["up_total_bytes"])
    if guarantee := record["privacy"]["guarantee"]:
        yield _guarantee(guarantee)
    if record["secure"] != "none":
        text = "simulated sums: of each round's statistics or models the server absorbed the sum over the clients alone"
        yield f"{text}, under masks that follow from the run's seed; bytes are of masked numbers, keys and shares"


def _larger(raw: Raw, sent: int) -> str:
    times = sent / raw["total_bytes"] if raw["total_bytes"] else 0
    together = f"; all uploads together are {times:,.{0 if times >= 10 else 2}f} times as large" if times > 1 else ""
    return (
        f"[yellow]warning:[/] {raw['larger']:,} of {raw['uploads']:,} uploads (per client and task) are larger than the"
        f" client's raw {raw['kind']} with their labels{together}"
    )


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
