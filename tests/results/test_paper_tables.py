"""Printed numbers beside ours: exactly the printed setting or nothing, and every digit of the communication tables."""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fcl_bench.errors import UserError
from fcl_bench.files import write_json
from fcl_bench.papers.matching import LOST_METHOD, NO_METHOD, Matcher, left_to_us, overrides, settings_of
from fcl_bench.papers.printed import printed as papers_printed
from fcl_bench.papers.tables import NO_METRIC, paper_tables, printed_cells
from fcl_bench.results.collect import collect
from fcl_bench.results.summarise import used_runs
from fcl_bench.results.tables.cells import ABSENT, NOT_RUN, NOTHING
from fcl_bench.results.tables.markup import latex_table, markdown_page, table_files
from tests.conftest import shared
from tests.results.frames import real_runs
from tests.small_methods import NAMES
from tests.small_runs import run_in

NO_RUNS = pd.DataFrame()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs of FedRAN on the digits: beta 0.1 and 1, seeds 0 and 1."""
    return real_runs(tmp_path_factory.mktemp("out"), "beta=0.1,1") / "runs"


@pytest.fixture(scope="module")
def runs(finished):
    return used_runs(collect(finished))


def cell(**given):
    """A printed number whose setting is that of `finished` at beta 0.1, but for what is given."""
    plain = {"paper": "made up", "table": "Table 1", "row": "FedRAN", "column": "Digits / A_avg", "method": "fedran"}
    plain |= {"metric": "A_avg", "value": "90.00", "spread": "", "unit": "%", "data": "digits", "backbone": "pixels"}
    plain |= {"tasks": "2", "clients": "2", "beta": "0.1", "setting": "method.M=32 method.rank=8"}
    whole = plain | given
    number = pd.to_numeric(whole["value"], errors="coerce")
    return {**whole, "number": number, "spread_number": np.nan}


def one_of_each(tables):
    """The last table of each paper whose numbers were not all run."""
    return list({t.values["paper"].iloc[0]: t for t in tables if (t.values["state"] == NOT_RUN).any()}.values())


#: A table of each paper; all of them: -m slow.
each_or_every = pytest.mark.parametrize(
    "chosen", [pytest.param(one_of_each, id="one"), pytest.param(list, id="all", marks=pytest.mark.slow)]
)


def table_of(runs, folder, *cells):
    [table] = paper_tables(pd.DataFrame(list(cells)), runs, folder)
    return table


def by_heading(table, row=0):
    return {h: cell.text for h, cell in zip(table.sheet.headers, table.sheet.rows[row], strict=True)}


OURS, DIFFERENCE = "ours, cpu, task-agnostic", "difference, cpu, task-agnostic"


@pytest.mark.slow
def test_ours_is_the_mean_of_the_runs_of_exactly_that_setting(finished, runs):
    table = table_of(runs, finished, cell(value="90.1", spread="0.3"))
    own = runs[runs["beta"] == 0.1]
    mean, std = own["A_avg"].mean(), own["A_avg"].std()
    assert by_heading(table) == {
        "row": "FedRAN",
        "column": "Digits / A_avg",
        "unit": "%",
        "printed": "90.1 ± 0.3",
        f"{OURS} (n)": f"{mean:.2f} ± {std:.2f} (2)",
        DIFFERENCE: f"{mean - 90.1:+.1f}",
    }
    [row] = table.values.to_dict("records")
    assert (row[f"{OURS} mean"], row[f"{OURS} n"], row["state"]) == (mean, 2, "run")
    assert row[f"{OURS} difference"] == pytest.approx(mean - 90.1)
    used = table.runs[table.runs["used"]]
    assert sorted(used["run_id"]) == sorted(own["run_id"])
    assert set(used["differs"]) == {"nothing"}


@pytest.mark.parametrize(
    ("given", "differs"),
    [
        ({"setting": "method.M=32 method.rank=4"}, ["method.rank=4, here 8"]),
        ({"setting": "method.M=32 method.rank=8 wire.dtype=float16"}, ["wire.dtype=float16, here float32"]),
        ({"setting": "method.rank=8"}, ["method.M=2048, here 32"]),
        ({"setting": "method.M=32 method.rank=8 label_rate=0.5"}, ["label_rate=0.5, here 1"]),
        ({"setting": "method.M=32 method.rank=8 partition.min_size=0"}, ["partition.min_size=0, here 1"]),
        (
            {"setting": "method.M=32 method.rank=8 partition=iid"},
            ["beta=null, here 0.1", "partition.min_size=nothing, here 1"],
        ),
        ({"tasks": "3"}, []),
        ({"beta": "0.5"}, []),
        ({"method": "stsa", "setting": "method.M=32"}, []),
        ({"data": "cifar100"}, []),
    ],
)
def test_a_run_that_differs_in_anything_is_not_ours_and_is_listed_with_what_differs(finished, runs, given, differs):
    table = table_of(runs, finished, cell(**given))
    assert by_heading(table)["our runs"] == NOT_RUN
    assert not table.runs["used"].any()
    assert bool(len(table.runs)) == bool(differs)
    for told in table.runs["differs"]:
        for part in differs:
            assert part in told


def test_data_cut_down_is_another_setting(finished, runs, tmp_path):
    """A run on some classes has the data set's name, too."""
    wanted = pd.Series(cell(data="cifar100", backbone="tiny"))
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    for classes, differing in (("null", []), ("25", ["data.classes=null, here 25"])):
        config = settings_of((*overrides(wanted), f"data.classes={classes}")).resolved
        (folder / "config.yaml").write_text(json.dumps(config))
        write_json(folder / "run.json", {"class_samples": [500] * 100, "unseen_test_samples": 0})
        (folder / "tasks.csv").write_text("test_samples\n10000\n")
        run = runs.iloc[[0]].assign(data="cifar100", folder="x")
        assert Matcher(run, tmp_path / "runs").differences(wanted) == {run.index[0]: differing}


