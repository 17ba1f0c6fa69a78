"""The HTML page in a real headless Chromium: it sorts, filters, fits narrow windows, and prints."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from html import unescape

import numpy as np
import pytest
from PIL import Image

from fcl_bench.results.page.page import html_page
from fcl_bench.results.tables.cells import Cell, mean_cell
from tests.browser import FAINT, FLAGS, chromium_here
from tests.results.pages import sheet

ABSENT = Cell("not run", absent=True)
COLUMNS = {
    "method": ["fedran r=512", "fedran r=64", "stsa", "afl"],
    "A_avg": [mean_cell(72.0, 0.34, 2), mean_cell(9.5, 0.1, 2), ABSENT, mean_cell(100.0, np.nan, 2)],
    "seconds": [1.5, ABSENT, 0.25, 10.0],
    "name": ["b10", "b9", "a", "C"],
}
SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" width="720pt" height="360pt" viewBox="0 0 720 360">'
    b'<rect width="720" height="360" fill="#d55e00"/></svg>'
)


@pytest.fixture(scope="module")
def chromium():
    """Its path; the tests are skipped, visibly, where there is none."""
    found = chromium_here()
    if found is None:
        pytest.skip("no Chromium on this machine (FCL_BENCH_CHROMIUM names one)")
    return found


@pytest.fixture(scope="module")
def page():
    more = {header: cells[:2] for header, cells in COLUMNS.items()}
    return html_page("Runs", {"all_runs": sheet(COLUMNS, "A note."), "more": sheet(more)}, {"a_figure": (SVG, "")})


def browse(chromium, folder, page, *flags):
    file = folder / "page.html"
    file.write_text(page)
    command = [chromium, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def asked(chromium, folder, page, questions, *flags):
    """What JavaScript `questions` answer on the page, in order, each after what the ones before it did."""
    script = f"""<script>
