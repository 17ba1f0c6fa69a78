"""The documentation is a site without warnings, and its tutorial runs as it stands."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted((*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")))
#: What builds the site.
NEEDED = ("sphinx", "furo", "myst_nb")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@pytest.mark.slow
def test_the_tutorial_runs_as_it_stands(tmp_path):
    """Its cells, one after the other in one process, as a notebook runs them; the last one compares a prediction."""
    notebook = json.loads((DOCS / "tutorials" / "tutorial.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "clear the outputs before a commit"
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells) + "\nprint(accuracy)\n")
    environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": str(REPOSITORY / "src"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 90


def links(page: Path) -> set[Path]:
    """Files of the repository that a page links to."""
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def tree(index: Path) -> set[str]:
    """What the toctree of an index lists, without suffixes."""
    [(glob, found)] = re.findall(r"```\{toctree\}\n:hidden:\n(:glob:\n)?\n(.*?)```", index.read_text(), flags=re.S)
    if glob:
        return {page.stem for pattern in found.split() for page in index.parent.glob(pattern)} - {index.stem}
    return set(found.split())


def test_every_page_is_in_its_rooms_tree_and_every_room_in_the_sites():
    rooms = {index.parent for index in DOCS.glob("*/index.md")}
    assert tree(DOCS / "index.md") == {f"{room.name}/index" for room in rooms}
    for room in rooms:
        assert tree(room / "index.md") == {page.stem for page in PAGES if page.parent == room} - {"index"}
    assert {page.parent for page in PAGES} == {DOCS, *rooms}


def test_every_page_is_two_clicks_from_the_readme():
    once = links(REPOSITORY / "README.md") & {*PAGES}
    twice = set().union(*map(links, once - {page for page in once if page.suffix == ".ipynb"}))
    assert {*PAGES} - once - twice == set()


def test_no_page_links_to_a_file_that_the_site_does_not_have():
    """A link out of docs/ is a warning of the build, which only the slow test below sees."""
    found = {(page.name, to) for page in PAGES if page.suffix == ".md" for to in links(page)}
    assert found
    assert {(name, to) for name, to in found if not to.is_relative_to(DOCS)} == set()


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed (pip install '.[docs]')")
def test_the_site_builds_without_a_warning(tmp_path):
    """As `make site` does; a minute, most of it the tutorial: pytest -m slow tests/test_site.py"""
    options = [
        "--builder",
        "html",
        "--fail-on-warning",
        "--keep-going",
        "--fresh-env",
        "--doctree-dir",
        tmp_path / "trees",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, tmp_path / "site"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        assert (tmp_path / "site" / page.relative_to(DOCS)).with_suffix(".html").exists()