def test_old_code_is_not_ours(finished, runs):
    old = runs.assign(**{"method.revision": "1"})
    table = table_of(old, finished, cell())
    assert not table.runs["used"].any()
    assert "revision 2 of the method, here 1" in set(table.runs["differs"])


def test_devices_have_columns_of_their_own(finished, runs):
    mixed = runs.assign(device=["cuda" if seed else "cpu" for seed in runs["seed"]])
    table = table_of(mixed, finished, cell())
    row = by_heading(table)
    for device, seed in (("cpu", 0), ("cuda", 1)):
        [value] = runs.loc[(runs["seed"] == seed) & (runs["beta"] == 0.1), "A_avg"]
        assert row[f"ours, {device}, task-agnostic (n)"] == f"{value:.2f} (1)"


def test_what_the_paper_leaves_open_is_told_and_not_averaged(finished, runs):
    table = table_of(runs, finished, cell(beta=""))
    assert [by_heading(table, row)["where"] for row in (0, 1)] == ["beta 0.1", "beta 1"]
    for row, beta in enumerate((0.1, 1.0)):
        assert table.values.loc[row, f"{OURS} mean"] == runs.loc[runs["beta"] == beta, "A_avg"].mean()


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ({"method": ""}, NO_METHOD),
        ({"setting": 'method.M=32 method.rank=8 "after task 5 of 10"'}, "no key for: after task 5 of 10"),
        (
            {"method": "", "setting": '"no such method here: it needs test labels" "a=b"'},
            f"{NO_METHOD}: it needs test labels",
        ),
        ({"backbone": ""}, "the paper does not say: backbone"),
        ({"metric": "wallclock time"}, NO_METRIC),
        ({"beta": "0.3"}, NOT_RUN),
    ],
)
def test_why_there_is_no_run_is_said(finished, runs, given, state):
    table = table_of(runs, finished, cell(), cell(**given))
    row = by_heading(table, 1)
    assert row[f"{OURS} (n)"] == state
    assert row[DIFFERENCE] == "-"
    # What says why there is no number keeps the others of its column from being compared as words.
    place = table.sheet.headers.index(f"{OURS} (n)")
    assert [cells[place].absent for cells in table.sheet.rows] == [False, True]
    assert table.sheet.rows[0][place].number == float(table.sheet.rows[0][place].text.split()[0])
    assert table.values.loc[1, f"{OURS} mean"] == NOT_RUN
    assert table.values.loc[1, "state"] == state


