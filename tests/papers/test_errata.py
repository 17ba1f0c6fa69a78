"""The table of docs/errata: every item has its row, every row a verdict, and every test that it names is one."""

from __future__ import annotations

import re

import pytest

from tests.conftest import REPOSITORY

ERRATA = REPOSITORY / "docs" / "errata"
ROWS = [line.strip("|").split("|") for line in (ERRATA / "index.md").read_text().splitlines() if line[:1] == "|"][2:]
VERDICTS = {"shown", "contradiction", "undecidable", "no error"}


def items() -> dict[str, set[str]]:
    """Page -> the numbers of its rows."""
    found: dict[str, set[str]] = {}
    for item, *_ in ROWS:
        if link := re.match(r"\[\w+\]\((\w+)\.md\) ", item):
            own = found.setdefault(link[1], set())
            item = item[link.end() :]
        own.add(item.partition(",")[0])
    return found


def test_every_item_of_every_page_has_a_row_and_every_row_an_item():
    found = items()
    assert set(found) == {page.stem for page in ERRATA.glob("*.md")} - {"index"}
    for page, numbers in found.items():
        text = (ERRATA / f"{page}.md").read_text()
        assert numbers == set(re.findall(r"^(?:## )?(\d+)\. ", text, flags=re.M)), page


def test_every_row_has_evidence_or_a_test_and_a_verdict():
    for item, evidence, test, verdict in ROWS:
        assert evidence or test, item
        assert verdict.removesuffix(", corrected") in VERDICTS, item


@pytest.mark.parametrize("named", sorted({test for row in ROWS for test in row[2].split("; ") if test}))
def test_the_tests_that_are_named_exist(named):
    file, words = re.fullmatch(r"`([\w/]+)`(.*)", named).groups()
    source = (REPOSITORY / "tests" / f"{file}.py").read_text()
    for word in words.strip().split(", "):  # of a test's name, or of what its cases are called
        assert re.search(rf'^def test_\w*{word}|"{word}"', source, flags=re.M), (named, word)
