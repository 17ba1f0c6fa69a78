"""The page of a board in a real headless Chromium: what a click shows, sorts and filters."""

from __future__ import annotations

import re

import pytest

from fcl_bench.leaderboard.board import board_page
from tests.browser import FAINT, require_playwright
from tests.leaderboard.made_up import TASKS, made_up_board
from tests.leaderboard.on_screen import BOARD, column, expected, numbers, shown, titles

require_playwright()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_read_in_both_themes(opened, theme):
    page = opened(1400, theme)
    page.locator("#rows .title").nth(3).click()
    assert page.evaluate(FAINT) == []


def test_a_click_or_enter_opens_a_row_with_all_that_is_known_of_it(opened):
    page = opened()
    row = next(row for row in expected() if row["gates"] and row["tuning"])
    title = page.locator(f"#rows .title[data-method='{row['method']}']")
    title.click()
    assert title.get_attribute("aria-expanded") == "true"
    panel = page.locator(f"#{title.get_attribute('aria-controls')} .panel")
    text = panel.inner_text()
    assert panel.locator(".command code").inner_text() == row["command"]
    for words in (
        row["gate_texts"],
        "8 trials",
        *(f"{key}={value}" for key, value in row["tuning"].items()),
        *row["run_ids"],
    ):
        assert words in text
    side = panel.locator("table tbody tr")
    assert side.count() == 8
    assert side.locator("td:first-child").all_inner_texts()[::2] == [
        ", ".join(f"{key} {value}" for key, value in setting.items()) for setting in BOARD["settings"]
    ]
    assert f"{row['A_T']:.2f} ± {row['A_T_std']:.2f}" in side.nth(1).inner_text()
    assert panel.locator(".chart path.line").count() == 3
    # The keyboard closes it and goes on to the next row.
    page.keyboard.press("Enter")
    assert page.locator(".panel").count() == 0
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    after = shown(page)[shown(page).index(row["title"]) + 1]
    assert page.locator("#rows [aria-expanded=true]").inner_text() == after
    # So does a click anywhere in the row.
    page.locator("#rows tr.row").nth(9).locator("td").nth(5).click()
    assert page.locator(".panel").count() == 2


def test_the_copy_button_copies_the_command(opened):
    page = opened()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#rows .title").nth(5).click()
    page.locator(".panel .command button").click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == expected()[5]["command"]
    page.locator("header .command button").click()
    page.locator("header").get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == BOARD["command"]


def test_ranks_leave_out_ceilings_and_the_first_setting_is_shown(opened):
    page = opened()
    rows = expected()
    assert shown(page) == titles(rows)
    assert numbers(column(page, "A_T")) == [pytest.approx(row["A_T"], abs=0.006) for row in rows]
    places = iter(range(1, 100))
    assert numbers(column(page, "rank")) == [None if row["ceiling"] else next(places) for row in rows]
    assert page.locator("#rows tr.best .title").all_inner_texts() == titles(
        row for row in rows if row["mark"] == "bold"
    )


@pytest.mark.parametrize("key", ["A_T", "behind", "A_avg", "up", "kept", "rounds", "seconds"])
def test_headers_sort_by_click_and_by_keyboard_and_what_is_absent_is_last(opened, key):
    page = opened()
    header = page.locator(f"#rows th[data-key={key}]")
    header.locator("button").click()
    first = header.get_attribute("aria-sort")
    found = [numbers(column(page, key))]
    header.locator("button").press("Enter")
    assert {first, header.get_attribute("aria-sort")} == {"ascending", "descending"}
    found.append(numbers(column(page, key)))
    for values, way in zip(found, [first, header.get_attribute("aria-sort")], strict=True):
        known = [value for value in values if value is not None]
        assert known == sorted(known, reverse=way == "descending")
        assert len(set(known)) > 1
        assert values[len(known) :] == [None] * (len(values) - len(known))
    assert page.locator("#rows th[aria-sort=none]").count() == 10


def test_words_sort_by_letters(opened):
    page = opened()
    for key in ("method", "family"):
        page.locator(f"#rows th[data-key={key}] button").click()
        texts = [text.split(" ceiling")[0].lower() for text in column(page, key)]
        # Numbers in names by their size: 6 before 36.
        assert texts == sorted(texts, key=lambda text: re.sub(r"\d+", lambda digits: digits[0].zfill(9), text))


