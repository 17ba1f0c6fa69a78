"""The pictures that a run leaves in its folder: accuracy and, where measured, its rounds, drift and projection."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fcl_bench.engine.loop import Federation
from fcl_bench.engine.metrics import accuracy_matrix
from fcl_bench.engine.reports import BestRounds
from fcl_bench.execution.audits import drift_of
from fcl_bench.execution.record import test_sizes
from fcl_bench.execution.run_json import Result
from fcl_bench.execution.screen import headline
from fcl_bench.protocol.method import Picture

#: Width and height, and the panels' left ends and widths, in inches. Constrained layout would find much the same
#: places, but it draws the figure twice, which doubles the time of a picture.
_SIZE = (10.0, 4.2)
_CURVE, _HEAT, _BAR = (0.75, 4.4), (5.85, 3.2), (9.17, 0.16)
_BOTTOM, _HEIGHT = 0.68, 3.2
#: Accuracy axes span at least this many points, so that their labels fit beside the axes (97.5, and not 97.4875).
_LEAST_SPAN = 5.0
#: With more points, markers would cover each other and the lines.
_MOST_MARKED = 40
#: The most tasks with a separate line; in a longer stream, this many are chosen, spread over it.
_LINES = 6
#: Of Matplotlib's usual letters (10 points), with their brackets and the room between two labels.
_INCHES_A_CHARACTER, _GAP_INCHES = 0.075, 0.06
#: Images in a row.
_ACROSS = 16
#: More names than that are only noise.
_MOST = 20


def drawn(record: Result, federation: Federation) -> dict[str, bytes]:
    """File name -> PNG: accuracy.png, and where measured rounds.png (AFL Fig. 3), drift.png (FedRAN Fig. 2), theory.png
    (FedProTIP Fig. 2); and what the server made or reconstructed of images."""
    title, tasks, bounds = headline(record), federation.stream.tasks, record["bounds"]
    matrix = accuracy_matrix(federation.state.answers["correct"], test_sizes(federation))
    seen = [task.columns_seen for task in tasks]
    figures = {"accuracy.png": accuracy_figure(title, record["metrics"]["accuracy"], matrix, seen)}
    if record["rounds"]:
        figures["rounds.png"] = rounds_figure(title, federation.rounds.values(), record["rounds"])
    drift = drift_of(federation.audits)
    if drift is not None and len(tasks) > 1:
        figures["drift.png"] = drift_figure(title, drift.matrix(len(tasks)), matrix)
    if bounds and "rho" in bounds[0]:
        figures["theory.png"] = theory_figure(title, bounds)
    for name, picture in federation.server.pictures().items():
        figures[f"{name}.png"] = images_figure(f"{title}: {name} images", picture)
    files = {}
    for name, figure in figures.items():
        buffer = io.BytesIO()
        # Level 1 takes three fifths of the usual level's time, and the file is a tenth larger.
        figure.savefig(buffer, format="png", dpi=150, pil_kwargs={"compress_level": 1})
        files[name] = buffer.getvalue()
    return files


def accuracy_figure(title: str, pooled: list[float | None], matrix: np.ndarray, classes_seen: list[int]) -> Figure:
    """Left: A_t on all classes seen (pooled) against the task; right: a[t, tau] as a heat map.

    Args:
        title: of the whole figure.
        pooled: [A_1..A_T] in percent; None where a task has no test sample.
        matrix: (T, T) in percent, NaN above the diagonal.
        classes_seen: C_t per task.
    """
    tasks = np.arange(1, len(pooled) + 1)
    figure = Figure(figsize=_SIZE)
    curve, heat, bar = (_panel(figure, *place) for place in (_CURVE, _HEAT, _BAR))
    figure.suptitle(title, y=1 - 0.04 / _SIZE[1], va="top")

    newest = np.diag(matrix)
    circle, square = ("o", "s") if len(tasks) <= _MOST_MARKED else (None, None)
    curve.plot(tasks, np.array(pooled, dtype=float), marker=circle, color="#1f4e79", label="all classes seen, $A_t$")
    curve.plot(tasks, newest, marker=square, color="#c55a11", linestyle="--", label="newest task, $a_{t,t}$")
    curve.set_xlabel("task (classes seen)")
    ticks = task_ticks([f"({seen})" for seen in classes_seen], _CURVE[1])
    curve.set_xticks(ticks, [f"{t}\n({classes_seen[t - 1]})" for t in ticks])
    curve.set_ylabel("accuracy (%)")
    curve.set_ylim(_spanned(*curve.get_ylim()))
    curve.grid(alpha=0.3)
    curve.legend()

    low, high = _spanned(np.nanmin(matrix), np.nanmax(matrix))
    image = heat.imshow(matrix, cmap="viridis", vmin=low, vmax=high)
    heat.set_xlabel("test set of task")
    heat.set_ylabel("after task")
    name_tasks(heat, len(tasks), _HEAT[1])
    if len(tasks) <= 10:
        middle = (low + high) / 2
        for (row, column), value in np.ndenumerate(matrix):
            if not np.isnan(value):
                shade = "white" if value < middle else "black"
                heat.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=shade)
    figure.colorbar(image, cax=bar, label="accuracy (%)")
    return figure


def rounds_figure(title: str, rows: list[tuple[int, int, float]], best: BestRounds) -> Figure:
    """A_t against the rounds of exchange of all tasks, one task after the other, with the best round of each.

    Args:
        title: of the whole figure.
        rows: task, round and accuracy in percent (NaN: no test sample yet), as in rounds.csv.
        best: of each task.
    """
    ends = {task: round_ + 1 for task, round_, _ in rows}  # the last row of a task is its last round's
    begins = dict(zip(ends, np.cumsum([0, *ends.values()]), strict=False))
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title)
    at = np.array([begins[task] + round_ + 1 for task, round_, _ in rows])
    marker = "." if len(at) <= _MOST_MARKED else None
    axes.plot(at, [accuracy for *_, accuracy in rows], marker=marker, color="#1f4e79", label="all classes seen, $A_t$")
    known = [(task, r, value) for task, (r, value) in enumerate(zip(best["best_round"], best["best"], strict=True))]
    marked = [(begins[task] + r + 1, value) for task, r, value in known if r is not None]
    axes.plot(*zip(*marked, strict=True), "*", color="#c55a11", markersize=10, label="best, chosen on test data")
    for begin in list(begins.values())[1:]:
        axes.axvline(begin, color="0.7", linewidth=0.8, zorder=0)
    axes.set_xlabel("rounds" if len(ends) == 1 else "rounds, one task after the other")
    axes.set_ylabel("accuracy (%)")
    axes.set_ylim(_spanned(*axes.get_ylim()))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _spanned(low: float, high: float) -> tuple[float, float]:
    """The interval, made wider if it is too short: on both sides, but not into what no accuracy can be."""
    more = max(0.0, _LEAST_SPAN - (high - low)) / 2
    low, high = min(low, max(low - more, 0.0)), max(high, min(high + more, 100.0))
    return min(low, max(high - _LEAST_SPAN, 0.0)), max(high, min(low + _LEAST_SPAN, 100.0))


def _panel(figure: Figure, left: float, width: float) -> Axes:
    """Axes between these ends in inches; all panels have the same height."""
    return figure.add_axes((left / _SIZE[0], _BOTTOM / _SIZE[1], width / _SIZE[0], _HEIGHT / _SIZE[1]))


def drift_figure(title: str, drift: np.ndarray, accuracy: np.ndarray) -> Figure:
    """Left: drift of each task's reference samples against the task learnt last; right: accuracy against drift.

    Args:
        title: of the whole figure.
        drift: (T, T) row s, column tau; NaN above the diagonal.
        accuracy: (T, T) in percent, likewise.
    """
    tasks = len(drift)
    shown = sorted({round(t) for t in np.linspace(0, tasks - 2, min(_LINES, tasks - 1))})
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    lines, scatter = figure.subplots(1, 2)
    figure.suptitle(title)
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(shown)))
    for tau, shade, marker in zip(shown, shades, "os^Dvp"[: len(shown)], strict=True):
        style = {"color": shade, "marker": marker, "label": f"task {tau + 1}"}
        lines.plot(np.arange(tau, tasks) + 1, drift[tau:, tau], **style)
        scatter.plot(drift[tau:, tau], accuracy[tau:, tau], linewidth=0.8, **style)
    lines.set_xlabel("after task")
    lines.set_ylabel(r"drift of features, mean $\Vert g_s(x) - g_\tau(x)\Vert_2$")
    lines.set_xticks(np.arange(1, tasks + 1)[:: max(1, tasks // 10)])
    scatter.set_xlabel("drift of the task's features")
    scatter.set_ylabel("accuracy on the task (%)")
    for axes in (lines, scatter):
        axes.grid(alpha=0.3)
    # Accuracy falls as drift grows, so there is room at the top.
    scatter.legend(title="reference samples of", loc="upper right")
    return figure


def theory_figure(title: str, rows: list[dict[str, float | None]]) -> Figure:
    """Left: rho_t, mean and least over the rounds of each task; right: beta_{tau -> t} as a heat map.

    Args:
        title: of the whole figure.
        rows: per task, what `ProjectionAudit` reported.
    """
    tasks = np.arange(1, len(rows) + 1)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    adequacy, interference = figure.subplots(1, 2, width_ratios=(1.25, 1))
    figure.suptitle(title)
    looks = (("rho", "mean over rounds", "o", "#1f4e79"), ("rho_min", "least", "s", "#c55a11"))
    for key, label, marker, colour in looks:
        values = np.array([row[key] for row in rows], dtype=float)
        adequacy.plot(tasks, values, marker=marker, label=label, color=colour)
    adequacy.set_ylim(0, 1.05)
    adequacy.set_xlabel("task $t$")
    adequacy.set_ylabel(r"$\rho_t$, gradient energy left")
    adequacy.set_xticks(tasks[:: max(1, len(tasks) // 10)])
    adequacy.grid(alpha=0.3)
    adequacy.legend()
    beta = np.array([[row.get(f"beta_{tau}") for row in rows] for tau in range(len(rows))], dtype=float)
    image = interference.imshow(beta, cmap="cividis", vmin=0, vmax=1)
    interference.set_xlabel("while learning task $t$")
    interference.set_ylabel(r"old task $\tau$")
    name_tasks(interference, len(rows), inches=3.2)
    figure.colorbar(image, ax=interference, label=r"$\beta_{\tau \to t}$, old gradient left")
    return figure


def images_figure(title: str, picture: Picture) -> Figure:
    """A row of images for each task, every image with its class.

    Args:
        title: of the whole figure.
        picture: of whose tasks the first `_ACROSS` images each are shown.
    """
    tasks = picture.tasks.unique().tolist()
    rows = [(picture.tasks == task).nonzero().squeeze(1)[:_ACROSS] for task in tasks]
    across = max(len(row) for row in rows)
    figure = Figure(figsize=(0.62 * across + 0.8, 0.78 * len(rows) + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=9)
    grid = figure.subplots(len(rows), across, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for task, row, places in zip(tasks, rows, grid, strict=True):
        for index, axes in zip(row.tolist(), places, strict=False):
            axes.imshow(picture.images[index].permute(1, 2, 0).cpu().numpy(), interpolation="nearest")
            axes.set_title(str(int(picture.labels[index])), fontsize=7, pad=2)
        places[0].text(
            -0.15, 0.5, f"task {task + 1}", transform=places[0].transAxes, ha="right", va="center", fontsize=8
        )
    return figure


def task_ticks(labels: Sequence[str], inches: float) -> np.ndarray:
    """The numbers of the tasks, from 1, to put names at: in steps of 1, 2, 5, 10, 20, ..., none over its neighbour.

    Args:
        labels: each task's name on the axis, the longest of its lines.
        inches: length of the axis.
    """
    room = _INCHES_A_CHARACTER * max(map(len, labels)) + _GAP_INCHES
    most = max(1, min(_MOST, int(inches / room)))
    least = -(-len(labels) // most)
    decade = 10 ** (len(str(least)) - 1)
    step = next(times * decade for times in (1, 2, 5, 10) if times * decade >= least)
    return np.arange(1, len(labels) + 1)[::step]


def name_tasks(heat: Axes, tasks: int, inches: float) -> None:
    """Put the tasks' numbers beside a heat map of T x T cells whose axes have this length."""
    ticks = task_ticks([str(t) for t in range(1, tasks + 1)], inches)
    heat.set_xticks(ticks - 1, ticks)
    heat.set_yticks(ticks - 1, ticks)