def test_sizes_and_accuracies_of_one_table_do_not_share_columns(finished, runs):
    table = table_of(runs, finished, cell(), cell(metric="fedran_mib", value="0.01", unit="MB"))
    accuracy, size = by_heading(table, 0), by_heading(table, 1)
    assert accuracy["measured, a task, cpu, task-agnostic (n)"] == "-"
    assert size[f"{OURS} (n)"] == "-"
    sent = [
        json.loads((finished / folder / "run.json").read_text())["communication"]["up_max_bytes"] / 2**20
        for folder in runs.loc[runs["beta"] == 0.1, "folder"]
    ]
    assert table.values.loc[1, "measured, a task, cpu, task-agnostic mean"] == pytest.approx(np.mean(sent))


def test_a_printed_number_is_never_marked_since_it_is_a_rounded_mean_of_unknown_runs(finished, runs):
    cells = [cell(row=row, value=value, spread="0.01") for row, value in (("A", "91.0"), ("B", "93.0"), ("C", "92.0"))]
    table = table_of(runs, finished, *cells)
    printed = table.sheet.headers.index("printed")
    assert {row[printed].mark for row in table.sheet.rows} == {""}


@pytest.mark.parametrize("metric", ["A_T_tasks", "task_aware.A_T_tasks", "seconds_per_task"])
def test_metrics_are_read_from_the_part_of_the_record_that_they_name(finished, runs, metric):
    table = table_of(runs, finished, cell(metric=metric))
    own = runs[runs["beta"] == 0.1]
    records = [json.loads((finished / name / "run.json").read_text()) for name in own["folder"]]
    part, _, name = metric.rpartition(".")
    values = [(record[part] if part else {**record["metrics"], **record["runtime"]})[name] for record in records]
    assert table.values.loc[0, f"{OURS} mean"] == np.mean(values)


def test_fewer_than_60_printed_numbers_are_of_methods_that_are_not_here_and_say_why(everything):
    """Beside 105 of which the copy has lost whose they are; each such row is of no known method."""
    states = pd.concat([table.values[["paper", "table", "row", "method", "state"]] for table in everything])
    missing = states[states["state"].str.startswith(NO_METHOD)]
    attacks = missing["state"].str.startswith(f"{NO_METHOD}: an attack")
    assert (attacks.sum(), set(missing.loc[attacks, "table"])) == (15, {"Table 6"}), "scores of images, STSA's"
    missing = missing[~attacks]
    assert 0 < len(missing) < 60
    assert missing["state"].str.startswith(f"{NO_METHOD}: ").all()
    assert missing["row"].value_counts().to_dict() == {"FedMGP": 42, "Tar+LODE": 6, "Fed+PEC": 4, "Fed+SCR": 2}
    assert (missing["method"] == NOTHING).all()
    ours = {name.replace("_", "") for name in NAMES}
    assert not [row for row in missing["row"].unique() if re.sub(r"\W", "", row.lower()) in ours]
    lost = states[states["state"] == LOST_METHOD]
    assert (len(lost), set(lost["table"]), set(lost["method"])) == (105, {"Table F.4"}, {NOTHING})
    assert lost["row"].str.fullmatch(r"number \d of 7").all()


def test_what_we_chose_stands_beside_the_number(finished, runs):
    """Words that end with ": ours" keep no run away, others do."""
    chosen = cell(setting='method.M=32 method.rank=8 "rank is not said: ours"')
    told = by_heading(table_of(runs, finished, chosen))
    assert told["where"] == "rank is not said"
    assert told[f"{OURS} (n)"].endswith("(2)")
    both = 'method.M=32 "rank is not said: ours" "linear: without ReLU"'
    told = by_heading(table_of(runs, finished, cell(setting=both)))
    assert told["our runs"] == "no key for: linear: without ReLU"
    with_beta = by_heading(table_of(runs, finished, {**chosen, "beta": ""}))
    assert re.fullmatch(r"beta [\d.]+; rank is not said", with_beta["where"])


