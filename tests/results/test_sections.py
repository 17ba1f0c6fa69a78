"""The tables of accuracy, communication and runtime: nothing is averaged, left blank or mixed that must not be."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.errors import UserError
from fcl_bench.results.best import BEST, ONE_SEED
from fcl_bench.results.measures import MEASURES
from fcl_bench.results.page.page import html_page
from fcl_bench.results.summarise import summarise, used_runs
from fcl_bench.results.tables.cells import ABSENT, NOT_RUN
from fcl_bench.results.tables.sections import sections
from tests.results.frames import made_up
from tests.results.pages import parsed


def sections_of(*runs, measures=(), by=()):
    knobs = [key for key in by if key.startswith("method.")]
    return sections(summarise(used_runs(made_up(*runs), knobs)), [MEASURES[name] for name in measures], by)


def shown(section, **where):
    """The cells of the row that has `where`, by heading."""
    sheet = section.sheet
    rows = [dict(zip(sheet.headers, row, strict=True)) for row in sheet.rows]
    [row] = [row for row in rows if all(row[key].text == value for key, value in where.items())]
    return {heading: cell.text for heading, cell in row.items()}


def test_each_measure_stands_in_its_table_with_the_number_of_seeds():
    tables = sections_of({"A_avg": 70.0}, {"A_avg": 73.0, "seed": 1}, {"A_avg": 77.0, "seed": 2})
    assert list(tables) == ["accuracy", "communication", "runtime"]
    accuracy = shown(tables["accuracy"], method="fedran")
    assert (accuracy["n"], accuracy["A_avg (%)"]) == ("3", "73.33 ± 3.51")
    told = {"method": "fedran", "n": "3", "upload (MiB)": "4.00 ± 0"}
    assert shown(tables["communication"], method="fedran") == told
    assert shown(tables["runtime"], method="fedran")["seconds per task"] == "1.00 ± 0"


def test_where_a_row_has_several_settings_each_cell_has_its_number_of_seeds_and_its_gates():
    runs = [{"beta": 0.1, "A_T": 70.0}, {"beta": 0.1, "A_T": 70.0, "seed": 1}, {"beta": 1.0, "gates": "chance"}]
    row = shown(sections_of(*runs, by=["method"])["accuracy"], method="fedran")
    assert row["A_T (%), beta 0.1"] == "70.00 ± 0 (2)"
    assert row["A_T (%), beta 1"] == "70.00 (1) [gate: chance]"


def test_what_clients_keep_is_shown_where_one_keeps_something():
    nothing = {"client_storage_mib": 0.0, "client_samples_kept": 0.0}
    plain = sections_of({"method": "stsa", **nothing})["communication"]
    assert plain.sheet.headers == ["method", "n", "upload (MiB)"]
    both = sections_of(
        {"method": "stsa", **nothing}, {"method": "fedicarl", "client_storage_mib": 0.0123, "client_samples_kept": 60.0}
    )["communication"]
    kept = ("kept by a client (MiB)", "raw samples kept")
    assert [shown(both, method="stsa")[heading] for heading in kept] == ["0.00", "0.00"]
    assert [shown(both, method="fedicarl")[heading] for heading in kept] == ["0.0123", "60.00"]


def test_only_the_chosen_measures_are_shown_in_their_order_and_a_table_without_one_is_none():
    tables = sections_of({"retention": 90.0}, measures=["retention", "A_T"])
    assert list(tables) == ["accuracy"]
    assert tables["accuracy"].sheet.headers == ["method", "n", "retention (%)", "A_T (%)"]


def test_what_was_not_run_is_called_so_and_what_is_not_defined_otherwise():
    tables = sections_of(
        {"method": "stsa", "beta": 0.1, "forgetting": np.nan},
        {"method": "stsa", "beta": 1.0},
        {"beta": 1.0},
        by=["method"],
    )
    row = shown(tables["accuracy"], method="fedran")
    assert row["A_avg (%), beta 0.1"] == NOT_RUN
    assert row["A_avg (%), beta 1"] == "80.00 (1)"
    assert shown(tables["accuracy"], method="stsa")["forgetting (%), beta 0.1"] == "not defined"
    runs = tables["accuracy"].runs.set_index("method")
    assert runs.loc["fedran", "run_ids [beta 0.1]"] == NOT_RUN
    assert runs.loc["fedran", "run_ids [beta 1]"] == "run2"


@pytest.mark.parametrize("key", ["device", "protocol"])
@pytest.mark.parametrize("by", [(), ("method",), ("beta",)])
def test_devices_and_protocols_never_share_a_column(key, by):
    cases = [("stsa", "one", 11.0), ("stsa", "two", 22.0), ("afl", "one", 33.0)]
    tables = sections_of(*({"method": m, "protocol": "p", "A_T": a} | {key: v} for m, v, a in cases), by=by)
    for table in tables.values():
        for heading in table.sheet.headers[table.sheet.texts :]:
            assert ("one" in heading) != ("two" in heading)
    values = tables["accuracy"].values
    for column in [column for column in values if column.startswith("A_T_mean")]:
        found = set(pd.to_numeric(values[column], errors="coerce").dropna())
        assert found
        assert found <= ({11.0, 33.0} if "one" in column else {22.0})


def test_the_best_of_one_device_does_not_beat_that_of_another():
    runs = [("stsa", "cpu", 3.0), ("afl", "cpu", 2.0), ("stsa", "cuda", 0.3), ("afl", "cuda", 0.2)]
    made = ({"method": m, "device": d, "seconds_per_task": s} for m, d, s in runs)
    sheet = sections_of(*made, by=["method"])["runtime"].sheet
    marks = {row[0].text: [cell.mark for cell in row[1:]] for row in sheet.rows}
    assert marks == {"afl": ["bold", "bold"], "stsa": ["", ""]}


def test_a_row_that_meets_a_gate_says_so_and_the_page_why():
    gated = {"method": "stsa", "A_T": 99.0, "gates": "chance", "gate_texts": "chance (task 2): 50 % by <chance>"}
    sheet = sections_of(gated, {"A_T": 7.0}, {"method": "afl", "A_T": 5.0})["accuracy"].sheet
    column = sheet.headers.index("A_T (%)")
    cells = {row[0].text: (row[column].text, row[column].mark) for row in sheet.rows}
    assert cells == {
        "stsa [gate: chance]": ("99.00", ""),
        "fedran": ("7.00", "bold"),
        "afl": ("5.00", ""),
    }
    told = [
        cell.attributes["title"]
        for cell in parsed(html_page("t", {"a": sheet}, {})).all("td")
        if "title" in cell.attributes
    ]
    assert set(told) == {"seed 0: chance (task 2): 50 % by <chance>", BEST, ONE_SEED}


def test_less_is_better_where_it_is():
    sheet = sections_of({"method": "stsa", "forgetting": 5.0}, {"forgetting": 7.0})["accuracy"].sheet
    column = sheet.headers.index("forgetting (%)")
    assert {row[0].text: row[column].mark for row in sheet.rows} == {"stsa": "bold", "fedran": ""}


def test_a_knob_in_by_has_its_column_and_leaves_the_label():
    runs = [{"method_rank": rank, "method_M": M, "A_T": float(rank)} for rank in (8, 32) for M in (64, 128)]
    table = sections_of(*runs, by=["method.rank", "method"])["accuracy"]
    assert [row[0].text for row in table.sheet.rows] == ["8", "8", "32", "32"]
    assert {row[1].text for row in table.sheet.rows} == {"fedran M=64", "fedran M=128"}


@pytest.mark.parametrize(
    ("by", "told"),
    [
        (["device"], "--by device: numbers of two devices never share a column"),
        (["methd"], "--by methd: unknown key (did you mean method"),
        (["A_avg"], "--by A_avg: unknown key"),
    ],
)
def test_a_grouping_that_cannot_be_says_what_could(by, told):
    with pytest.raises(UserError) as error:
        sections_of({"protocol": "p"}, by=by)
    assert str(error.value).startswith(told)


GRIDS = st.lists(
    st.fixed_dictionaries(
        {
            "method": st.sampled_from(["stsa", "fedran", "centralised_ridge"]),
            "beta": st.sampled_from([0.1, 1.0, "null"]),
            "device": st.sampled_from(["cpu", "cuda"]),
            "clients": st.sampled_from([5, 20]),
            "method_rank": st.sampled_from([8, 16]),
            "seed": st.integers(0, 2),
            "A_avg": st.floats(0, 100),
            "forgetting": st.sampled_from([1.0, 2.0, np.nan]),
        }
    ),
    min_size=1,
    max_size=10,
)
GROUPINGS = st.sampled_from([(), ("method",), ("beta", "method"), ("method.rank", "clients"), ("clients",)])


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(GRIDS, GROUPINGS)
def test_every_run_is_in_exactly_one_cell_and_csv_reads_back_with_its_types(runs, by):
    frame = made_up(*runs)
    by = tuple(key for key in by if key in frame)
    knobs = [key for key in by if key.startswith("method.")]
    used = used_runs(frame, knobs)
    table = sections(summarise(used), (), by)["accuracy"]
    columns = [column for column in table.runs if column.startswith("run_ids")]
    ids = " ".join(cell for column in columns for cell in table.runs[column] if cell != NOT_RUN).split()
    assert sorted(ids) == sorted(used["run_id"])

    file = io.StringIO()
    table.values.to_csv(file, index=False)
    file.seek(0)
    read = pd.read_csv(file, na_values=ABSENT)
    assert len(read) == len(table.sheet.rows) == len(table.values)
    for column in read:
        if column.startswith(tuple(f"{name}_" for name in MEASURES)):
            assert pd.api.types.is_numeric_dtype(read[column])
            assert not (table.values[column].isna().any())
            assert not ((table.values[column] == "").any())
    for column in columns:
        told = column.removeprefix("run_ids")
        for position, cell in enumerate(table.runs[column]):
            own = used[used["run_id"].isin(cell.split())]
            if cell != NOT_RUN:
                assert read.loc[position, f"A_avg_mean{told}"] == pytest.approx(own["A_avg"].mean(), abs=1e-9)
                assert read.loc[position, f"A_avg_n{told}"] == len(own)
                assert own["device"].nunique() == 1
