"""Names that a browser would run, on both pages in a real Chromium; on a page that shows them raw they do run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fcl_bench.leaderboard.board import board_page
from fcl_bench.results.page.page import html_page
from tests.browser import browser as browser
from tests.browser import require_playwright
from tests.leaderboard.made_up import made_up_board
from tests.results.pages import sheet

require_playwright()

PAYLOADS = [
    "<script>window.owned = 1</script>",
    "</script><script>window.owned = 1</script>",
    "<img src=x onerror='window.owned = 1'>",
    "\"><svg onload='window.owned = 1'>",
    "' autofocus onfocus='window.owned = 1' x='",
    "<details open ontoggle='window.owned = 1'>",
    "</title></style><body onload='window.owned = 1'>",
    "{{ 7 * 7 }}<iframe srcdoc='<script>parent.owned = 1</script>'></iframe>",
]


def summary_page():
    columns = {"method": [f"{payload} k={place}" for place, payload in enumerate(PAYLOADS)]}
    columns |= {"s": PAYLOADS, "A_T (%)": [*range(len(PAYLOADS))], "upload (MiB)": [*range(1, len(PAYLOADS) + 1)]}
    hostile = replace(sheet(columns | dict.fromkeys(PAYLOADS, PAYLOADS), *PAYLOADS), texts=2, facets=(1,))
    charts = [
        {
            "row": place,
            "name": name,
            "ceiling": place == 1,
            "gated": place == 2,
            "curve": [9.0, 5.0],
            "spread": [1.0, 2.0],
        }
        | {"matrix": [[9.0, None], [4.0, 6.0]]}
        for place, name in enumerate(columns["method"])
    ]
    words = "".join(PAYLOADS)
    return html_page(words, {words: hostile, "more": hostile}, {words: (b"<svg/>", words)}, words, charts)


def leaderboard_page():
    texts = ("track", "version", "about", "data", "date", "command", "conclusion")
    words = "".join(PAYLOADS)
    board = made_up_board(8) | dict.fromkeys(texts, words) | {"shared": {words: words}, "revisions": PAYLOADS}
    for row, payload in zip(board["rows"], PAYLOADS * len(board["rows"]), strict=False):
        row |= dict.fromkeys(("title", "family", "why", "command", "gate_texts"), payload)
        row |= {"gates": [payload], "tuning": {payload: payload}, "run_ids": [payload], "commits": [payload]}
    return board_page(board)


def after_use(browser, file, text):
    """What `window.owned` is once every button, box and choice of a page was used."""
    file.write_text(text)
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(file.as_uri())
    page.evaluate("""() => {
      for (const part of document.querySelectorAll("details")) part.open = true;
      const used = (event) => (one) => one.dispatchEvent(new Event(event, { bubbles: true }));
      for (const select of document.querySelectorAll("select")) {
        select.selectedIndex = select.options.length - 1;
        used("change")(select);
        select.selectedIndex = 0;
        used("change")(select);
      }
      document.querySelectorAll("button").forEach((one) => one.click());
      for (const kind of ["pointerenter", "focus", "click"]) document.querySelectorAll(".point").forEach(used(kind));
      document.querySelectorAll("#rows .title").forEach((one) => one.click());
    }""")
    page.wait_for_timeout(100)
    found = page.evaluate("window.owned ?? null"), page.locator("main img[src=x], iframe, body script").count()
    page.close()
    return found


@pytest.mark.parametrize("made", [summary_page, leaderboard_page], ids=lambda made: made.__name__)
def test_names_are_shown_and_never_run(browser, tmp_path, made):
    page = made()
    # The page's own script, and its data.
    assert after_use(browser, tmp_path / "page.html", page) == (None, 2)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_where_a_page_shows_them_raw_they_run_unless_it_has_the_policy(browser, tmp_path, payload):
    raw = f"<title>{payload}</title><body>{payload}<input value='{payload}'>"
    assert after_use(browser, tmp_path / "raw.html", raw)[0] == 1
    policy = f"<meta {html_page('t', {}, {}).partition('<meta http-equiv')[2].partition('>')[0]}>"
    policy = policy.replace("<meta ", "<meta http-equiv")
    assert "script-src" in policy
    assert after_use(browser, tmp_path / "kept.html", policy + raw)[0] is None