@each_or_every
def test_what_we_chose_stands_beside_every_printed_number_that_it_is_of(everything, chosen):
    """The column "where" has the words of all its cells, in each paper."""
    marked = set()
    for table in chosen(everything):
        paper, title = table.values["paper"].iloc[0], table.values["table"].iloc[0]
        where = table.sheet.headers.index("where") if "where" in table.sheet.headers else None
        shown = [set() if where is None else set(row[where].text.split("; ")) for row in table.sheet.rows]
        for words, setting in zip(shown, printed_cells(paper, title)["setting"], strict=True):
            assert set(left_to_us(setting)) <= words, (table.name, setting)
            marked |= {paper} if left_to_us(setting) else set()
    assert marked <= {"afcl", "afl", "fedprotip", "fedran", "stsa"}
    assert marked if chosen is one_of_each else len(marked) == 5


def test_the_best_round_is_compared_where_it_was_measured(tmp_path):
    trained = ("method=fedavg", "method.trains=features", "method.training.rounds=3", "method.training.epochs=1")
    run_in(tmp_path, *trained, "tasks=1", "clients=2", "evaluate_rounds=1")
    runs = used_runs(collect(tmp_path / "runs"))
    setting = " ".join([*trained[1:], "evaluate_rounds=1"])
    said = {"method": "fedavg", "tasks": "1", "backbone": "pixels", "setting": setting}
    best, last = (table_of(runs, tmp_path / "runs", cell(metric=name, **said)) for name in ("A_T_best", "A_T"))
    assert best.values[f"{OURS} mean"].tolist() == runs["A_T_best"].tolist()
    assert last.values[f"{OURS} mean"].tolist() == runs["A_T"].tolist()
    assert "evaluate_rounds=1" in best.values["command"][0]
    assert by_heading(best)["where"] == "best over rounds, chosen on test data"
    assert "where" not in by_heading(last)


def test_fedprotips_model_activations_and_sketches_are_counted_beside_what_is_printed(everything):
    """Tables 9 and 19, without a run and with every printed digit (docs/errata/fedprotip.md)."""
    counted = {"fedprotip, Table 9": {"Model": 10, "Act": 10}, "fedprotip, Table 19": {"s_l = d_l": 1, "s_l = 128": 1}}
    for title, rows in counted.items():
        [table] = [table for table in everything if table.sheet.title == title]
        difference, places = table.sheet.headers.index("difference"), {"Model": "+0.000", "Act": "+0"}
        for name, count in rows.items():
            cells = [row[difference] for row in table.sheet.rows if row[0].text == name and row[difference].number == 0]
            assert len(cells) == count
            assert {cell.text for cell in cells} == {places.get(name, "+0.0")}


def test_papers_and_tables_are_chosen_by_name():
    assert set(printed_cells("stsa", "Table 5")["table"]) == {"Table 5"}
    with pytest.raises(UserError, match=r"--paper stas is not known \(did you mean stsa"):
        printed_cells("stas")
    with pytest.raises(UserError, match="--table Table 99 is not in --paper stsa"):
        printed_cells("stsa", "Table 99")


@pytest.fixture(scope="module")
def everything():
    """Every table of every paper, without a run."""
    return list(paper_tables(printed_cells("all"), NO_RUNS, Path("nowhere")))


def test_every_printed_number_has_its_row_in_every_form(everything):
    printed = papers_printed()
    names = [table.name for table in everything]
    assert len(set(names)) == len(names)
    for table in everything:
        paper, title = table.values["paper"].iloc[0], table.values["table"].iloc[0]
        own = printed[(printed["paper"] == paper) & (printed["table"] == title)]
        values = table.values["printed"].tolist()
        assert [value for value in values if value in set(own["value"])][-len(own) :] == own["value"].tolist()
        assert len(table.sheet.rows) == len(table.values)
        assert len(set(table.sheet.headers)) == len(table.sheet.headers)
        for cell in itertools.chain.from_iterable(table.sheet.rows):
            assert cell.text.strip()
            assert cell.text.lower() != "nan"
        assert markdown_page(table.sheet).count("\n| ") == len(table.values) + 2
        # A table over several pages has its caption in a row.
        latex = latex_table(table.sheet)
        assert latex.count(r" \\") == len(table.values) + (2 if r"\begin{longtable}" in latex else 1)


