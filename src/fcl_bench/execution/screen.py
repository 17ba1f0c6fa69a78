"""A run record on the terminal: accuracies, one table of everything that is counted, and where the run's folder is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.columns import Columns
from rich.console import Console
from rich.table import Table

from fcl_bench.engine.reports import BestRounds, Guarantee, Metrics, Raw, TreeLevel
from fcl_bench.execution.run_json import TASK_AGNOSTIC, Adaptation, Communication, Labels, Privacy, Result, RunRecord

MIB = 2**20
_CONVENTIONS = {"fedran_mib": "FedRAN's Table 4", "stsa_mib": "STSA's Table 5"}
_METRICS = ("A_avg", "A_T", "forgetting", "retention", "stability", "plasticity")
#: The most tasks of a long stream that are shown, spread over it.
_SHOWN = 12
#: Turns without an upload in time, and what became of late uploads.
_ABSENCES = {
    "silent": "no answer",
    "gone": "left for good",
    "lost": "lost on the way, or too late",
    "late": "upload late",
    "late_arrived": "of these, arrived before the end",
    "late_absorbed": "of these, used",
    "late_dropped": "of these, not as expected",
}
#: Counts of samples that left the clients, or were made of them or of models that learnt them.
_PRIVACY = {
    "one_sample_sums": "sums of one sample that clients sent",
    "one_sample_moments": "second moments of one sample that clients sent",
    "told_samples": "training samples that were sent alone",
    "synthetic_images": "synthetic images that the server sent",
    "sample_gradients": "gradients of single samples that clients sent",
    "reconstructed_images": "images that the server reconstructed of them",
}
_PROJECTION = {"rho": "rho", "rho_min": "least rho", "beta": "beta, old tasks", "beta_max": "largest beta"}
#: Against the exact Gram matrix: name -> keys of truth, bound, sharper bound and exact norm ("": none), and a format.
_BOUNDS = {
    "Gram (spectral)": ("gram_error", "gram_bound", "", "gram_norm", ".3g"),
    "Gram (trace)": ("trace_error", "tail_bound", "", "energy", ".3g"),
    "classifier (Frobenius)": ("weight_error", "weight_bound", "weight_bound_sharper", "weight_norm", ".3g"),
    "scores / ||h||, largest": ("score_error", "weight_bound", "weight_bound_sharper", "", ".3g"),
    "same class (% of tests)": ("agree", "certified", "certified_sharper", "", ".2f"),
}

#: A heading, and below it what was counted: name and value.
_Section = tuple[str, dict[str, str]]


class ScreenConsole(Console):
    """A console that leaves a reader's early departure (`| head`) to the command; rich's own would exit with 1."""

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


def print_record(record: RunRecord, folder: str) -> None:
    """Print accuracies, then one table of bytes, counts and seconds, then warnings and the run's folder."""
    console = ScreenConsole(highlight=False)
    console.print(f"\n[bold]{headline(record)}[/bold]")
    console.print(Columns([_accuracy(record["metrics"]), _metrics(record)], padding=(0, 4)))
    if rounds := record["rounds"]:
        console.print(_rounds(rounds))
    if bounds := record["bounds"]:
        if "gram_error" in bounds[-1]:
            console.print(_bounds(bounds[-1]))
        elif "rho" in bounds[-1]:
            console.print(_projection(bounds))
    if levels := record["transport"].get("levels"):
        console.print(_nodes(levels))
    table = Table.grid(padding=(0, 4))
    table.add_column()
    table.add_column(justify="right")
    for heading, rows in _sections(record):
        table.add_row(f"[bold]{heading}[/bold]")
        for name, value in rows.items():
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


def _bytes(size: int) -> str:
    if size < 1024:
        return f"{size} B"
    return f"{size / MIB:.2f} MiB" if size >= MIB / 10 else f"{size / 1024:.1f} KiB"


def _number(value: float | None, digits: str = ".2f", without: str = "not defined") -> str:
    return without if value is None else f"{value:{digits}}"