const type = (input, words) => {{ input.value = words; input.dispatchEvent(new Event("input")); }};
const tables = document.querySelectorAll("table:not(.matrix)");
const rows = (n = 0) => [...tables[n].tBodies[0].rows].filter((row) => !row.hidden);
const first = (n = 0) => rows(n).map((row) => row.cells[0].textContent);
const buttons = () => [...document.querySelectorAll("th button")];
const filters = () => [...document.querySelectorAll("tr.filters input")];
const answers = [{", ".join(f"(() => {question})()" for question in questions)}];
const box = document.createElement("pre");
box.id = "answers"; box.textContent = JSON.stringify(answers);
document.body.append(box);
</script></body>"""
    # Our questions are a script that the page's policy rightly refuses.
    open_page, count = re.subn(r"<meta http-equiv=[^>]*>", "", page)
    assert count == 1
    dom = browse(chromium, folder, open_page.replace("</body>", script), *flags, "--dump-dom")
    return json.loads(unescape(re.search(r'<pre id="answers">(.*?)</pre>', dom, re.DOTALL)[1]))


@pytest.mark.slow
def test_the_script_runs_under_the_policy_of_the_page(chromium, page, tmp_path):
    dom = browse(chromium, tmp_path, page, "--dump-dom")
    assert dom.count("4 of 4 rows") == dom.count("2 of 2 rows") == 1
    assert dom.count('aria-sort="none"') == 8


@pytest.mark.slow
def test_a_click_sorts_numbers_by_size_texts_by_letters_and_what_is_absent_last(chromium, page, tmp_path):
    click = "{{ buttons()[{}].click(); return [first(), buttons()[{}].closest('th').getAttribute('aria-sort')]; }}"
    given = list(COLUMNS["method"])
    up, down, back = asked(chromium, tmp_path, page, [click.format(1, 1)] * 3)
    assert up == [["fedran r=64", "fedran r=512", "afl", "stsa"], "ascending"]
    assert down == [["afl", "fedran r=512", "fedran r=64", "stsa"], "descending"]
    assert back == [given, "none"]
    seconds, names = asked(chromium, tmp_path, page, [click.format(2, 2), click.format(3, 3)])
    assert seconds[0] == ["stsa", "fedran r=512", "afl", "fedran r=64"]
    assert names[0] == ["stsa", "fedran r=64", "fedran r=512", "afl"]


@pytest.mark.slow
def test_fields_filter_by_words_comparisons_and_everywhere(chromium, page, tmp_path):
    column = "{{ type(filters()[{}], '{}'); return first(); }}"
    everywhere = "{{ type(document.querySelector('#everywhere'), '{}'); return [first(0), first(1)]; }}"
    count = "document.querySelector('.count').textContent"
    clear = "{ document.querySelector('.tools button').click(); return first(); }"
    found = asked(
        chromium,
        tmp_path,
        page,
        [
            *(column.format(0, "FEDRAN"), column.format(0, "64 fedran"), count, clear),
            *(column.format(1, ">70"), column.format(1, "<= 9.5"), column.format(1, "not"), clear),
            *(column.format(2, "=0.25"), clear),
            *(everywhere.format("fedran b9"), everywhere.format("nothing like it"), everywhere.format("")),
        ],
    )
    every = list(COLUMNS["method"])
    assert found == [
        *(["fedran r=512", "fedran r=64"], ["fedran r=64"], "1 of 4 rows", every),
        *(["fedran r=512", "afl"], ["fedran r=64"], ["stsa"], every),
        *(["stsa"], every),
        *([["fedran r=64"], ["fedran r=64"]], [[], []], [every, every[:2]]),
    ]


@pytest.mark.slow
def test_controls_are_reached_by_keyboard_and_have_names(chromium, page, tmp_path):
    reachable = "[...document.querySelectorAll('a, button, input, [tabindex]')].every((e) => e.tabIndex === 0)"
    named = "filters().every((input) => input.getAttribute('aria-label').startsWith('Filter '))"
    focus = "{ buttons()[0].focus(); return document.activeElement === buttons()[0]; }"
    assert asked(chromium, tmp_path, page, [reachable, named, focus]) == [True, True, True]


@pytest.mark.slow_cases("1600", "360", "800")
@pytest.mark.parametrize("width", [360, 800, 1600])
def test_only_tables_and_figures_scroll_sideways(chromium, page, tmp_path, width):
    wide = sheet({f"a_rather_long_header_{i}": [i, i + 1] for i in range(30)}, "word " * 50)
    page = html_page("A title of several words that has to wrap", {"wide": wide}, {"figure": (SVG, "")})
    # A window of Chromium's may not be as narrow as a telephone, a frame may.
    (tmp_path / "inner.html").write_text(page)
    asking = """const d = document.querySelector('iframe').contentDocument;
const box = document.createElement('pre'); box.id = 'answers';
const image = d.querySelector('img');
box.textContent = JSON.stringify([d.documentElement.clientWidth, d.documentElement.scrollWidth,
  d.querySelector('.scroll').scrollWidth > d.querySelector('.scroll').clientWidth,
  image.complete && image.naturalWidth > 0,
  parseFloat(d.defaultView.getComputedStyle(d.querySelector('td')).fontSize)]);