@each_or_every
def test_csvs_read_back_with_numbers_as_numbers(everything, finished, runs, chosen):
    """As the files are written; of columns that hold numbers and what stands for the absent."""
    beside_runs = table_of(runs, finished, cell(), cell(beta="0.3"), cell(value="?"), cell(metric="fedran_mib"))
    gaps = set()
    for table in [*chosen(everything), beside_runs]:
        written = table_files(table, ["csv"])["csv"]
        assert ",," not in written
        read = pd.read_csv(io.StringIO(written), na_values=ABSENT)
        for column in table.values:
            absent = table.values[column].isin(ABSENT)
            values = pd.to_numeric(table.values.loc[~absent, column], errors="coerce")
            if values.notna().all():
                assert pd.api.types.is_numeric_dtype(read[column]), (table.name, column)
                np.testing.assert_array_equal(read.loc[~absent, column], values)
                gaps |= {column} if absent.any() and len(values) else set()
    told = {"nominal", "as_sent_mib"} if chosen is list else set()
    assert {"printed_number", f"{OURS} mean", f"{OURS} difference", *told} <= gaps


@each_or_every
def test_the_command_of_a_number_that_was_not_run_is_one_that_runs_it(everything, chosen):
    """Of each table one: it composes to the very setting that is matched."""
    for table in chosen(everything):
        missing = table.values[table.values["state"] == NOT_RUN]
        for command in missing["command"].head(1):
            program, flag, *words, seeds = shlex.split(command)
            assert (program, flag, seeds) == ("fcl-bench", "-m", "seed=0,1,2")
            assert settings_of(tuple(words)).method.name in command


#: As the specification lists them: of FedRAN's Table 4, Figure 6 and ViT text, and of STSA's Table 5.
DIGITS = {
    "fedran": "134.27 140.52 35.13 9.57 11.13 17.6 33.6 70.3 194.59 1.45 389.18 2.77 97.29 10.50 21.00"
    " 31.90 30.65 121.75",
    "stsa": "955.6 60.1 95.4 4.77 79047.9",
}


@pytest.mark.parametrize("paper", DIGITS)
def test_the_communication_tables_come_out_with_every_printed_digit_and_no_run(everything, paper):
    rows = []
    for table in everything:
        if table.name.startswith(f"{paper}-") and "counted here" in table.sheet.headers:
            rows += [by_heading(table, row) for row in range(len(table.sheet.rows))]
    counted = {row["counted here"] for row in rows if row["counted here"] != "not counted here"}
    assert counted == set(DIGITS[paper].split())
    for row in rows:
        if row["counted here"] != "not counted here":
            assert row["counted here"] == row["printed"]
            assert set(row["difference"]) <= set("+0.")


def test_the_digits_are_those_of_the_specification():
    text = shared("design/methods.md").read_text()
    counts = text[text.index("## What the papers count") :]
    counts += shared("design/baselines/generative.md").read_text().replace("79,047.9", "79047.9")
    for number in " ".join(DIGITS.values()).split():
        assert re.search(rf"(?<![\d.]){re.escape(number.rstrip('0').rstrip('.'))}0*(?!\d)", counts), number


def test_one_accounting_for_all_stands_beside_the_papers(everything):
    [table] = [table for table in everything if table.name == "fedran-table-4"]
    sent = {row["row"]: row["a task as sent (MiB)"] for row in (by_heading(table, r) for r in (0, 1))}
    assert sent == {"FedRAN": "64.63", "STSA": "19.08"}  # methods.md: 64.6 against 19.1


def test_errata_are_named_below_the_tables_they_are_about(everything):
    notes = {table.name: " ".join(table.sheet.notes) for table in everything}
    assert "interchanged against Tables 1, 8 and 16" in notes["fedprotip-table-11"]
    assert all(text in notes["fedran-table-4"] for text in ("docs/errata/fedran.md", "not in the copy"))
