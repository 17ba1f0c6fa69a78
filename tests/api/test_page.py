"""The code of docs/reference/python.md runs, from top to bottom, and gives what the page says."""

from __future__ import annotations

import re

import matplotlib
import pytest

from tests.conftest import REPOSITORY

BLOCKS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "reference" / "python.md").read_text(), flags=re.S)


@pytest.mark.slow
def test_the_pages_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {}
    with matplotlib.rc_context({"backend": "agg"}):
        for block in BLOCKS:
            exec(compile(block, "docs/reference/python.md", "exec"), known)
    out = capsys.readouterr().out
    assert "unknown key bta (did you mean beta" in out
    assert (known["predicted"] == known["test"].labels).sum() == known["right"]  # type: ignore[attr-defined]
    [both] = re.findall(r"^(\d+\.\d+) (\d+\.\d+)$", out, flags=re.M)[-1:]
    assert both[0] == both[1]
    assert {entry.name for entry in tmp_path.iterdir()} == {"outputs", "run.png", "comparison.pdf"}
    assert len(known["frame"]) == 8  # type: ignore[arg-type]
    assert not known["frame"]["error"].any()  # type: ignore[index]


def test_the_page_has_its_blocks():
    assert len(BLOCKS) >= 6
    assert all("fcl_bench" in block or "run." in block or "plt" in block for block in BLOCKS)
