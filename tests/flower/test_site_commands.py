"""What an engineer types at a site before and after a run."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from fcl_bench.flower import node, relay
from fcl_bench.flower.ledger import LEDGER, SiteLedger
from fcl_bench.flower.policy import Policy
from tests.flower.test_ledger import entry


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Types a command in an empty folder; its exit code, and what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(relay, "require_flower", lambda user: None)

    def work(*arguments):
        monkeypatch.setattr(sys, "argv", ["fcl-bench-node", *arguments])
        code = node.main()
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return work


class Link(BaseHTTPRequestHandler):
    """Answers as a SuperLink does, at whose machine it is so many seconds later."""

    later, says = 0.0, ""

    def do_HEAD(self):
        self.send_response_only(404)
        self.send_header("Date", self.says or formatdate(time.time() + self.later, usegmt=True))
        self.end_headers()


@pytest.fixture
def link():
    with HTTPServer(("127.0.0.1", 0), Link) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"link=127.0.0.1:{server.server_port}"
        server.shutdown()


def save(path, counts, **changes):
    column = np.repeat(np.arange(len(counts)), counts)
    arrays = {"x": np.ones((len(column), 3)), "column": column, "task": np.zeros(len(column), dtype=int)}
    np.savez(path, **{**arrays, **changes})


def test_init_writes_a_policy_once(typed, tmp_path):
    assert typed("init")[0] == 0
    written = (tmp_path / "policy.yaml").read_text()
    code, _, told = typed("init")
    assert (code, told.count("\n")) == (2, 1)
    assert "is there already" in told
    assert (tmp_path / "policy.yaml").read_text() == written
    assert typed("init", "other.yaml")[0] == 0
    assert typed("init", "a", "b")[0] == 2


def test_check_says_what_the_site_has(typed, tmp_path, link):
    save(tmp_path / "own.npz", [9, 3])
    typed("init")
    code, out, _ = typed("check", "clients=0", link, "policy=policy.yaml", "data.path=own.npz")
    assert code == 0
    assert "12 samples of 3 features, 12 with a label" in out
    assert "classes [1] have fewer than smallest_group=5: no sums by class leave" in out
    assert re.search("answers, without TLS; clocks differ by [01] s", out)


def test_check_says_in_one_line_what_cannot_work(typed, tmp_path, link):
    save(tmp_path / "own.npz", [9, 9])
    save(tmp_path / "nan.npz", [9, 9], x=np.full((18, 3), np.nan))
    (tmp_path / "text").write_text("text")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed = f"link=127.0.0.1:{probe.getsockname()[1]}"
    own = "data.path=own.npz"
    for arguments, why in {
        ("clients=0", link): "data.path is not given",
        ("clients=0", link, "data.path=none.npz"): "data.path=none.npz",
        ("clients=0", link, "data.path=nan.npz"): "holds NaN",
        ("clients=0", closed, own): "cannot be reached",
        ("clients=0", link, own, "policy=text"): "has no lines KEY: VALUE",
        ("clients=0", link, own, "policy=none.yaml"): "policy=none.yaml is missing (fcl-bench-node init",
        ("clients=0", link, own, "ca=text"): "ca=text cannot be used",
        ("clients=0", link, own, "key=text"): "key=text cannot be used",
        ("clients=0", link, own, "key=nowhere"): "key=nowhere cannot be used",
        (link, own): "clients is not given",
    }.items():
        code, _, told = typed("check", *arguments)
        assert (code, told.count("\n")) == (2, 1), arguments
        assert why in told


@pytest.mark.parametrize(("later", "told"), [(-10, "(9|10|11) s ahead of"), (10, "(9|10|11) s behind")])
def test_a_clock_that_is_off_is_found_before_a_node_joins(typed, tmp_path, link, monkeypatch, later, told):
    monkeypatch.setattr(Link, "later", later)
    monkeypatch.setattr(node, "_node", lambda *arguments: pytest.fail("it joined"))
    save(tmp_path / "own.npz", [9, 9])
    for words in (["check"], []):
        code, _, text = typed(*words, "clients=0", link, "data.path=own.npz")
        assert (code, text.count("\n")) == (2, 1)
        assert re.search(f"the clock here is {told} that of link=127", text)


def test_a_superlink_that_does_not_say_the_time_is_no_superlink(typed, tmp_path, link, monkeypatch):
    monkeypatch.setattr(Link, "says", "noon")
    save(tmp_path / "own.npz", [9, 9])
    code, _, text = typed("check", "clients=0", link, "data.path=own.npz")
    assert (code, text.count("\n")) == (2, 1)
    assert "it does not say what time it is" in text


def test_a_superlink_that_is_not_there_yet_is_waited_for(typed, link, monkeypatch):
    monkeypatch.setattr(node, "_node", lambda *arguments: 0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed = f"link=127.0.0.1:{probe.getsockname()[1]}"
    assert typed("clients=0", closed)[0] == typed("clients=0", link)[0] == 0


def test_audit_needs_a_ledger_that_nobody_changed(typed, tmp_path):
    code, _, told = typed("audit")
    assert (code, told.count("\n")) == (2, 1)
    path = tmp_path / "outputs" / "nodes" / LEDGER
    SiteLedger(path, Policy()).write({**entry(), "left": True})
    code, out, _ = typed("audit")
    assert code == 0
    assert "1 lines, none changed" in out
    path.write_text(path.read_text().replace("100", "10"))
    code, _, told = typed("audit", "out=outputs")
    assert (code, told.count("\n")) == (2, 1)
    assert "line 1 is not what was written" in told
