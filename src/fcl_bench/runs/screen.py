"""A run record as tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.table import Table

MIB = 2**20
_CONVENTIONS = {"fedran_mib": "FedRAN's Table 4", "stsa_mib": "STSA's Table 5"}


class ScreenConsole(Console):
    """A console that leaves a reader's early departure (`| head`) to the command; rich's own would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def headline(record: dict[str, Any]) -> str:
    """What ran, in one line: method, data, backbone, stream, partition, seed."""
    partition = record["partition"] if record["beta"] is None else f"{record['partition']} beta {record['beta']:g}"
    return (
        f"{record['method']} on {record['data']} ({record['backbone']}):"
        f" {record['tasks']} tasks, {record['clients']} clients, {partition}, seed {record['seed']}"
    )


def print_record(record: dict[str, Any], folder: str) -> None:
    """Accuracy per task, communication and runtime of one run, then where its folder is."""
    console = ScreenConsole(highlight=False)
    console.print(f"\n[bold]{headline(record)}[/bold]")
    console.print(Columns([_accuracy(record["metrics"]), _metrics(record)], padding=(0, 4)))
    if record["adaptation"]:
        console.print(_adaptation(record["adaptation"]))
    console.print(_communication(record["communication"]))
    if record["labels"]["rate"] < 1:
        console.print(_labels(record["labels"]))
    if record["bounds"]:
        console.print(
            _bounds(record["bounds"][-1]) if "gram_error" in record["bounds"][-1] else _theory(record["bounds"])
        )
    console.print(_runtime(record["runtime"], record["environment"]))
    console.print(f"run folder: {folder}", soft_wrap=True)


def screen_table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right")
    return table


def _bytes(size: int) -> str:
    if size < 1024:
        return f"{size} B"
    return f"{size / MIB:.2f} MiB" if size >= MIB / 10 else f"{size / 1024:.1f} KiB"


def _percent(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.2f}"


def _accuracy(metrics: dict[str, Any]) -> Table:
    """A_t after each task; of a long stream, twelve tasks spread over it."""
    values = metrics["accuracy"]
    last = len(values) - 1
    shown = range(last + 1) if last < 12 else sorted({round(i * last / 11) for i in range(12)})
    table = screen_table("All classes seen", "after task", "A_t (%)")
    for t in shown:
        table.add_row(str(t + 1), _percent(values[t]))
    return table


def _metrics(record: dict[str, Any]) -> Table:
    """The metrics; beside them those with the task given and, of a method that predicts tasks, without prediction."""
    ways = {"%": record["metrics"], "task given": record["task_aware"]}
    routing = record["routing"]
    if routing:
        ways["all compete"] = routing["unrouted"]
    protocol = "" if record["protocol"] == "task-agnostic" else f" ({record['protocol']})"
    table = screen_table(f"Over the stream{protocol}", "metric", *ways)
    for name in ("A_avg", "A_T", "forgetting", "retention", "stability", "plasticity"):
        table.add_row(name, *(_percent(metrics[name]) for metrics in ways.values()))
    if routing:
        table.add_row("task right, last", _percent(routing["accuracy"][-1]))
    return table


def _adaptation(adaptation: dict[str, Any]) -> Table:
    """The first stage, whose bytes and seconds are in no other table."""
    origin = "taken over" if adaptation["cache_hit"] else "this run"
    table = screen_table(f"First stage: FedAvg on the first task ({origin})", "", "value")
    table.add_row("rounds", str(adaptation["rounds"]))
    table.add_row("accuracy on the first task, own head", f"{_percent(adaptation['accuracy'])} %")
    table.add_row("upload, busiest client", _bytes(adaptation["up_max_bytes"]))
    table.add_row("download, busiest client", _bytes(adaptation["down_max_bytes"]))
    table.add_row("clients, together", f"{adaptation['client_seconds']:.2f} s")
    table.add_row("server", f"{adaptation['server_seconds']:.2f} s")
    return table


def _theory(rows: list[dict[str, float | None]]) -> Table:
    """What projection left of gradients, task by task."""

    def show(value: float | None) -> str:
        return "not defined" if value is None else f"{value:.3f}"

    table = screen_table("Gradients after projection", "task", "rho", "least rho", "beta, old tasks", "largest beta")
    for task, row in enumerate(rows):
        table.add_row(str(task + 1), *(show(row[key]) for key in ("rho", "rho_min", "beta", "beta_max")))
    return table


def _labels(labels: dict[str, Any]) -> Table:
    table = screen_table(f"Labels (rate {labels['rate']:g})", "training samples", "number")
    for name in ("samples", "labelled"):
        table.add_row(name, str(labels[name]))
    table.add_row("given a label by their client", str(labels["accepted"]))
    share = f" ({100 * labels['right'] / labels['accepted']:.1f} %)" if labels["accepted"] else ""
    table.add_row("of those, right", f"{labels['right']}{share}")
    return table


def _bounds(bounds: dict[str, float | None]) -> Table:
    """Bound beside truth after the last task."""

    def show(name: str, digits: str = ".3g") -> str:
        value = bounds[name]
        return "not finite" if value is None else f"{value:{digits}}"

    table = screen_table("Against the exact Gram matrix, last task", "", "truth", "bound", "norm of the exact")
    table.add_row("Gram matrix (spectral)", *map(show, ("gram_error", "gram_bound", "gram_norm")))
    table.add_row("classifier (Frobenius)", *map(show, ("weight_error", "weight_bound", "weight_norm")))
    table.add_row("test scores / ||h||, largest", show("score_error"), show("weight_bound"), "")
    table.add_row("same class (% of test samples)", show("agree", ".2f"), show("certified", ".2f"), "")
    return table


def _communication(communication: dict[str, Any]) -> Table:
    table = screen_table(f"Communication ({communication['wire']['dtype']})", "", "size")
    rows = {
        "upload, busiest client and task": communication["up_max_bytes"],
        "upload, busiest client over the stream": communication["up_total_max_bytes"],
        "upload, everyone": communication["up_total_bytes"],
        "download, busiest client and task": communication["down_max_bytes"],
    }
    stages = communication["by_stage"]
    for stage, sizes in stages.items() if len(stages) > 1 else ():
        rows[f"upload, busiest client and task: {stage}"] = sizes["up_max_bytes"]
    for name, size in rows.items():
        table.add_row(name, _bytes(size))
    for name, mib in communication["accounting"].items():
        table.add_row(f"as {_CONVENTIONS.get(name, name)} counts", f"{mib:.2f} MiB")
    return table


def _runtime(runtime: dict[str, Any], environment: dict[str, Any]) -> Table:
    table = screen_table(f"Runtime ({environment['device']}, {environment['threads']} threads)", "", "value")
    origin = "from the cache" if runtime["feature_cache_hit"] else "this run"
    rows = {
        "seconds per task (mean client + server)": f"{runtime['seconds_per_task']:.3f} s",
        "clients, together": f"{runtime['client_seconds']:.2f} s",
        "server": f"{runtime['server_seconds']:.2f} s",
        f"feature extraction ({origin})": f"{runtime['feature_seconds']:.2f} s",
    }
    if runtime["feature_cache_hit"]:
        rows["feature extraction, when it was made"] = f"{runtime['feature_cost_seconds']:.2f} s"
    rows["total"] = f"{runtime['total_seconds']:.2f} s"
    rows["peak memory"] = f"{runtime['peak_memory_bytes'] / MIB:.0f} MiB"
    for name, value in rows.items():
        table.add_row(name, value)
    return table
