"""Where the tests of pages find a browser."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import pytest

#: No call home, no sandbox (tests may run as root), nothing kept.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)


def chromium_here() -> str | None:
    """Its path: $FCL_BENCH_CHROMIUM, or what is installed; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("FCL_BENCH_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def require_playwright() -> None:
    """Skip the module that calls it, visibly, where playwright has no browser."""
    if find_spec("playwright") is None or chromium_here() is None:
        wanted = "Chromium (apt-get install chromium, or FCL_BENCH_CHROMIUM) and playwright (pip install '.[browser]')"
        pytest.skip(f"needs {wanted}", allow_module_level=True)
