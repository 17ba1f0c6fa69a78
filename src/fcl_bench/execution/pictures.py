"""The pictures that a run leaves in its folder: accuracy, and images of the server's."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from fcl_bench.engine.loop import Federation
from fcl_bench.engine.metrics import accuracy_matrix
from fcl_bench.execution.run_json import Result
from fcl_bench.execution.screen import headline
from fcl_bench.protocol.method import Picture

#: Width and height, and the panels' left ends and widths, in inches. Constrained layout would find much the same
#: places, but it draws the figure twice, which doubles the time of a picture.
_SIZE = (10.0, 4.2)
_CURVE, _HEAT, _BAR = (0.75, 4.3), (5.85, 3.1), (9.17, 0.16)
_BOTTOM, _HEIGHT = 0.68, 3.2
#: Accuracy axes span at least this many points, so that their labels fit beside the axes (97.5, and not 97.4875).
_LEAST_SPAN = 5.0
#: With more points, markers would cover each other and the lines.
_MOST_MARKED = 40
#: Images in a row.
_ACROSS = 16
#: Matrices of more tasks show shades only, since numbers would be too small to read.
_NUMBERED = 10


def drawn(record: Result, federation: Federation) -> dict[str, bytes]:
    """File name -> PNG: accuracy.png, and what the server made or reconstructed of images."""
    title, stream = headline(record), federation.stream
    matrix = accuracy_matrix(federation.state.answers["correct"], stream.test_sizes)
    seen = [task.columns_seen for task in stream.tasks]
    figures = {"accuracy.png": accuracy_figure(title, record["metrics"]["accuracy"], matrix, seen)}
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
    _number_tasks(curve.xaxis)
    seen = dict(enumerate(classes_seen, start=1))
    curve.xaxis.set_major_formatter(lambda task, _: f"{task:.0f}\n({seen[int(task)]})" if task in seen else "")
    curve.set_ylabel("accuracy (%)")
    curve.set_ylim(_spanned(*curve.get_ylim()))
    curve.grid(alpha=0.3)
    curve.legend()

    image = matrix_panel(heat, matrix, *_spanned(np.nanmin(matrix), np.nanmax(matrix)))
    figure.colorbar(image, cax=bar, label="accuracy (%)")
    return figure


def matrix_panel(axes: Axes, matrix: np.ndarray, low: float, high: float) -> AxesImage:
    """Draw a[t, tau] in percent as shades, with numbers where there is room; returns the image for a colour bar."""
    end = len(matrix) + 0.5
    image = axes.imshow(matrix, cmap="cividis", vmin=low, vmax=high, extent=(0.5, end, end, 0.5))
    axes.grid(False)
    _number_tasks(axes.xaxis)
    _number_tasks(axes.yaxis)
    axes.set_xlabel("test samples of task")
    axes.set_ylabel("after task")
    for (row, column), value in np.ndenumerate(matrix) if len(matrix) <= _NUMBERED else ():
        if not np.isnan(value):
            shade = "white" if value < (low + high) / 2 else "black"
            axes.text(column + 1, row + 1, f"{value:.0f}", ha="center", va="center", fontsize=8, color=shade)
    return image


def _number_tasks(axis: Axis) -> None:
    """Set ticks at tasks alone, as many as have room."""
    axis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def _spanned(low: float, high: float) -> tuple[float, float]:
    """The interval, made wider if it is too short: on both sides, but not into what no accuracy can be."""
    more = max(0.0, _LEAST_SPAN - (high - low)) / 2
    low, high = min(low, max(low - more, 0.0)), max(high, min(high + more, 100.0))
    return min(low, max(high - _LEAST_SPAN, 0.0)), max(high, min(low + _LEAST_SPAN, 100.0))


def _panel(figure: Figure, left: float, width: float) -> Axes:
    """Axes between these ends in inches; all panels have the same height."""
    return figure.add_axes((left / _SIZE[0], _BOTTOM / _SIZE[1], width / _SIZE[0], _HEIGHT / _SIZE[1]))


def images_figure(title: str, picture: Picture) -> Figure:
    """A row of images for each task, every image with its class."""
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
