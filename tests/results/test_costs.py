"""Accuracy against bytes, for few and many methods."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from fcl_bench.results.figures import canvas as layout
from fcl_bench.results.figures.canvas import canvas
from fcl_bench.results.figures.costs import accuracy_against_cost, log_costs, pareto_front
from fcl_bench.results.figures.selection import line_look
from fcl_bench.results.summarise import summarise, used_runs
from tests.results.frames import made_up

pytestmark = pytest.mark.filterwarnings("error")


def figure_of(*runs):
    return accuracy_against_cost(summarise(used_runs(made_up(*runs))), "bytes")


def curves(axes):
    """The data lines, as lists of points."""
    return [[tuple(point) for point in container.lines[0].get_xydata()] for container in axes.containers]


def legend(figure):
    return [entry.get_text() for entry in figure.legends[0].get_texts()]


@pytest.mark.slow
def test_a_row_of_panels_per_setting_and_a_line_in_order_of_bytes(tmp_path):
    grid = [(rank, beta, seed) for rank in (32, 8, 128) for beta in (0.1, 1.0) for seed in (0, 1)]
    figure = figure_of(
        *(
            {"method_rank": rank, "beta": beta, "seed": seed, "up_max_mib": rank / 4, "A_avg": 60 + rank / 8 + seed}
            for rank, beta, seed in grid
        )
    )
    figure.savefig(tmp_path / "figure.svg")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["beta 0.1", "beta 0.1", "beta 1", "beta 1"]
    left = figure.axes[0]
    assert left.get_xscale() == "log"
    assert curves(left) == [[(2.0, 61.5), (8.0, 64.5), (32.0, 76.5)]]
    bars = left.containers[0].lines[2][0].get_segments()
    assert np.ptp(bars[0][:, 1]) == pytest.approx(2 * np.sqrt(0.5))
    assert legend(figure) == ["fedran [rank 8 to 128]", "Pareto front"]


def test_lines_join_points_that_differ_in_one_knob_only():
    grid = [(M, rank) for M in (64, 128) for rank in (8, 16, 32)]
    figure = figure_of(*({"method_M": M, "method_rank": r, "up_max_mib": float(M * r)} for M, r in grid))
    assert [[x for x, _ in curve] for curve in curves(figure.axes[0])] == [[512, 1024, 2048], [1024, 2048, 4096]]
    assert legend(figure)[0] == "fedran [M 64 to 128, rank 8 to 32]"


def test_of_many_families_a_legend_names_those_on_a_front_then_the_most_accurate():
    runs = [{"method": f"m{k:02}", "up_max_mib": 10.0 + k, "A_avg": 50.0 + k, "A_T": 60.0} for k in range(20)]
    runs += [{"method": "small", "up_max_mib": 1.0, "A_avg": 20.0, "A_T": 70.0}, {"method": "centralised_ridge"}]
    figure = figure_of(*runs)
    accurate = [f"m{k:02}" for k in (14, 15, 16, 17, 18, 19)]
    assert legend(figure) == [*accurate, "small", "centralised_ridge (ceiling)", "Pareto front", "14 others"]
    [others] = [line for line in figure.axes[0].lines if line.get_color() == "0.65"]
    assert others.get_xdata().tolist() == [10.0 + k for k in range(14)]


@pytest.mark.slow
def test_families_differ_in_colour_marker_or_filling():
    knobs = [{"method": f"method{k}", "up_max_mib": k + 1.0} for k in range(7)]
    figure = figure_of(*knobs, {"method": "fedran", "method_complement": "floor"}, {"method_complement": "null"})
    lines = [container.lines[0] for container in figure.axes[0].containers]
    assert len({(to_hex(line.get_color()), line.get_marker(), line.get_fillstyle()) for line in lines}) == 9
    assert legend(figure)[:2] == ["fedran complement=floor", "fedran complement=null"]


@pytest.mark.slow
def test_the_ceiling_is_a_dotted_line_and_what_sent_nothing_is_no_point(tmp_path):
    figure = figure_of(
        {"method": "centralised_ridge", "A_avg": 90.0, "up_max_mib": 0.0}, {}, {"method": "none", "up_max_mib": 0.0}
    )
    figure.savefig(tmp_path / "figure.png")
    left = figure.axes[0]
    [ceiling] = [line for line in left.lines if line.get_linestyle() == ":" and len(line.get_ydata())]
    assert set(ceiling.get_ydata()) == {90.0}
    assert curves(left) == [[(4.0, 80.0)]]
    assert legend(figure)[-2:] == ["centralised_ridge (ceiling)", "Pareto front"]


@pytest.mark.slow
def test_a_bar_that_reaches_below_zero_leaves_the_layout_alone(tmp_path):
    """One standard deviation of 0.1 and 4 MiB is more than their mean; a log axis has no place for its end."""
    runs = [{"seed": seed, "up_max_mib": size} for seed, size in enumerate((0.1, 4.0))]
    figure = figure_of(*runs, {"method": "afl"})
    figure.savefig(tmp_path / "figure.png")  # Matplotlib warns where it gives up the layout, and warnings are errors
    [bars] = [container.lines[2] for container in figure.axes[0].containers if container.lines[2]]
    [bar] = bars[0].get_segments()
    assert bar[:, 0] == pytest.approx([0.001 * 2.05, 2.05 + 3.9 / np.sqrt(2)])


def test_a_ceiling_alone_is_a_picture_too(tmp_path):
    figure_of({"method": "centralised_ridge", "up_max_mib": 0.0}).savefig(tmp_path / "figure.png")


@pytest.mark.slow
def test_dollar_signs_in_a_name_are_no_formula(tmp_path):
    figure_of({"data": r"$\a$"}, {"data": "b"}).savefig(tmp_path / "figure.png")


def test_the_front_is_drawn_in_steps_behind_the_points():
    costs = [(1.0, 60.0), (2.0, 55.0), (4.0, 80.0), (4.0, 70.0), (8.0, 80.0)]
    figure = figure_of(*({"method": f"m{i}", "up_max_mib": x, "A_avg": y} for i, (x, y) in enumerate(costs)))
    [front] = [line for line in figure.axes[0].lines if line.get_drawstyle() == "steps-post"]
    assert [tuple(point) for point in front.get_xydata()] == [(1.0, 60.0), (4.0, 80.0)]
    assert front.get_zorder() < min(container.lines[0].get_zorder() for container in figure.axes[0].containers)


def test_settings_beyond_four_are_counted_with_the_option_that_draws_them():
    figure = figure_of(*({"beta": beta} for beta in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)))
    assert len(figure.axes) == 8
    told = figure.caption
    assert "2 more settings have no panel here; to draw others: fcl-tables --figures --where beta=0.5." in told


@pytest.mark.parametrize("longest", [20, 29, 38, 39, 44])
def test_a_legend_is_within_its_figure(longest):
    figure, _ = canvas(2, 2)
    names = [f"fedran {number} (rank 256, ridge 0.001, M 8192)".ljust(longest)[:longest] for number in range(6)]
    layout.legend(figure, {name: line_look(("#0072B2", "o"), number) for number, name in enumerate(names)})
    figure.canvas.draw()
    [below] = figure.legends
    extent = below.get_window_extent()
    assert extent.x0 >= 0
    assert extent.x1 <= figure.bbox.width


points = st.lists(st.tuples(st.floats(0, 9), st.floats(0, 100) | st.just(float("nan"))), max_size=12)


@settings(max_examples=40)
@given(points=points)
def test_nothing_beats_the_front_and_the_front_beats_all_else(points):
    rows = pd.DataFrame(points, columns=["cost", "gain"], dtype=float).assign(method="fedran", gates="")
    front = pareto_front(rows, "cost", "gain")[["cost", "gain"]].to_numpy().tolist()
    there = [[x, y] for x, y in points if x > 0 and not np.isnan(y)]
    beaten = [[x, y] for x, y in there if any(a <= x and b >= y and (a < x or b > y) for a, b in there)]
    assert sorted(front) == sorted(map(list, {tuple(point) for point in there if point not in beaten}))


def test_a_row_that_meets_a_gate_is_crossed_out_and_never_on_the_front():
    figure = figure_of(
        {"method": "afl", "up_max_mib": 2.0, "A_avg": 60.0},
        {"method": "stsa", "up_max_mib": 1.0, "A_avg": 90.0, "gates": "chance"},
        {"method": "centralised_ridge", "up_max_mib": 1.0, "A_avg": 99.0, "gates": "chance"},
    )
    front, cross = (
        next(line for line in figure.axes[0].lines if line.get_color() == look) for look in ("0.8", "black")
    )
    assert front.get_xydata().tolist() == [[2.0, 60.0]]
    assert cross.get_xydata().tolist() == [[1.0, 90.0]]
    assert legend(figure)[-2:] == ["Pareto front", "meets a gate: not on the front"]


@pytest.mark.parametrize(("least", "most"), [(1, 5), (0.001, 0.09), (0.0005, 80), (45, 4000), (1.02, 1.031), (3, 3)])
def test_numbers_on_a_log_axis_of_three_beside_each_other_lie_apart(least, most):
    figure, grid = canvas(3, 3, height=3.4)
    for axes in grid:
        log_costs(axes, pd.Series([least, most]))
    figure.canvas.draw()
    for axes in grid:
        names = [tick for tick in axes.get_xticklabels(which="both") if tick.get_text()]
        assert all(float(tick.get_text()) > 0 for tick in names)
        ends = sorted((tick.get_window_extent() for tick in names), key=lambda end: end.x0)
        assert all(left.x1 < right.x0 for left, right in pairwise(ends))
