"""Every table and figure as a grid: its cells compose, say what the papers say, and have a twin in miniature."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from fcl_bench.composition import composed, register_presets
from fcl_bench.config import Settings, load_settings
from fcl_bench.errors import UserError
from fcl_bench.execution.run import run
from fcl_bench.papers.experiments import PROFILES, experiments, grid_cells, runs_of
from fcl_bench.papers.matching import overrides, settings_of, words_without_key
from fcl_bench.papers.printed import printed
from tests.small_methods import trains_by_gradient

LIST = Path(__file__).parents[2] / "docs" / "reference" / "experiments.md"
#: Tables by other names than their number.
NAMED = {
    ("afcl", "Table 4.2"): "afcl_accuracy",
    ("afcl", "Table F.4"): "afcl_stability_plasticity",
    ("afcl", "Table F.5"): "afcl_stability_plasticity",
    ("stsa", "Table 1, joint"): "stsa_table1_joint",
    ("stsa", "Table 2, joint"): "stsa_table2_joint",
    ("afl", "Table 1, gradient"): "afl_table1_gradient",
    ("afl", "Table 2, gradient"): "afl_table2_gradient",
    ("afl", "Figure 2, gradient"): "afl_figure2",
    ("afl", "Figure 3"): "afl_table1",
    ("stsa", "Table 1, gradient"): "stsa_table1_gradient",
    ("stsa", "Table 2, gradient"): "stsa_table2_gradient",
    ("stsa", "Table 3, gradient"): "stsa_table3_gradient",
    ("stsa", "Table 4, gradient"): "stsa_table4_gradient",
    ("stsa", "Table 5, gradient"): "stsa_table5_gradient",
}
#: Papers whose own methods train nothing, so that those which do have an experiment of their own.
CLOSED_FORM = ("afl", "stsa")
#: What a printed setting says in words that no key of ours can say; such cells have no run.
NO_KEY = ("task ", "average over", "images made at 32 pixels")
#: What it leaves open, by its words: the keys that may have any value.
OPEN = {
    "how it is trained is not said": r"method\.training\..*|beta|method\.restart",
}
#: One table of each kind, whose likely cells are few.
SAMPLED = {
    *("fedran_figure6", "stsa_table1", "stsa_table4", "stsa_table1_gradient"),
    *("afl_table1", "afl_table1_gradient", "afl_table3", "fedprotip_table15"),
}
PRINTED = printed().query("method != ''")
LISTED = re.compile(r"`(\w+)` \| (\d+)(?: x (\d+))? \|")


@functools.cache
def settings_for(*words: str) -> Settings:
    """The two long tests compose the same cells, a fifth of a second each."""
    return load_settings(composed(words))


def flat(settings: Settings) -> dict[str, object]:
    found: dict[str, object] = {}

    def walk(node: dict[str, object], prefix: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = value

    walk(settings.identity(), "")
    return found


def experiment_of(paper: str, table: str, method: str, setting: str) -> str:
    if "method.activation=none" in setting:
        table = f"{table}, linear"
    elif method == "centralised":
        table = f"{table}, joint"
    elif paper in CLOSED_FORM and trains_by_gradient(method):
        table = f"{table}, gradient"
    return NAMED.get((paper, table), f"{paper}_{table.lower().replace(', ', '_').replace(' ', '')}")


@functools.cache
def printed_settings():
    """(experiment, overrides of a printed cell, what it leaves open), each once."""
    found = {}
    for cell in PRINTED.to_dict("records"):
        words = words_without_key(cell["setting"])
        if any(word.startswith(NO_KEY) for word in words):
            continue
        left = [key for key in ("tasks", "clients", "beta") if not cell[key]]
        left += [OPEN[word] for word in words if word in OPEN]
        where = [cell[column] for column in ("paper", "table", "method", "setting")]
        found[experiment_of(*where), overrides(cell)] = "|".join(left)
    return [(*key, left) for key, left in found.items()]


def is_run(experiment: str, wanted: tuple[str, ...], left: str, cells: list[dict[str, object]]) -> bool:
    there = flat(settings_of(wanted))
    return any(
        not [
            key
            for key in {*there, *here}
            if key != "seed" and not re.fullmatch(left, key) and there.get(key, here) != here.get(key, there)
        ]
        for here in cells
    )


def likely(wanted: tuple[str, ...], cells: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The cells that have the swept values that a printed setting states, and of what it does not state the first's."""
    stated = dict(word.split("=", 1) for word in wanted)
    first = dict(word.split("=", 1) for word in cells[0])

    def agrees(key: str, value: str) -> bool:
        return key == "experiment/preset" or _value(stated.get(key, first[key])) == _value(value)

    return [cell for cell in cells if all(agrees(*word.split("=", 1)) for word in cell)]