document.body.append(box);"""
    outer = f'<!DOCTYPE html><iframe src="inner.html" width="{width}" height="800" style="border:0"></iframe>'
    outer += f"<script>addEventListener('load', () => {{ {asking} }});</script>"
    dom = browse(
        *(chromium, tmp_path, outer, "--allow-file-access-from-files", "--window-size=1700,900", "--dump-dom"),
    )
    inner, content, table_scrolls, has_image, size = json.loads(re.search(r'id="answers">(.*?)</pre>', dom)[1])
    assert (inner, content) == (width, width)
    assert table_scrolls
    assert has_image
    assert size >= 13


SETTINGS = {
    "beta": ["0.1", "0.1", "1", "1"],
    "method": ["fedran", "stsa", "fedran", "stsa"],
    "A_avg": [mean_cell(72.0, 0.34, 2), mean_cell(74.0, 0.1, 2), mean_cell(71.0, 0.1, 2), mean_cell(73.0, 0.1, 2)],
}


def test_a_choice_of_a_setting_leaves_its_rows(chromium, tmp_path):
    faceted = dataclasses.replace(sheet(SETTINGS), texts=2, facets=(0,))
    pick = (
        "{ const s = document.querySelector('#facets select'); s.value = '1'; s.dispatchEvent(new Event('change'));"
        " return [first(), rows().map((row) => row.cells[1].innerText.trim())]; }"
    )
    heads = "[...document.querySelectorAll('.scroll table thead tr:first-child th')].map((h) => h.textContent)"
    found = asked(chromium, tmp_path, html_page("Runs", {"summary": faceted}, {}), [pick, heads])
    assert found == [[["fedran", "stsa"], ["", ""]], ["method", "setting", "A_avg"]]


@pytest.mark.slow_cases("390")
@pytest.mark.parametrize("width", [390, 1400])
def test_the_methods_column_stays_in_sight(chromium, tmp_path, width):
    wide = sheet({"method": ["fedran", "stsa"]} | {f"a_rather_long_header_{i}": [i, i + 1] for i in range(30)})
    page = html_page("Runs", {"wide": wide}, {})
    scrolled = (
        "{ const box = document.querySelector('.scroll'); box.scrollLeft = 500;"
        " const cell = rows()[0].cells[0].getBoundingClientRect();"
        " return [box.scrollLeft, Math.round(cell.left - box.getBoundingClientRect().left) <= 1]; }"
    )
    assert asked(chromium, tmp_path, page, [scrolled], f"--window-size={width},900") == [[500, True]]


def charted():
    """Three methods at two betas, one of them with a knob; the last met a gate, and its bar reaches beyond 100 %."""
    labels = ["afl", "fedran r=8", "fedran r=64"] * 2
    columns = {"beta": ["0.1"] * 3 + ["1"] * 3, "method": labels}
    columns |= {"A_T (%)": [mean_cell(90.0 + i, 0.5 + 3 * (i == 5), 2) for i in range(6)]}
    columns |= {"upload (MiB)": [1.0, 2.0, 4.0, 1.0, 2.0, 4.0]}
    rows = [
        {"row": i, "name": label, "ceiling": False, "gated": i == 5, "curve": [99.0, 90.0 + i], "spread": [0.1, 0.5]}
        | {"matrix": [[99.0, None], [80.0 + i, 95.0]]}
        # The second method was tested after each of three rounds in each task.
        | {
            "rounds": [[r + 1, 40.0 + i + r, None] for r in range(6)]
            if i % 3 == 1
            else [[1, 99.0, 0.1], [2, 90.0 + i, 0.5]]
        }
        for i, label in enumerate(labels)
    ]
    faceted = dataclasses.replace(sheet(columns), texts=2, facets=(0,))
    return html_page("Runs", {"summary": faceted, "more": faceted}, {"a_figure": (SVG, "")}, charts=rows)


#: Methods with a line, methods with a point, which figures are hidden, and the setting.
DRAWN = """[
  [...document.querySelectorAll("#lines svg text.strong")].map((one) => one.textContent).sort(),
  [...document.querySelectorAll("#points .point")].map((one) => one.ariaLabel.split(",")[0]).sort(),
  [...document.querySelectorAll("figure")].map((one) => one.hidden), document.querySelector("#setting").value,
]"""


def typing(where, words):
    return f"{{ type(document.querySelector({where!r}), {words!r}); return {DRAWN}; }}"


def choosing(where, value, answer=DRAWN):
    change = f"const s = document.querySelector({where!r}); s.value = {value!r}; s.dispatchEvent(new Event('change'));"
    return f"{{ {change} return {answer}; }}"


@pytest.mark.slow
def test_the_charts_show_what_search_filters_and_choices_leave(chromium, tmp_path):
    matrix = "[...document.querySelectorAll('#matrix td')].map((one) => one.textContent)"
    asking = [DRAWN, matrix, typing("#everywhere", "fedran"), typing("#everywhere", "")]
    asking += [choosing("#facets select", "1"), matrix, choosing("#key", "r"), choosing("#facets select", "")]
    asking += [typing("tr.filters th:nth-child(3) input", "<91")]
    found = asked(chromium, tmp_path, charted(), asking)
    every = ["afl", "fedran r=64", "fedran r=8"]
    there = [False] * 6
    assert found[0] == [every, every, there, "beta 0.1"]
    # The best of the setting comes first: its matrix is shown.
    assert found[1] == ["99.0", "", "82.0", "95.0"]
    assert found[2] == [every[1:], every[1:], there, "beta 0.1"]
    assert found[3] == found[0]
    # One value of beta is left, so there is nothing to draw against it.
    assert found[4] == [every, every, [False, False, False, True, False, False], "beta 1"]
    assert found[5] == ["99.0", "", "85.0", "95.0"]
    assert found[6] == [every, every, there, "beta 1"]
    assert found[7] == [every, every, there, "beta 1"]
    # A column's filter of the first table leaves one method, which is no comparison.
    assert found[8] == [["afl"], ["afl"], [False, True, True, True, False, False], "beta 0.1"]


@pytest.mark.slow
def test_curves_over_rounds_follow_the_filters_and_are_named_at_their_ends(chromium, tmp_path):
    answer = """[document.querySelector("#rounds").closest("figure").hidden,
      document.querySelector("#rounds desc")?.textContent,
      document.querySelectorAll("#rounds svg path.line").length]"""
    typed = "{{ type(document.querySelector('#everywhere'), {!r}); return {}; }}"
    found = asked(chromium, tmp_path, charted(), [answer, *(typed.format(words, answer) for words in ("r=8", "r=64"))])
    ends = ("fedran r=8 46.00 %", "fedran r=64 92.00 %", "afl 90.00 %")
    assert found[0] == [False, f"At the end: {'; '.join(ends)}.", 3]
    assert found[1] == [False, f"At the end: {ends[0]}.", 1]
    assert found[2][0], "a method that was tested after its tasks has no curve over rounds"


@pytest.mark.slow
def test_bars_are_whole_and_what_met_a_gate_is_not_on_the_front(chromium, tmp_path):
    answer = """[
      [...document.querySelectorAll("#points line.leader")].every((one) =>
        one.getBoundingClientRect().top >= document.querySelector("#points svg").getBoundingClientRect().top + 20),
      [...document.querySelectorAll("#points .names text.strong")].map((one) => one.textContent),
      document.querySelectorAll("#points .mark.plain").length]"""
    found = asked(chromium, tmp_path, charted(), [choosing("#setting", "beta 1", answer)])
    assert found == [[True, ["afl", "fedran r=8"], 1]]


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_read_in_both_themes(chromium, tmp_path, theme):
    chosen = "matchMedia('(prefers-color-scheme: dark)').matches"
    flags = ["--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
    found = asked(chromium, tmp_path, charted(), [chosen, f"({FAINT})()"], *flags)
    assert found == [theme == "dark", []]


@pytest.mark.slow
def test_figures_for_paper_are_folded_where_charts_are(chromium, tmp_path):
    folded = "[...document.querySelectorAll('details.part')].map((one) => one.open)"
    linked = f"{{ location.hash = '#figure-1'; dispatchEvent(new Event('hashchange')); return {folded}; }}"
    assert asked(chromium, tmp_path, charted(), [folded, linked]) == [[True, True, False], [True, True, True]]


@pytest.mark.slow
def test_a_screenshot_has_the_figure_in_its_colour(chromium, tmp_path):
    page = html_page("Runs", {}, {"a_figure": (SVG, "")})
    shot = tmp_path / "page.png"
    browse(chromium, tmp_path, page, "--window-size=800,900", f"--screenshot={shot}")
    pixels = np.array(Image.open(shot).convert("RGB")).reshape(-1, 3)
    assert (np.abs(pixels.astype(int) - (0xD5, 0x5E, 0x00)).max(axis=1) < 3).mean() > 0.2


@pytest.mark.slow
def test_it_prints(chromium, page, tmp_path):
    paper = tmp_path / "page.pdf"
    browse(chromium, tmp_path, page, "--no-pdf-header-footer", f"--print-to-pdf={paper}")
    assert paper.read_bytes().startswith(b"%PDF")
    hidden = (
        "[...document.querySelectorAll('nav, .tools, #charts, tr.filters')].every((e) => e.checkVisibility() === false)"
    )
    # As on paper: the rules for print hold for every medium in this copy.
    assert asked(chromium, tmp_path, page.replace("@media print", "@media all"), [hidden]) == [True]
