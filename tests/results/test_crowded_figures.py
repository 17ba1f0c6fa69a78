"""With many methods in several settings, no two texts of a figure intersect, and a legend has ten entries at most."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from fcl_bench.results.figures.figure_set import FIGURES, figure_set
from tests.results.crowds import crowd, texts_of, troubles

pytestmark = pytest.mark.filterwarnings("error")

#: All figures but `accuracy_against_epsilon` and `_label_rate`, whose quantities vary in the other pair.
SETTINGS = (
    {"beta": (0.1, 1.0), "clients": (5, 20)},
    {"label_rate": (0.1, 0.5), "noise.epsilon": (1.0, 8.0)},
)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings))
@pytest.mark.parametrize("methods", [6, 20, 60])
def test_no_texts_of_any_figure_intersect(tmp_path, methods, settings):
    figures = figure_set(crowd(tmp_path, methods, settings), tmp_path)
    swept = {f"accuracy_against_{quantity.removeprefix('noise.')}" for quantity in settings}
    others = {"accuracy_against_beta", "accuracy_against_clients", "accuracy_against_label_rate"} - swept
    assert set(FIGURES) - figures.keys() == (others | {"accuracy_against_epsilon"}) - swept
    found = {name: told for name, figure in figures.items() if (told := list(troubles(figure)))}
    assert not found
    entries = {name: len(legend.get_texts()) for name, figure in figures.items() for legend in figure.legends}
    assert entries.keys() == figures.keys() - {"accuracy_matrix"}
    assert max(entries.values()) <= 10


def test_no_texts_of_one_figure_intersect(tmp_path):
    name = "accuracy_over_tasks"
    figure = figure_set(crowd(tmp_path, 12, {"beta": (0.1,)}, whole=False), tmp_path, [name])[name]
    assert not list(troubles(figure))
    assert len(figure.legends[0].get_texts()) == 10


def test_texts_that_intersect_or_leave_the_canvas_are_found():
    figure = Figure()
    figure.text(0.5, 0.5, "one")
    figure.text(0.51, 0.5, "another")
    figure.text(0.99, 0.2, "too far to the right")
    figure.text(0.1, 0.1, "unseen", visible=False)
    assert [text.get_text() for text in texts_of(figure)] == ["one", "another", "too far to the right"]
    assert list(troubles(figure)) == ["'one' and 'another' intersect", "'too far to the right' leaves the canvas"]
