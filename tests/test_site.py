"""The documentation is a site without warnings, and its tutorial runs as it stands."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
#: What builds the site.
NEEDED = ("sphinx", "furo", "myst_nb")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


def test_the_tutorial_runs_as_it_stands(tmp_path):
    """Its cells, one after the other in one process, as a notebook runs them; the last one compares a prediction."""
    notebook = json.loads((DOCS / "tutorial.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "clear the outputs before a commit"
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells) + "\nprint(accuracy)\n")
    environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": str(REPOSITORY / "src"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 90


def test_every_page_is_in_the_sites_tree():
    listed = set(re.findall(r"^([a-z0-9_]+)$", (DOCS / "index.md").read_text(), flags=re.M))
    pages = {page.stem for page in (*DOCS.glob("*.md"), *DOCS.glob("*.ipynb"))}
    assert listed == pages - {"index"}


def test_no_page_links_to_a_file_that_the_site_does_not_have():
    """A link out of docs/ is a warning of the build, which only the long test below sees."""
    links = {(page.name, to) for page in DOCS.glob("*.md") for to in re.findall(r"\]\(([^)#]+)", page.read_text())}
    outside = {(name, to) for name, to in links if "://" not in to and not (DOCS / to).resolve().is_relative_to(DOCS)}
    assert links
    assert outside == set()


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
    for page in DOCS.glob("*.md"):
        assert (tmp_path / "site" / f"{page.stem}.html").exists()