def _few(tasks: int) -> Sequence[int]:
    """The tasks to show, from 0."""
    step = (tasks - 1) / (_SHOWN - 1)
    return range(tasks) if tasks <= _SHOWN else sorted({round(i * step) for i in range(_SHOWN)})


def _accuracy(metrics: Metrics) -> Table:
    """A_t after each task."""
    values = metrics["accuracy"]
    rows = ((str(t + 1), _number(values[t])) for t in _few(len(values)))
    return screen_table("All classes seen", ("after task", "A_t (%)"), rows)


def _metrics(record: RunRecord) -> Table:
    """The metrics; beside them those with the task given and, of a method that predicts tasks, without prediction."""
    ways = {"%": record["metrics"], "task given": record["task_aware"]}
    routing = record["routing"]
    if routing:
        ways["all compete"] = routing["unrouted"]
    rows = [[name, *(_number(metrics[name]) for metrics in ways.values())] for name in _METRICS]  # type: ignore[literal-required]
    if routing:
        rows.append(["task right, last", _number(routing["accuracy"][-1])])
    protocol = "" if record["protocol"] == TASK_AGNOSTIC else f" ({record['protocol']})"
    return screen_table(f"Over the stream{protocol}", ("metric", *ways), rows)


def _rounds(rounds: BestRounds) -> Table:
    """The best round of each task. It is not a result, since it was chosen on test data."""
    rows = (
        (str(t + 1), _number(rounds["best"][t]), "" if (best := rounds["best_round"][t]) is None else str(best + 1))
        for t in _few(len(rounds["best"]))
    )
    return screen_table("Best round, by test data", ("task", "A_t (%)", "after round"), rows)


def _projection(bounds: list[dict[str, float | None]]) -> Table:
    """The share of gradients that projection left, per task."""
    rows = ((str(task), *(_number(row[key], ".3f") for key in _PROJECTION)) for task, row in enumerate(bounds, start=1))
    return screen_table("Gradients after projection", ("task", *_PROJECTION.values()), rows)


def _bounds(bounds: Mapping[str, float | None]) -> Table:
    """The theoretical bound and the measured error after the last task; only FedRAN bounds the trace."""
    rows = (
        (name, *(_number(bounds[key], digits, without="not finite") if key in bounds else "" for key in keys))
        for name, (*keys, digits) in _BOUNDS.items()
        if keys[0] in bounds
    )
    headers = ("", "truth", "bound", "sharper", "exact norm")
    return screen_table("Against the exact Gram matrix, last task", headers, rows)


def _nodes(levels: Sequence[TreeLevel]) -> Table:
    """The links above the nodes of each level of a tree; those above the last level end at the server."""
    rows = []
    for level in levels:
        counts = [str(level["level"]), f"{level['nodes']:,}", f"{level['messages']:,}"]
        rows.append([*counts, _bytes(level["up_bytes"]), _bytes(level["down_bytes"]), f"{level['seconds']:.2f}"])
    columns = ("level", "nodes", "messages up", "up", "down", "seconds")
    return screen_table("Nodes between the clients and the server", columns, rows)


def _sections(record: RunRecord) -> Iterator[_Section]:
    """What was sent, stored, lost and labelled, and how long it took."""
    if record["adaptation"]:
        yield _adaptation(record["adapt"], record["adaptation"])
    yield _communication(record["communication"], record["secure"] == "sums")
    if kinds := record["client_storage_bytes"]:
        rows = {kind: _bytes(size) for kind, size in kinds.items()}
        if len(kinds) > 1:
            rows["all kinds together"] = _bytes(record["client_storage_max_bytes"])
        rows["raw samples (images, features)"] = str(record["client_samples_kept"])
        yield "Stored by a client between its turns, at most", rows
    if rows := _privacy(record["privacy"], record["labels"]["samples"]):
        yield "Samples that left the clients, or were made", rows
    absences = record["absences"]
    if record["faults"] != "none" or any(absences.values()):
        counts = {name: f"{absences[key]:,}" for key, name in _ABSENCES.items()}  # type: ignore[literal-required]
        yield "Turns of clients that failed", counts
    if record["labels"]["rate"] < 1:
        yield _labels(record["labels"])
    yield _runtime(record)


