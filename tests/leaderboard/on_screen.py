"""What a page of the made-up board shows in a browser, and what it should show."""

from __future__ import annotations

from itertools import combinations

from tests.leaderboard.made_up import made_up_board

BOARD = made_up_board()
RECTANGLES = """(where) => [...document.querySelectorAll(`${where} svg text`)].map((text) => {
  const { left, top, right, bottom } = text.getBoundingClientRect();
  return [text.textContent, left, top, right, bottom];
})"""


def shown(page):
    """Names in the table, from top to bottom."""
    return page.locator("#rows .title").all_inner_texts()


def column(page, key):
    """Texts of a column: the first line of each cell."""
    place = page.locator("#rows thead th").evaluate_all(
        "(all, key) => all.findIndex((one) => one.dataset.key === key)", key
    )
    cells = page.locator(f"#rows tbody tr.row > :nth-child({place + 1})").all_inner_texts()
    return [text.split("\n")[0].strip() for text in cells]


def numbers(texts):
    return [None if text in ("–", "") else 0.0 if text == "best" else float(text.replace(",", "")) for text in texts]


def expected(setting=0, kind="tuned", fits=lambda row: True, run=True):
    """Rows that the page should show: best first."""
    rows = [row for row in BOARD["rows"] if (row["setting"], row["kind"]) == (setting, kind)]
    there = [row for row in rows if (row["status"] == "run") == run]
    return sorted(filter(fits, there), key=lambda row: -row.get("A_T", 0))


def titles(rows):
    return [row["title"] for row in rows]


def overlaps(page, where):
    rectangles = page.evaluate(RECTANGLES, where)
    assert len(rectangles) > 5, "no chart was drawn"
    return [
        (a, b)
        for (a, *one), (b, *two) in combinations(rectangles, 2)
        if min(one[2], two[2]) - max(one[0], two[0]) > 0.5 and min(one[3], two[3]) - max(one[1], two[1]) > 0.5
    ]


def outside(page):
    """Texts of charts that stand out of their chart's column."""
    return page.evaluate("""() => [...document.querySelectorAll('.chart svg text')].filter((text) => {
      const [box, own] = [text.closest('.chart').getBoundingClientRect(), text.getBoundingClientRect()];
      return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1
        || own.bottom > box.bottom + 1;
    }).map((text) => text.textContent)""")