FILTERS = {
    "words": ("fill", "sketch closed", lambda row: "sketch" in row["title"].lower() and row["family"] == "closed_form"),
    "family": ("select_option", "data_free", lambda row: row["family"] == "data_free"),
    "up": ("fill", "12", lambda row: row["up_mib"] is not None and row["up_mib"] <= 12),
    "kept": ("fill", "0.5", lambda row: row["kept_mib"] <= 0.5),
    "rounds": ("fill", "50", lambda row: row["rounds"] <= 50),
    "keepsnone": ("check", None, lambda row: row["samples_kept"] == 0),
    "revealsnone": ("check", None, lambda row: row["revealed"] == 0),
    "nogates": ("check", None, lambda row: not row["gates"]),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_change_the_table_and_both_charts(opened, name):
    page = opened()
    act, value, fits = FILTERS[name]
    field = page.locator(f"#filters [name={name}]")
    getattr(field, act)(*([] if value is None else [value]))
    rows = expected(fits=fits)
    assert 0 < len(rows) < len(expected())
    assert shown(page) == titles(rows)
    sent = {row["title"] for row in rows if not row["ceiling"] and row["up_mib"] is not None}
    assert {
        text.split(",")[0]
        for text in page.locator("#points .point").evaluate_all("all => all.map(one => one.ariaLabel)")
    } == sent
    drawn = [row for row in rows if not row["ceiling"]][:5]
    assert page.locator("#lines path.line").count() == len(drawn)
    assert page.locator("#lines text.strong").all_inner_texts() == [] or set(
        page.locator("#lines text.strong").evaluate_all("all => all.map(one => one.textContent)")
    ) <= set(titles(drawn))
    assert f"{len(rows)} of {len(expected())} methods" in page.locator("#count").inner_text()
    clear = page.get_by_text("Clear filters")
    clear.click()
    clear.wait_for(state="hidden")
    assert shown(page) == titles(expected())


def test_which_methods_upload_less_than_a_number_per_task(opened):
    page = opened()
    page.locator("#filters [name=per]").select_option("task")
    page.locator("#filters [name=up]").fill("0.5")
    rows = expected(fits=lambda row: row["up_mib"] is not None and row["up_mib"] / TASKS <= 0.5)
    assert shown(page) == titles(rows)
    assert rows
    assert numbers(column(page, "up")) == [pytest.approx(row["up_mib"] / TASKS, rel=0.006) for row in rows]
    assert "per task" in page.locator("#points").evaluate("one => one.textContent")


def test_settings_and_kinds_are_chosen(opened):
    page = opened()
    page.locator("#settings label").nth(2).click()
    assert shown(page) == titles(expected(2))
    page.get_by_text("Defaults", exact=True).click()
    assert shown(page) == titles(expected(2, "defaults"))
    page.locator("#kinds label").nth(2).click()
    pairs = zip(
        *(sorted(expected(2, kind), key=lambda row: row["method"]) for kind in ("defaults", "tuned")), strict=True
    )
    best = sorted((max(pair, key=lambda row: row["A_T"]) for pair in pairs), key=lambda row: -row["A_T"])
    assert shown(page) == titles(best)


def test_what_was_not_run_is_at_the_end_with_the_reason(opened):
    page = opened()
    missing = expected(run=False)
    assert len(missing) > 3
    assert not page.locator("#absent table").is_visible()
    page.locator("#absent summary").click()
    assert page.locator("#absent summary").inner_text() == f"{len(missing)} not run in this setting"
    assert set(page.locator("#absent tbody th").all_inner_texts()) == set(titles(missing))
    assert set(page.locator("#absent tbody td:last-child").all_inner_texts()) == {missing[0]["why"]}


def test_charts_and_tables_have_names_and_controls_are_reached_by_keyboard(opened):
    page = opened()
    page.locator("#rows .title").nth(3).click()
    for chart in page.locator(".chart svg").all():
        assert chart.locator("title").count() == chart.locator("desc").count() == 1
        assert chart.evaluate("one => document.getElementById(one.getAttribute('aria-labelledby')).textContent")
    reachable = "all => all.filter((one) => one.checkVisibility() && one.tabIndex !== 0 && !one.disabled).length"
    assert page.locator("button, input, select, summary, .scroll").evaluate_all(reachable) == 0
    unnamed = "all => all.filter((one) => !(one.ariaLabel || one.labels?.length || one.textContent.trim())).length"
    assert page.locator("button, input, select").evaluate_all(unnamed) == 0
    assert page.locator("table caption, .panel [aria-label] > table").count() >= 2
    outlined = "one => { one.focus(); return getComputedStyle(one).outlineStyle; }"
    page.keyboard.press("Tab")
    assert page.locator("#rows thead button").first.evaluate(outlined) == "solid"


def test_a_hundred_methods_in_four_settings_load_in_a_second(opened, tmp_path):
    path = tmp_path / "large.html"
    path.write_text(board_page(made_up_board(100)))
    page = opened(where=path.as_uri())
    session = page.context.new_cdp_session(page)
    # Seconds of the page's own thread, which other work on the machine does not add to.
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.reload()
    assert page.locator("#rows tr.row").count() == 88
    measured = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    assert 0 < measured["TaskDuration"] < 1


def test_hostile_texts_are_shown_as_they_are(opened, tmp_path):
    hostile = "<img src=x onerror=alert(1)></script><b>bold</b>"
    board = made_up_board(10)
    for row in board["rows"]:
        row |= {
            "title": f"{hostile}{row['method']}",
            "family": hostile,
            "command": hostile,
            "tuning": {hostile: hostile},
        }
    path = tmp_path / "hostile.html"
    path.write_text(board_page(board))
    page = opened(where=path.as_uri())
    page.locator("#rows .title").nth(3).click()
    assert page.locator("img, main b").count() == 0
    assert page.locator(".panel code").first.inner_text() == hostile


def test_it_prints_in_black_on_white_without_controls(opened):
    # The width of A4 across less its margins.
    page = opened(1030, "dark")
    page.locator("#rows .title").nth(2).click()
    page.emulate_media(media="print")
    for control in ("#filters", ".choices", ".command button"):
        assert not page.locator(control).first.is_visible()
    assert page.locator("#rows tr.row").count() == len(expected())
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    # The whole table, and what follows it below.
    table, absent, panel = (page.locator(where).bounding_box() for where in ("#rows", "#absent", ".panel"))
    assert table["y"] + table["height"] <= absent["y"]
    assert table["x"] + table["width"] <= 1030
    assert panel["height"] < table["height"]
    assert page.pdf(landscape=True).startswith(b"%PDF")
