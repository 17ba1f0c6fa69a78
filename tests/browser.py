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


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium_here(), args=list(FLAGS))
        yield opened
        opened.close()


#: JavaScript that returns [text, ratio] of the texts that are too faint to be read (WCAG 2.2, 1.4.3), against the
#: nearest background that is not transparent.
FAINT = """() => {
      // color(srgb ...), which a mix of colours is, has parts from 0 to 1.
      const parts = (color) =>
        color.match(/[\\d.]+/g).map((part) => Number(part) * (color.startsWith("color(") ? 255 : 1));
      const light = (color) => parts(color).slice(0, 3).map((one) => one / 255)
        .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
        .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
      const behind = (element) => {
        for (let one = element; one; one = one.parentElement) {
          const color = getComputedStyle(one).backgroundColor;
          if (parts(color)[3] !== 0) return color;
        }
        return "rgb(255, 255, 255)";
      };
      const found = [];
      const walk = document.createTreeWalker(document.querySelector("body"), NodeFilter.SHOW_TEXT);
      while (walk.nextNode()) {
        const element = walk.currentNode.parentElement;
        if (!walk.currentNode.textContent.trim() || !element.checkVisibility()) continue;
        if (element.closest("script, noscript")) continue;
        const style = getComputedStyle(element);
        const [a, b] = [light(element.closest("svg") ? style.fill : style.color), light(behind(element))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) found.push([walk.currentNode.textContent, ratio]);
      }
      return found;
    }"""
