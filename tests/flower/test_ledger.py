"""A site's ledger: a chain of lines that nobody can change unseen, and what a policy still lets out by it."""

from __future__ import annotations

import json

import pytest

from fcl_bench.errors import UserError
from fcl_bench.flower import ledger as module
from fcl_bench.flower.ledger import SiteLedger, read, summary
from fcl_bench.flower.policy import Policy
from fcl_bench.flower.refusals import Refusal


def entry(task=0, round_=0, asked="a", sent="a", **more):
    about = {"kind": "turn", "run": "abc", "method": "afl", "client": 0, "task": task, "round": round_}
    fields = {"G": {"shape": [3, 3], "least": 7}}
    return {
        **about,
        "stage": "statistics",
        "asked": asked,
        "sent": sent,
        "noise": None,
        "fields": fields,
        "bytes": 100,
        **more,
    }


def sent(ledger, *entries):
    for one in entries:
        ledger.write({**one, "left": True})


def test_lines_follow_each_other(tmp_path):
    path = tmp_path / "nodes" / "ledger.jsonl"
    first, second = SiteLedger(path, Policy()), SiteLedger(path, Policy())  # two nodes with one folder
    sent(first, entry(0))
    sent(second, entry(1))
    sent(first, entry(2))
    found = [line for line, _ in read(path)]
    assert [line["task"] for line in found] == [0, 1, 2]
    assert [line["before"] for line in found] == ["", found[0]["hash"], found[1]["hash"]]
    assert len({line["hash"] for line in found}) == 3
    SiteLedger(path, Policy())


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        (lambda lines: [lines[0].replace('"bytes": 100', '"bytes": 10'), *lines[1:]], 1),
        (lambda lines: [lines[0], lines[2]], 2),
        (lambda lines: lines[1:], 1),
        (lambda lines: [lines[1], lines[0], lines[2]], 1),
        (lambda lines: [*lines, "half a li"], 4),
    ],
)
def test_a_changed_ledger_is_seen(tmp_path, harm, line):
    path = tmp_path / "ledger.jsonl"
    sent(SiteLedger(path, Policy()), entry(0), entry(1), entry(2))
    path.write_text("\n".join(harm(path.read_text().splitlines())) + "\n")
    with pytest.raises(UserError, match=f"line {line} is not what was written.*would forget what it spent"):
        SiteLedger(path, Policy())
    with pytest.raises(UserError, match=f"line {line} is not what was written"):
        summary(path)


def test_a_line_that_was_cut_is_cut_off(tmp_path, caplog):
    """Its message has not left, and what was spent before is still spent."""
    path = tmp_path / "ledger.jsonl"
    sent(SiteLedger(path, Policy()), entry(0), entry(1), entry(2))
    whole = path.read_bytes().splitlines(keepends=True)
    for cut in (whole[2][:20], whole[2][:-1]):
        path.write_bytes(b"".join([*whole[:2], cut]))
        ledger = SiteLedger(path, Policy(messages_per_day=2))
        assert "2 lines, none changed" in summary(path)
        with pytest.raises(Refusal, match="2 uploads left today"):
            ledger.require_left(entry(2))
        caplog.clear()
        ledger.write({**entry(3), "left": False, "code": 14})
        assert "the last line has no end, and is cut off" in caplog.text
        assert [line["task"] for line, _ in read(path)] == [0, 1, 3]


def test_a_shorter_ledger_has_another_last_hash(tmp_path):
    path = tmp_path / "ledger.jsonl"
    sent(SiteLedger(path, Policy()), entry(0), entry(1))
    whole = summary(path).splitlines()[0]
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert summary(path).splitlines()[0] != whole


def test_the_summary_counts_what_left_and_what_did_not(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = SiteLedger(path, Policy())
    sent(ledger, entry(0), entry(1, fields={"G": {"shape": [3, 3], "least": 5}, "n": {"shape": [2], "least": None}}))
    ledger.write({**entry(2), "left": False, "code": 12})
    text = summary(path)
    for part in ("3 lines", "left: 2 messages, 200 bytes", "statistics/G, statistics/n", "group: 5", "1 by error 12"):
        assert part in text


def test_the_summary_of_a_run_has_no_lines_of_its_own(tmp_path):
    path = tmp_path / "ledger.jsonl"
    sent(SiteLedger(path, Policy()), entry(run="abc\n  refused: none\x1b[2K"))
    assert len(summary(path).splitlines()) == 8
    assert "\x1b" not in summary(path)


def test_a_day_has_so_many_uploads(tmp_path, monkeypatch):
    ledger = SiteLedger(tmp_path / "ledger.jsonl", Policy(messages_per_day=2))
    sent(ledger, entry(0), entry(1))
    ledger.write({**entry(2), "left": False, "code": 12})
    with pytest.raises(Refusal, match="2 uploads left today"):
        SiteLedger(ledger.path, ledger.policy).require_left(entry(2))
    monkeypatch.setattr(module, "_now", lambda: "2999-01-01T00:00:00Z")
    ledger.require_left(entry(2))


def noise(key, epsilon, of_task=1, of_run=2):
    return {"key": key, "epsilon": epsilon, "of_task": of_task, "of_run": of_run}


def test_epsilon_is_spent_once_for_each_run(tmp_path):
    ledger = SiteLedger(tmp_path / "ledger.jsonl", Policy(epsilon=8))
    sent(ledger, entry(0, noise=noise("one", 5)), entry(1, noise=noise("one", 5)))
    ledger.require_left(entry(1, noise=noise("one", 5)))
    ledger.require_left(entry(0, noise=noise("two", 3)))
    with pytest.raises(Refusal, match="epsilon is 8.5 in all: policy epsilon=8"):
        SiteLedger(ledger.path, ledger.policy).require_left(entry(0, noise=noise("two", 3.5)))


def test_noise_is_for_so_many_uploads_and_a_turn_done_twice_is_one(tmp_path):
    """A server that asks again and again, and takes the mean, would have what the noise hides."""
    ledger = SiteLedger(tmp_path / "ledger.jsonl", Policy(epsilon=8))
    sent(ledger, entry(0, noise=noise("one", 5)))
    ledger.require_left(entry(0, noise=noise("one", 5)))
    for again in (entry(0, 1, "b", "b", noise=noise("one", 5)), entry(0, 0, "a", "b", noise=noise("one", 5))):
        with pytest.raises(Refusal, match="the run's noise is for 2 uploads"):
            ledger.require_left(again)
    sent(ledger, entry(1, noise=noise("one", 5)))
    with pytest.raises(Refusal, match="the run's noise is for 2 uploads"):
        ledger.require_left(entry(2, noise=noise("one", 5)))


def test_a_line_is_json(tmp_path):
    path = tmp_path / "ledger.jsonl"
    sent(SiteLedger(path, Policy()), entry())
    (line,) = path.read_text().splitlines()
    assert set(json.loads(line)) == {*entry(), "left", "time", "before", "hash"}
