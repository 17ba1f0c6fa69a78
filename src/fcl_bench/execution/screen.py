"""A run record as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.columns import Columns
from rich.console import Console
from rich.table import Table

from fcl_bench.engine.reports import Absences, BestRounds, Guarantee, Metrics, Raw, TreeLevel
from fcl_bench.environment import Environment
from fcl_bench.execution.run_json import (
    TASK_AGNOSTIC,
    Adaptation,
    Communication,
    Labels,
    Privacy,
    Result,
    RunRecord,
    Runtime,
)

MIB = 2**20
_CONVENTIONS = {"fedran_mib": "FedRAN's Table 4", "stsa_mib": "STSA's Table 5"}


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
    """Accuracy per task, communication and runtime of one run, then where its folder is."""
    console = ScreenConsole(highlight=False)
    console.print(f"\n[bold]{headline(record)}[/bold]")
    console.print(Columns([_accuracy(record["metrics"]), _metrics(record)], padding=(0, 4)))
    if rounds := record["rounds"]:
        console.print(_rounds(rounds))
    if record["adaptation"]:
        console.print(_adaptation(record["adapt"], record["adaptation"]))
    console.print(_communication(record["communication"], record["secure"] == "sums"))
    if levels := record["transport"].get("levels"):  # of a tree
        console.print(_nodes(levels))
    if (raw := record["communication"]["raw"]) and raw["larger"]:
        console.print(_larger(raw, record["communication"]["up_total_bytes"]), soft_wrap=True)
    if record["client_storage_bytes"]:
        console.print(_storage(record))
    privacy = record["privacy"]
    if guarantee := privacy["guarantee"]:
        console.print(_guarantee(guarantee), soft_wrap=True)
    if any(count for name, count in privacy.items() if name != "guarantee"):
        console.print(_privacy(privacy, record["labels"]["samples"]))
    if record["secure"] != "none":
        text = "secure sums: of each round's statistics or models the server saw the sum over the clients alone"
        console.print(f"{text}; bytes are of masked numbers, keys and shares", soft_wrap=True)
    if record["faults"] != "none" or any(record["absences"].values()):
        console.print(_absences(record["absences"]))
    if record["labels"]["rate"] < 1:
        console.print(_labels(record["labels"]))
    if record["bounds"]:
        last = record["bounds"][-1]
        console.print(_bounds(last) if "gram_error" in last else _theory(record["bounds"]))
    console.print(_runtime(record["runtime"], record["environment"]))
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


def _accuracy(metrics: Metrics) -> Table:
    """A_t after each task."""
    values = metrics["accuracy"]
    rows = ((str(t + 1), _number(values[t])) for t in _few(len(values)))
    return screen_table("All classes seen", ("after task", "A_t (%)"), rows)


def _rounds(rounds: BestRounds) -> Table:
    """The best round of each task. It is not a result, since it was chosen on test data."""
    rows = (
        (str(t + 1), _number(rounds["best"][t]), "" if (best := rounds["best_round"][t]) is None else str(best + 1))
        for t in _few(len(rounds["best"]))
    )
    return screen_table("Best round, by test data", ("task", "A_t (%)", "after round"), rows)


def _few(tasks: int) -> Sequence[int]:
    """The tasks to show, from 0; for a long stream, twelve tasks spread over it."""
    last = tasks - 1
    return range(tasks) if last < 12 else sorted({round(i * last / 11) for i in range(12)})


def _metrics(record: RunRecord) -> Table:
    """The metrics; beside them those with the task given and, of a method that predicts tasks, without prediction."""
    ways = {"%": record["metrics"], "task given": record["task_aware"]}
    routing = record["routing"]
    if routing:
        ways["all compete"] = routing["unrouted"]
    rows = [
        [name, *(_number(metrics[name]) for metrics in ways.values())]
        for name in ("A_avg", "A_T", "forgetting", "retention", "stability", "plasticity")
    ]
    if routing:
        rows.append(["task right, last", _number(routing["accuracy"][-1])])
    protocol = "" if record["protocol"] == TASK_AGNOSTIC else f" ({record['protocol']})"
    return screen_table(f"Over the stream{protocol}", ("metric", *ways), rows)


def _adaptation(choice: str, adaptation: Adaptation) -> Table:
    """The first stage, whose bytes and seconds are in no other table."""
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
    if told := adaptation["told"]["told_samples"]:
        rows["samples that left their client alone"] = f"{told:,}"
    return screen_table(f"First stage, adapt={choice} ({origin})", ("", "value"), rows.items())


def _theory(bounds: list[dict[str, float | None]]) -> Table:
    """The share of gradients that projection left, per task."""
    columns = {"rho": "rho", "rho_min": "least rho", "beta": "beta, old tasks", "beta_max": "largest beta"}
    rows = ((str(task), *(_number(row[key], ".3f") for key in columns)) for task, row in enumerate(bounds, start=1))
    return screen_table("Gradients after projection", ("task", *columns.values()), rows)


def _labels(labels: Labels) -> Table:
    right = labels["right"]
    share = f" ({100 * right / labels['accepted']:.1f} %)" if right is not None and labels["accepted"] else ""
    rows = {
        "samples": str(labels["samples"]),
        "labelled": str(labels["labelled"]),
        "given a label by their client": str(labels["accepted"]),
        "of those, right": "not known" if right is None else f"{right}{share}",
    }
    return screen_table(f"Labels (rate {labels['rate']:g})", ("training samples", "number"), rows.items())


def _bounds(bounds: Mapping[str, float | None]) -> Table:
    """The theoretical bound and the measured error after the last task."""

    def show(*names: str, digits: str = ".3g") -> Iterable[str]:
        return (_number(bounds[name], digits, without="not finite") if name in bounds else "" for name in names)

    rows = [
        ("Gram (spectral)", *show("gram_error", "gram_bound", "", "gram_norm")),
        ("Gram (trace)", *show("trace_error", "tail_bound", "", "energy")),
        ("classifier (Frobenius)", *show("weight_error", "weight_bound", "weight_bound_sharper", "weight_norm")),
        ("scores / ||h||, largest", *show("score_error", "weight_bound", "weight_bound_sharper", "")),
        ("same class (% of tests)", *show("agree", "certified", "certified_sharper", "", digits=".2f")),
    ]
    if "trace_error" not in bounds:  # only FedRAN bounds it
        del rows[1]
    headers = ("", "truth", "bound", "sharper", "exact norm")
    return screen_table("Against the exact Gram matrix, last task", headers, rows)


def _communication(communication: Communication, masked: bool) -> Table:
    sizes = {
        "upload, busiest client and task": communication["up_max_bytes"],
        "upload, busiest client over the stream": communication["up_total_max_bytes"],
        "upload, everyone": communication["up_total_bytes"],
        "download, busiest client and task": communication["down_max_bytes"],
    }
    stages = communication["by_stage"]
    for stage, sent in stages.items() if len(stages) > 1 else ():
        sizes[f"upload, busiest client and task: {stage}"] = sent["up_max_bytes"]
    rows = [(name, _bytes(size)) for name, size in sizes.items()]
    if raw := communication["raw"]:
        rows.append((f"the busiest client's raw {raw['kind']}, same task", _bytes(raw["busiest_bytes"])))
        rows.append((f"everyone's raw {raw['kind']}", _bytes(raw["total_bytes"])))
    for name, mib in communication["accounting"].items():
        rows.append((f"as {_CONVENTIONS.get(name, name)} counts", f"{mib:.2f} MiB"))
    form = "masked" if masked else communication["wire"]["dtype"]
    return screen_table(f"Communication ({form})", ("", "size"), rows)


def _larger(raw: Raw, sent: int) -> str:
    """The warning where samples cost less than what is sent of them."""
    times = sent / raw["total_bytes"] if raw["total_bytes"] else 0
    together = f"; all uploads together are {times:,.{0 if times >= 10 else 2}f} times as large" if times > 1 else ""
    return (
        f"[yellow]warning:[/] {raw['larger']:,} of {raw['uploads']:,} uploads (per client and task) are larger than the"
        f" client's raw {raw['kind']} with their labels{together}"
    )


def _storage(record: RunRecord) -> Table:
    """What clients keep between their turns, of the methods whose clients do."""
    kinds = record["client_storage_bytes"]
    rows = {kind: _bytes(size) for kind, size in kinds.items()}
    if len(kinds) > 1:
        rows["all kinds together"] = _bytes(record["client_storage_max_bytes"])
    rows["raw samples (images, features)"] = str(record["client_samples_kept"])
    return screen_table("Kept by a client between its turns, at most", ("", "size"), rows.items())


def _privacy(privacy: Privacy, samples: int) -> Table:
    """What was told of samples, and made of them or of the models that learnt them."""
    told = privacy["told_samples"]
    share = f", {100 * told / samples:.3g} % of all" if told else ""
    counted = {
        "sums of one sample that clients sent": privacy["one_sample_sums"],
        "second moments of one sample that clients sent": privacy["one_sample_moments"],
        f"training samples that were sent alone{share}": told,
        "synthetic images that the server sent": privacy["synthetic_images"],
        "gradients of single samples that clients sent": privacy["sample_gradients"],
        "images that the server reconstructed of them": privacy["reconstructed_images"],
    }
    rows = ((name, f"{count:,}") for name, count in counted.items() if count)
    return screen_table("Samples that left the clients, or were made", ("", "number"), rows)


def _nodes(levels: Sequence[TreeLevel]) -> Table:
    """The links above the nodes of each level of a tree; those above the last level end at the server."""
    rows = (
        (
            *(str(level["level"]), f"{level['nodes']:,}", f"{level['messages']:,}"),
            *(_bytes(level["up_bytes"]), _bytes(level["down_bytes"]), f"{level['seconds']:.2f}"),
        )
        for level in levels
    )
    columns = ("level", "nodes", "messages up", "up", "down", "seconds")
    return screen_table("Nodes between the clients and the server", columns, rows)


def _guarantee(guarantee: Guarantee) -> str:
    """What the noise promises, in one line."""
    epsilon, unit = guarantee["epsilon"], guarantee["unit"]
    if epsilon is None:
        return f"Noise: none, {unit}s are clipped to {guarantee['clip']:g} and nothing is promised"
    whom = "the sum of each round's uploads" if guarantee["of_sums"] else "each client's uploads"
    return (
        f"Noise: {whom}: ({epsilon:.4g}, {guarantee['delta']:g})-private per {unit} (clip"
        f" {guarantee['clip']:g}, multiplier {guarantee['multiplier']:.4g}, releases {guarantee['releases']}; by"
        f" {guarantee['accountant']})"
    )


def _absences(absences: Absences) -> Table:
    """Turns without an upload in time, and what became of late uploads."""
    names = {
        "silent": "no answer",
        "gone": "left for good",
        "lost": "lost on the way, or too late",
        "late": "upload late",
        "late_arrived": "of these, arrived before the end",
        "late_absorbed": "of these, used",
        "late_dropped": "of these, not as expected",
    }
    rows = ((name, f"{absences[key]:,}") for key, name in names.items())  # type: ignore[literal-required]
    return screen_table("Turns of clients that failed", ("", "turns"), rows)


def _runtime(runtime: Runtime, environment: Environment) -> Table:
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
    title = f"Runtime ({environment['device']}, {environment['threads']} threads)"
    return screen_table(title, ("", "value"), rows.items())
