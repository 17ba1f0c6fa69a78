"""A browser, and the page of the made-up board in it."""

from __future__ import annotations

import pytest

from fcl_bench.leaderboard.board import board_page
from tests.browser import browser as browser
from tests.leaderboard.on_screen import BOARD


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("board") / "board.html"
    path.write_text(board_page(BOARD))
    return path.as_uri()


@pytest.fixture
def opened(browser, file):
    """A page of the board at a width and in a theme; at the end, nothing was fetched and no script complained."""
    pages, said = [], []

    def at(width=1400, theme="light", where=file):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url != where else None)
        page.goto(where)
        pages.append(page)
        return page

    yield at
    for page in pages:
        page.close()
    assert said == []
