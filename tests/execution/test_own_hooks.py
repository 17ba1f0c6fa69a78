"""A method from outside of the repository has audits and its paper's bytes as the repository's own have."""

from __future__ import annotations

import json

from tests.own_methods import own_method

SOURCE = '''
from dataclasses import dataclass
from typing import ClassVar

from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.protocol.audit import Audit


class Trace(Audit):
    """The trace of the server's Gram matrix, and how many samples were seen."""

    def __init__(self):
        self.rows, self.seen = [], 0

    def observe(self, task, client_data):
        self.seen += len(client_data.labels)

    def report(self, task, server, everything):
        self.rows.append({"trace": float(server.estimate.matrix.trace()), "samples": self.seen})

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@dataclass
class Watched(STSA):
    name: ClassVar[str] = "watched"

    def audits(self, context):
        return {"bounds": Trace(), "trace": Trace()}

    def paper_bytes(self, context, classes_per_task):
        return {"stsa_mib": float(sum(classes_per_task))}
'''


def test_own_audits_and_bytes_are_in_the_record(tmp_path, monkeypatch, command):
    own_method(tmp_path, monkeypatch, SOURCE, "Watched", "M: 16\ngamma: 1.0\n")
    conf, out = ("--config-dir", str(tmp_path / "conf")), tmp_path / "out"
    status, _, err = command(*conf, "method=mine", "tasks=2", "clients=2", f"out={out}")
    assert (status, err) == (0, "")
    [file] = out.glob("runs/*/run.json")
    record = json.loads(file.read_text())
    assert record["communication"]["accounting"] == {"stsa_mib": 10.0}
    assert [row["samples"] for row in record["bounds"]] == [
        sum(record["class_samples"][:5]),
        sum(record["class_samples"]),
    ]
    rows = (file.parent / "trace.csv").read_text().splitlines()
    assert rows[0].split(",")[-2:] == ["trace", "samples"]
    assert len(rows) == 3


def test_own_audits_need_all_samples(tmp_path, monkeypatch, command):
    own_method(tmp_path, monkeypatch, SOURCE, "Watched", "M: 16\ngamma: 1.0\n")
    conf = ("--config-dir", str(tmp_path / "conf"))
    status, _, err = command(*conf, "method=mine", "clients=2", "on_bad_upload=drop", f"out={tmp_path / 'out'}")
    assert status == 2
    assert "on_bad_upload=drop: the bounds compare with all samples" in err
