"""Where the tests of pages find a browser."""

from __future__ import annotations

import os
import shutil

#: No call home, no sandbox (tests may run as root), nothing kept.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)


def chromium_here() -> str | None:
    """Its path: $FCL_BENCH_CHROMIUM, or what is installed; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("FCL_BENCH_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
