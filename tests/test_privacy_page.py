"""Every method says on its page, and in the one table of docs/explanation/privacy.md, what leaves a client."""

from __future__ import annotations

import re

import pytest

from tests.conftest import REPOSITORY
from tests.small_methods import NAMES

DOCS = REPOSITORY / "docs"
TABLE = (DOCS / "explanation" / "privacy.md").read_text().partition("## Per method")[2].partition("\n###")[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_method_is_in_the_table_and_its_page_compares_with_raw_samples(name):
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and f"`{name}`" in line.split("|")[1]]
    assert rows, f"docs/explanation/privacy.md has no row for {name}"
    page = (DOCS / "methods" / f"{name}.md").read_text()
    assert re.search(
        r"^\*\*Against raw samples\*\*(: as \[\w+\]\(| \(\[privacy\]\(\.\./explanation/privacy\.md\)\)\. )",
        page,
        flags=re.M,
    )
