"""The HTML page, read by a parser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fcl_bench.results.figures.selection import drawn
from fcl_bench.results.page.page import html_page
from fcl_bench.results.tables.cells import NOT_RUN, Cell, Sheet, mean_cell
from tests.results.pages import parsed, sheet, table

ABSENT = Cell(NOT_RUN, absent=True)
COLUMNS = {
    "method": ["fedran r=512", "stsa", "afl"],
    "n": [3, 1, 2],
    "A_avg": [mean_cell(71.998, 0.34, 2, "bold", 3), ABSENT, mean_cell(9.5, 0.1, 2)],
    "seconds": [1.25, ABSENT, 0.001],
    "data": ["digits"] * 3,
    "mixed": ["4 clients", 12, "x"],
}
FRAME = sheet(COLUMNS)


def a_figure():
    figure = Figure()
    figure.subplots().plot([1, 2], [3, 4], label="a")
    return drawn(figure, "svg")


def page_of(frame=FRAME):
    return html_page("Title", {"all_runs": frame}, {"accuracy_matrix": (a_figure(), ""), "other": (a_figure(), "")})


def same_in(page):
    return [part for part in parsed(page).all("details") if part.attributes["class"] == "same"]


def test_ids_are_unique_and_every_link_and_label_leads_to_one():
    root = parsed(page_of())
    elements = [element for tag in ("section", "h2", "input", "div") for element in root.all(tag)]
    ids = [element.attributes["id"] for element in elements if "id" in element.attributes]
    assert len(set(ids)) == len(ids) > 5
    links = [link.attributes["href"] for link in root.all("a")]
    assert links == ["#table-1", "#figure-1", "#figure-2"]
    labelled = [e.attributes["aria-labelledby"] for e in elements if "aria-labelledby" in e.attributes]
    assert {link[1:] for link in links} | set(labelled) | {"everywhere"} <= set(ids)


def test_nothing_is_fetched_from_anywhere():
    page = page_of()
    root = parsed(page)
    # The name of SVG's elements is no address.
    text = re.sub(r"^\s*//.*", "", page, flags=re.MULTILINE).replace('"http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    sources = [e.attributes.get("src") or "" for tag in ("img", "script", "iframe", "link") for e in root.all(tag)]
    assert [source[:26] for source in sources] == ["data:image/svg+xml;base64,", "data:image/svg+xml;base64,", ""]
    assert not root.all("link")


def test_the_policy_lets_this_script_run_and_no_other():
    root = parsed(page_of())
    [policy] = [e.attributes["content"] for e in root.all("meta") if "http-equiv" in e.attributes]
    [script] = root.all("script")
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_the_script_parses(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is absent")
    file = tmp_path / "page.js"
    file.write_text(parsed(page_of()).all("script")[0].text)
    assert subprocess.run([node, "--check", file], capture_output=True, text=True).stderr == ""


def test_figures_are_whole():
    [first, _] = parsed(page_of()).all("img")
    assert first.attributes["alt"] == "Accuracy matrix"
    assert base64.b64decode(first.attributes["src"].partition(",")[2]) == a_figure()


def test_cells_show_their_texts_and_carry_the_numbers_to_sort_by():
    headers, rows = table(parsed(page_of()))
    assert headers == ["method", "n", "A_avg", "seconds", "mixed"]
    assert [[cell.text for cell in row] for row in rows] == [
        ["fedran r=512", "3", "72.00 ± 0.34 (3)", "1.25", "4 clients"],
        ["stsa", "1", "not run", "not run", "12"],
        ["afl", "2", "9.50 ± 0.10", "0.001", "x"],
    ]
    # A column with a word in it is one of words.
    numbers = [[cell.attributes.get("data-number") for cell in row] for row in rows]
    assert numbers == [
        [None, "3.0", "72.0", "1.25", None],
        [None, "1.0", None, None, None],
        [None, "2.0", "9.5", "0.001", None],
    ]
    assert [cell.attributes.get("class") for cell in rows[1]] == [None, "number", *["number absent"] * 2, None]
    assert [len(row[2].all("strong")) for row in rows] == [1, 0, 0]


def test_a_column_of_nothing_but_absent_values_is_none_of_numbers():
    rows = table(parsed(page_of(sheet({"a": [1, 2], "b": [ABSENT, Cell("-", absent=True)]}))))[1]
    assert [row[1].attributes for row in rows] == [{"class": "absent"}] * 2


@pytest.mark.slow
def test_what_is_the_same_in_every_row_stands_below_the_table():
    [same] = same_in(page_of())
    assert same.text == "The same in every rowdata digits"
    assert "open" in same.attributes
    many = sheet({f"a_long_name_{i}": ["digits"] * 2 for i in range(40)} | {"x": [1, 2]})
    assert "open" not in same_in(page_of(many))[0].attributes
    # A single row has nothing to differ from.
    single = sheet({header: cells[:1] for header, cells in COLUMNS.items()})
    assert not same_in(page_of(single))
    assert "data" in table(parsed(page_of(single)))[0]


def test_marks_are_no_part_of_what_is_the_same():
    best, other = Cell("70.00", "bold", 70.0), Cell("70.00", "", 70.0)
    [same] = same_in(page_of(sheet({"a": [best, best], "b": [best, other], "c": [1, 2]})))
    assert same.text == "The same in every rowa 70.00"


def test_notes_stand_below_their_table_a_paragraph_each():
    root = parsed(page_of(sheet(COLUMNS, "Of the table.\nMore.", "The last.")))
    assert [note.text for note in root.all("section")[0].all("p")] == ["Of the table.", "More.", "The last."]
    assert not root.all("header")[0].all("p")


def test_a_page_of_nothing_is_a_page():
    root = parsed(html_page("Title", {"none": sheet({"a": [], "b": []})}, {}))
    assert table(root) == (["a", "b"], [])
    assert parsed(html_page("Title", {}, {})).all("h1")[0].text == "Title"


def test_two_columns_of_one_name_are_shown():
    twice = Sheet("t", ["x", "x"], [[Cell("1"), Cell("a")], [Cell("2"), Cell("b")]], 1)
    assert table(parsed(page_of(twice)))[0] == ["x", "x"]


anything = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
nasty = anything | st.sampled_from(["</script><script>alert(1)</script>", "<!--", "]]>", '"><img src=x>', "&lt;", "'"])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(title=nasty, name=nasty, header=nasty, values=st.lists(nasty, min_size=2, max_size=3, unique=True), note=nasty)
def test_whatever_a_user_names_is_shown_as_it_is(title, name, header, values, note):
    values = [f".{value}." for value in values]
    root = parsed(html_page(title, {name: sheet({header: values}, note)}, {}))
    assert root.all("h1")[0].text == root.all("title")[0].text == title
    headers, rows = table(root)
    assert (headers, [row[0].text for row in rows]) == ([header], values)
    assert len(root.all("script")) == 1
    assert not root.all("img")
    assert "".join(p.text for p in root.all("section")[0].all("p")) == "".join(
        line for line in note.splitlines() if line.strip()
    )


@pytest.mark.slow
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, unique=True, max_size=8))
def test_numbers_keep_their_order(values):
    rows = table(parsed(html_page("", {"t": sheet({"x": values, "k": list(range(len(values)))})}, {})))[1]
    shown = [float(row[0].attributes["data-number"]) for row in rows if len(row) == 2]
    assert sorted(shown) == [shown[i] for i in np.argsort(values, kind="stable")[: len(shown)]]


def test_the_setting_is_one_column_after_the_method_and_its_values_are_choices():
    columns = {"beta": [0.1, 1, 1], "clients": [5, 5, 20], "method": ["a", "a", "b"], "A_T": [1, 2, 3]}
    root = parsed(html_page("Title", {"t": replace(sheet(columns), facets=(0, 1))}, {}))
    headers, rows = table(root)
    assert headers == ["method", "setting", "A_T"]
    assert [[part.text for part in row[1].all("span")] for row in rows] == [
        ["beta 0.1", "clients 5"],
        ["beta 1", "clients 5"],
        ["beta 1", "clients 20"],
    ]
    settings = [row.attributes["data-setting"] for row in root.all("tbody")[0].all("tr")]
    assert json.loads(settings[2]) == {"beta": "1", "clients": "20"}


def test_only_the_pages_own_script_may_run():
    root = parsed(html_page("Title", {}, {}))
    [script] = root.all("script")
    [policy] = [e.attributes["content"] for e in root.all("meta") if "http-equiv" in e.attributes]
    assert base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode() in policy
    assert "unsafe-eval" not in policy


def test_the_command_stands_below_the_title():
    command = "fcl-tables --html --where 'data=<x>'"
    assert parsed(html_page("Title", {}, {}, command=command)).all("header")[0].all("code")[0].text == command
    assert not parsed(html_page("Title", {}, {})).all("header")[0].all("p")


def test_the_charts_data_cannot_end_its_element():
    charts = [{"row": 0, "name": "</script><script>alert(1)</script>", "curve": [1.5, None]}]
    root = parsed(html_page("Title", {"t": FRAME}, {}, charts=charts))
    data, script = root.all("script")
    assert json.loads(data.text) == charts
    assert root.all("section")[1].attributes["id"] == "charts"
    assert len(parsed(page_of()).all("script")) == 1
    assert "alert" not in script.text


def test_a_note_that_several_tables_have_stands_below_the_first():
    pages = {"a": sheet({"x": [1, 2]}, "Shared.\nOf a."), "b": sheet({"x": [1, 2]}, "Shared.", "Of b.")}
    notes = [[note.text for note in part.all("p")] for part in parsed(html_page("t", pages, {})).all("section")]
    assert notes == [["Shared.", "Of a."], ["Of b."]]


def test_captions_stand_below_their_figures():
    root = parsed(html_page("Title", {}, {"a": (a_figure(), ""), "b": (a_figure(), "What <b> shows.")}))
    assert [caption.text for caption in root.all("figcaption")] == ["What <b> shows."]
