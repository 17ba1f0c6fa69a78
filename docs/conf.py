"""The documentation as a site (`make site`): Sphinx reads the Markdown pages as they stand, and the docstrings."""

from __future__ import annotations

import fcl_bench

project = "fcl-bench"
author = "the fcl-bench maintainers"
release = version = fcl_bench.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build"]
html_theme = "furo"
html_title = f"fcl-bench {release}"
html_theme_options = {"top_of_page_buttons": []}


# Headings are link targets, as on a code host; what MyST calls a block of no language is plain text.
myst_heading_anchors = 4
highlight_language = "none"
# The tutorial is executed at each build, and an error in it is an error of the build.
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_in_temp = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_use_ivar = True


def write_leaderboards(app, exception):
    """Write a page for each track with rows in results/leaderboard: leaderboards/TRACK.html."""
    from pathlib import Path

    from fcl_bench.leaderboard.board import board_of, board_page
    from fcl_bench.leaderboard.store import published, stored

    if exception is None:
        folder = Path(app.outdir) / "leaderboards"
        folder.mkdir(exist_ok=True)
        for rows in published().glob("*.csv"):
            page = board_page(board_of(stored(rows.stem, published())))
            (folder / f"{rows.stem}.html").write_text(page, encoding="utf-8")


def setup(app):
    app.connect("build-finished", write_leaderboards)
