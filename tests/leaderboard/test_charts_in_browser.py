"""The charts of a board's page in a real headless Chromium: nothing overlaps, and points say what they are."""

from __future__ import annotations

import pytest

from tests.browser import require_playwright
from tests.leaderboard.on_screen import expected, outside, overlaps, titles

require_playwright()

WIDTHS = (390, 800, 1400)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overlaps_or_makes_the_page_wider(opened, width, theme):
    page = opened(width, theme)
    for setting in range(4):
        page.locator(f"#settings input[value='{setting}']").check()
        for where in ("#points", "#lines"):
            assert overlaps(page, where) == []
        assert outside(page) == []
    page.locator("#filters").evaluate("(filters) => { filters.open = true; }")
    page.locator("#absent").evaluate("(absent) => { absent.open = true; }")
    page.locator("#rows .title").nth(3).click()
    assert overlaps(page, ".panel") == []
    assert outside(page) == []
    widths = page.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollWidth]")
    assert widths == [width, width]
    panel = page.locator(".panel").bounding_box()
    assert panel["x"] >= 0
    assert panel["x"] + panel["width"] <= width


def test_ten_rows_at_most_are_drawn_over_tasks_in_the_colours_of_their_boxes(opened):
    page = opened()
    boxes = page.locator("#rows input[type=checkbox]")
    assert page.locator("#lines path.line").count() == 5
    for place in range(12, 17):
        boxes.nth(place).check()
    assert page.locator("#lines path.line").count() == 10
    assert boxes.nth(20).is_disabled()
    assert overlaps(page, "#lines") == []
    colours = page.locator("#lines path.line").evaluate_all("all => all.map(one => getComputedStyle(one).stroke)")
    assert len(set(colours)) == 10
    ticked = page.locator("#rows input:checked").evaluate_all(
        "all => all.map(one => getComputedStyle(one).accentColor)"
    )
    assert set(ticked) == set(colours)
    boxes.nth(12).uncheck()
    assert boxes.nth(20).is_enabled()
    page.get_by_text("Draw the first five again").click()
    assert page.locator("#lines path.line").count() == 5


def test_at_most_fifteen_points_have_names_and_the_front_has_them_all(opened):
    page = opened()
    names = page.locator("#points .names text:not(.soft)").evaluate_all("all => all.map(one => one.textContent)")
    sent = [row for row in expected() if not row["ceiling"]]
    front = [row for row in sent if not any(o["up_mib"] <= row["up_mib"] and o["A_T"] > row["A_T"] for o in sent)]
    assert len(front) < len(names) <= 15
    assert set(titles(front)) <= set(names)
    strong = page.locator("#points .names text.strong").evaluate_all("all => all.map(one => one.textContent)")
    assert set(strong) == set(titles(front))


def test_a_point_says_what_it_is_and_opens_its_row(opened):
    page = opened()
    points = page.locator("#points .point")
    tip = page.locator("#points .tip")
    assert tip.is_hidden()
    order = sorted((row for row in expected() if not row["ceiling"]), key=lambda row: row["up_mib"])
    page.locator("#points .point[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith(order[1]["title"])
    assert f"{order[1]['A_T']:.2f} %" in tip.inner_text()
    page.keyboard.press("Enter")
    assert page.locator("#rows [aria-expanded=true]").inner_text() == order[1]["title"]
    assert page.locator("#rows [aria-expanded=true]").evaluate("one => one === document.activeElement")
    assert points.count() == len(order)
