"""Further jobs of a sweep: what cannot be measured is said before anything runs."""

from __future__ import annotations

import sys

import pytest
import sweep_cost


@pytest.mark.parametrize("arguments", [["--seeds", "1"], ["--seeds", "0", "--methods", "afl,stsa"]])
def test_a_sweep_without_further_jobs_is_refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sweep_cost.py", *arguments])
    monkeypatch.setattr(sweep_cost, "processor_seconds", lambda *_: 1.0)
    with pytest.raises(SystemExit) as ended:
        sweep_cost.main()
    assert ended.value.code == 2
    assert "there is no further job" in capsys.readouterr().err
