"""The page of a board as text: what is inside, what is not, and that nothing in it can run or end a script."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re

import pytest

from fcl_bench.leaderboard.board import board_page
from tests.leaderboard.made_up import made_up_board
from tests.results.pages import Element, parsed

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> & ' \" {{ 7 * 7 }} \u2028"


def scripts(root: Element) -> list[Element]:
    return [one for one in root.all("script") if one.attributes.get("type") != "application/json"]


def rows_in(root: Element) -> list[dict]:
    data = next(one for one in root.all("script") if one.attributes.get("type") == "application/json")
    board = json.loads(data.text, parse_constant=pytest.fail)
    return [dict(zip(board["keys"], values, strict=True)) for values in board["rows"]]


def test_every_row_is_inside_with_six_digits():
    board = made_up_board(12)
    found = rows_in(parsed(board_page(board)))
    assert len(found) == len(board["rows"]) == 12 * 4 * 2
    for row, given in zip(found, board["rows"], strict=True):
        for key, value in given.items():
            if isinstance(value, float) or key == "curve":
                assert row[key] == pytest.approx(value, rel=1e-5)
            else:
                assert row[key] == value


def test_title_data_date_command_and_shared_settings_are_text():
    root = parsed(board_page(made_up_board(3) | {"conclusion": "Three & nobody wins."}))
    assert root.all("title")[0].text == "Leaderboard features: features, 2026-11-27"
    header = root.all("header")[0].text
    for words in (
        "MADE-UP",
        "seeds 0, 1, 2",
        "code fface99f0000",
        "3 methods",
        "partition dirichlet",
        "Three & nobody",
    ):
        assert words in header
    assert root.all("code")[0].text == "fcl-bench leaderboard run features data.path=FEATURES.npz"


def test_hostile_texts_stay_texts():
    texts = ("track", "version", "about", "data", "date", "command", "conclusion")
    board = made_up_board(3) | dict.fromkeys(texts, HOSTILE)
    board |= {
        "shared": {HOSTILE: HOSTILE},
        "settings": [{HOSTILE: HOSTILE}],
        "seeds": [HOSTILE],
        "revisions": [HOSTILE],
    }
    names = ("method", "title", "family", "why", "command", "gate_texts")
    for row in board["rows"]:
        row |= dict.fromkeys(names, HOSTILE)
        row |= {"gates": [HOSTILE], "tuning": {HOSTILE: HOSTILE}, "run_ids": [HOSTILE], "commits": [HOSTILE]}
    page = board_page(board)
    root = parsed(page)
    assert len(scripts(root)) == 1
    assert not root.all("img")
    assert "49" not in root.all("h1")[0].text
    assert root.all("title")[0].text.count(HOSTILE) == 3
    assert {row["title"] for row in rows_in(root)} == {HOSTILE}
    assert page.count("<script") == page.count("</script>") == 2


def test_the_policy_allows_these_scripts_and_nothing_else():
    page = board_page(made_up_board(3))
    root = parsed(page)
    policy = next(one.attributes["content"] for one in root.all("meta") if "http-equiv" in one.attributes)
    digests = {base64.b64encode(hashlib.sha256(one.text.encode()).digest()).decode() for one in scripts(root)}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == digests
    assert policy.startswith("default-src 'none'; ")
    # The namespace of SVG is a name: nothing is fetched from it.
    assert set(re.findall(r"https?://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("absent", [None, math.nan, math.inf])
def test_what_is_absent_is_null(absent):
    board = made_up_board(3)
    board["rows"][0] |= {"A_T": absent, "curve": [1.0, absent], "behind": absent, "tuning": {"method.lr": absent}}
    del board["rows"][0]["up_mib"]
    page = board_page(board)
    first = rows_in(parsed(page))[0]
    assert [first[key] for key in ("A_T", "curve", "behind", "up_mib")] == [None, [1.0, None], None, None]
    assert first["tuning"] == {"method.lr": None}


def test_a_hundred_rows_take_less_than_300_kilobytes():
    board = made_up_board(50, settings=1)
    assert len(board["rows"]) == 100
    assert len(board_page(board).encode()) < 120_000
    assert len(board_page(made_up_board(45)).encode()) < 300_000


def test_the_same_board_is_the_same_page():
    assert board_page(made_up_board(5)) == board_page(made_up_board(5))