def _value(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text.lower()


COMPARED = {name for name, _, _ in printed_settings()}


@pytest.mark.parametrize("experiment", experiments())
def test_the_miniature_has_a_cell_for_every_cell(experiment):
    full, quick = (grid_cells(experiment, profile) for profile in PROFILES)
    assert len(full) == len(quick) == len(set(full)) == len(set(quick))
    assert len(runs_of(experiment, "quick")) == len(quick)
    if experiment != "fedprotip_table7":  # two trials in the paper
        assert len(runs_of(experiment)) == 3 * len(full)


@pytest.mark.parametrize("experiment", experiments())
def test_the_last_cell_of_both_grids_composes_and_says_where_it_is_from(experiment):
    """All cells: -m slow, and of the full profile a table of each kind here: it says no more than the printed cells."""
    quick = settings_for(*grid_cells(experiment, "quick")[-1])
    assert (quick.resolved["experiment"], quick.resolved["profile"]) == (experiment, "quick")
    assert "grid" not in quick.resolved
    assert (quick.data.name, quick.scalars.tasks <= 6) == ("digits", True)
    if experiment in SAMPLED:
        full = settings_for(*grid_cells(experiment, "full")[-1])
        assert full.data.name != "digits"
        assert full.resolved["profile"] == "full"


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("experiment", experiments())
def test_all_cells_are_runs_of_their_own(experiment, profile):
    cells = [settings_for(*cell) for cell in grid_cells(experiment, profile)]
    assert {settings.resolved["profile"] for settings in cells} == {profile}
    assert {settings.data.name == "digits" for settings in cells} == {profile == "quick"}
    ids = {json.dumps(settings.identity(), sort_keys=True) for settings in cells}
    assert len(ids) == len(cells)


@pytest.mark.parametrize(
    ("experiment", "wanted", "left"),
    [case for name, case in {case[0]: case for case in printed_settings()}.items() if name in SAMPLED],
)
def test_the_last_printed_cell_of_a_table_is_run(experiment, wanted, left):
    """All cells of all tables: -m slow."""
    cells = likely(wanted, grid_cells(experiment))
    assert any(is_run(experiment, wanted, left, [flat(settings_for(*cell))]) for cell in reversed(cells))


@pytest.mark.slow
@pytest.mark.parametrize("experiment", sorted(COMPARED))
def test_every_printed_cell_is_run(experiment):
    cells = [flat(settings_for(*cell)) for cell in grid_cells(experiment)]
    settings = [(wanted, left) for name, wanted, left in printed_settings() if name == experiment]
    assert settings
    for wanted, left in settings:
        assert is_run(experiment, wanted, left, cells), wanted


@pytest.mark.slow
def test_every_printed_table_of_our_methods_has_its_experiment():
    tables = {experiment_of(*row[["paper", "table", "method", "setting"]]) for _, row in PRINTED.iterrows()}
    assert tables <= set(experiments())


def test_names_of_experiment_and_profile_are_no_part_of_a_run():
    ids = {
        json.dumps(settings_for(*words, "beta=0.5", "seed=0").identity(), sort_keys=True)
        for words in (("experiment=fedran_table3",), ("experiment=fedran_table4",), ("experiment=fedran_table5",))
    }
    assert len(ids) == 1


def test_what_is_typed_wins():
    words = ["method.rank=7", "seed=3", "backbone=pixels", "beta=0.7"]
    runs = runs_of("fedran_figure6", "quick", words)
    assert len(runs) == 2, "only M is left to sweep"
    settings = settings_for(*runs[0])
    assert (settings.method.rank, settings.scalars.seed, settings.scalars.beta) == (7, 3, 0.7)
    assert settings.backbone.name == "pixels"
    typed = settings_for("experiment=fedran_table3", "profile=quick", "tasks=2", "method.M=48", "backbone.width=4")
    assert (typed.scalars.tasks, typed.method.M, typed.backbone.width) == (2, 48, 4)


def test_the_miniature_of_one_run_needs_no_experiment():
    settings = settings_for("profile=quick", "method=fedprotip")
    assert (settings.backbone.name, settings.method.training.rounds, settings.method.columns) == ("tiny", 2, 16)
    assert settings.resolved["experiment"] is None


@pytest.mark.parametrize(("experiment", "profile"), [("fedran_table33", "full"), ("fedran_table3", "fast")])
def test_an_unknown_grid_is_the_users_mistake(experiment, profile):
    with pytest.raises(UserError, match="not known"):
        runs_of(experiment, profile)


@pytest.mark.slow_cases("fedprotip_table15-1")
@pytest.mark.parametrize(("experiment", "index"), [("afcl_sensitivity", -1), ("fedprotip_table15", 1)])
def test_a_cell_in_miniature_runs(experiment, index, tmp_path):
    outcome = run(settings_for(*grid_cells(experiment, "quick")[index], f"out={tmp_path}", "tasks=2"))
    assert 0 < outcome.record["metrics"]["A_T"] <= 100
    config = (outcome.folder / "config.yaml").read_text()
    assert f"experiment: {experiment}\n" in config
    assert "profile: quick\n" in config


def test_the_list_names_every_experiment_with_its_number_of_runs():
    """docs/reference/experiments.md: `| ... | `experiment` | cells | ...`, where seeds are three unless it says x 2."""
    listed = {name: (int(cells), int(seeds or 3)) for name, cells, seeds in LISTED.findall(LIST.read_text())}
    counted = {}
    for name in experiments():
        cells = len(grid_cells(name))
        counted[name] = (cells, len(runs_of(name)) // cells)
    assert listed == counted


def test_every_preset_is_used_by_an_experiment_or_a_command_of_the_docs():
    chosen = re.compile(r"experiment/preset=\[([\w,]+)\]")
    told = {
        name
        for page in LIST.parents[1].rglob("*.md")
        for names in chosen.findall(page.read_text())
        for name in names.split(",")
    }
    used = told | {
        name
        for experiment in experiments()
        for profile in PROFILES
        for cell in grid_cells(experiment, profile)
        for word in cell
        if word.startswith("experiment/preset=")
        for name in re.findall(r"\w+", word.partition("=")[2])
    }
    assert set(register_presets()) == used