def _adaptation(choice: str, adaptation: Adaptation) -> _Section:
    """The first stage, whose bytes and seconds are in no other section."""
    origin = "taken over" if adaptation["cache_hit"] else "this run"
    rows = {
        "rounds": str(adaptation["rounds"]),
        "accuracy on the first task, own head": f"{_number(adaptation['accuracy'])} %",
        "upload, busiest client": _bytes(adaptation["up_max_bytes"]),
        "download, busiest client": _bytes(adaptation["down_max_bytes"]),
        "clients, together": f"{adaptation['client_seconds']:.2f} s",
        "server": f"{adaptation['server_seconds']:.2f} s",
    }
    if raw := adaptation["raw"]:
        rows[f"the same client's raw {raw['kind']}"] = _bytes(raw["busiest_bytes"])
    if alone := adaptation["told"]["told_samples"]:
        rows["samples that left their client alone"] = f"{alone:,}"
    return f"First stage, adapt={choice} ({origin})", rows


def _communication(communication: Communication, masked: bool) -> _Section:
    sizes = {
        "upload, busiest client and task": communication["up_max_bytes"],
        "upload, busiest client over the stream": communication["up_total_max_bytes"],
        "upload, everyone": communication["up_total_bytes"],
        "download, busiest client and task": communication["down_max_bytes"],
    }
    stages = communication["by_stage"]
    if len(stages) > 1:
        sizes |= {f"upload, busiest client and task: {name}": sent["up_max_bytes"] for name, sent in stages.items()}
    if raw := communication["raw"]:
        sizes[f"the busiest client's raw {raw['kind']}, same task"] = raw["busiest_bytes"]
        sizes[f"everyone's raw {raw['kind']}"] = raw["total_bytes"]
    rows = {name: _bytes(size) for name, size in sizes.items()}
    for name, mib in communication["accounting"].items():
        rows[f"as {_CONVENTIONS.get(name, name)} counts"] = f"{mib:.2f} MiB"
    form = "masked" if masked else communication["wire"]["dtype"]
    return f"Communication ({form})", rows


def _privacy(privacy: Privacy, samples: int) -> dict[str, str]:
    rows = {name: f"{count:,}" for key, name in _PRIVACY.items() if (count := privacy[key])}  # type: ignore[literal-required]
    if alone := privacy["told_samples"]:
        rows["of all training samples"] = f"{100 * alone / samples:.3g} %"
    return rows


def _labels(labels: Labels) -> _Section:
    right = labels["right"]
    share = f" ({100 * right / labels['accepted']:.1f} %)" if right is not None and labels["accepted"] else ""
    rows = {
        "training samples": str(labels["samples"]),
        "labelled": str(labels["labelled"]),
        "given a label by their client": str(labels["accepted"]),
        "of those, right": "not known" if right is None else f"{right}{share}",
    }
    return f"Labels (rate {labels['rate']:g})", rows


def _runtime(record: RunRecord) -> _Section:
    runtime, environment = record["runtime"], record["environment"]
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
    return f"Runtime ({environment['device']}, {environment['threads']} threads)", rows


def _remarks(record: RunRecord) -> Iterator[str]:
    """A warning where samples cost less than what is sent of them, and what noise and masks promise."""
    if (raw := record["communication"]["raw"]) and raw["larger"]:
        yield _larger(raw, record["communication"]["up_total_bytes"])
    if guarantee := record["privacy"]["guarantee"]:
        yield _guarantee(guarantee)
    if record["secure"] != "none":
        text = "secure sums: of each round's statistics or models the server saw the sum over the clients alone"
        yield f"{text}; bytes are of masked numbers, keys and shares"


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
    return (
        f"Noise: {whom}: ({epsilon:.4g}, {guarantee['delta']:g})-private per {unit} (clip"
        f" {guarantee['clip']:g}, multiplier {guarantee['multiplier']:.4g}, releases {guarantee['releases']}; by"
        f" {guarantee['accountant']})"
    )
