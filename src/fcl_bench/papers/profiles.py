"""The sizes in which an experiment can be run."""

from __future__ import annotations

#: full: a paper's own settings; quick: the same grid in miniature, cell by cell in the same order.
PROFILES = ("full", "quick")
