"""The ledger against a plain re-statement in dictionaries, and the work that its answers take."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.engine.codec import RawSamples
from fcl_bench.engine.ledger import Ledger, Rows, Upload
from fcl_bench.protocol.message import Message

STAGES = ("model", "statistics", "bases")


def exchanges(seed: int) -> list[Upload]:
    """Tasks in order, some without a row; several rounds and stages; any clients."""
    rng = np.random.default_rng(seed)
    rows = []
    for task in np.flatnonzero(rng.random(6) < 0.6).tolist():
        for round_ in range(int(rng.integers(1, 4))):
            stage = STAGES[rng.integers(3)]
            for client in np.flatnonzero(rng.random(7) < 0.6).tolist():
                counts, sizes = rng.integers(0, 2**31, 4).tolist(), rng.integers(0, 2**40, 2).tolist()
                alone = rng.integers(0, 2**20, 2).tolist()
                rows.append(Upload(task, round_, client, stage, *counts, *sizes, float(1e3 * rng.random()), *alone))
    return rows


#: Of features of 16-bit numbers, say: with something that every upload costs besides.
RAW = RawSamples("features", 100, 1000)


def entered(rows: list[Upload], clients: int = 7) -> Ledger:
    ledger = Ledger(clients, RAW)
    add(ledger, rows)
    ledger.server_seconds = [float(task) for task in range(6)]
    return ledger


def add(ledger: Ledger, rows: list[Upload]) -> None:
    """Each row as a round of one client."""
    for row in rows:
        columns = {name: value for name, value in vars(row).items() if name not in ("task", "round", "stage")}
        ledger.add_round(row.task, row.round, row.stage, columns)


def kept_by(ledger: Ledger) -> tuple:
    """Everything that a ledger keeps."""
    return ledger.uploads, ledger.server_seconds, ledger.cached.names


def sums(rows: list[Upload], column: str, *keys: str) -> dict[tuple, int]:
    found: dict[tuple, int] = defaultdict(int)
    for row in rows:
        found[tuple(getattr(row, key) for key in keys)] += getattr(row, column)
    return found


def raw_of(rows: list[Upload]) -> dict:
    """Client by client and task by task; a client's samples of a task are what any of its rows says."""
    told = {"kind": "features", "sample_bytes": 100, "busiest_bytes": 0, "total_bytes": 0, "uploads": 0, "larger": 0}
    largest = (0, 0)
    for (client, task), up in sums(rows, "up_bytes", "client", "task").items():
        own = [row for row in rows if (row.client, row.task) == (client, task)]
        samples = max(row.labelled for row in own) + max(row.accepted for row in own)
        cost = 100 * samples + (1000 if samples else 0)
        largest = max(largest, (up, cost))
        told["uploads"] += up > 0
        told["larger"] += up > cost
        told["total_bytes"] += cost if up else 0
    return {**told, "busiest_bytes": largest[1]}


def most(found: dict[tuple, int]) -> int:
    return max(found.values(), default=0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_totals_are_those_of_a_plain_loop(seed):
    rows = exchanges(seed)
    ledger = entered(rows)
    assert ledger.uploads == tuple(rows)
    assert len(ledger.rows) == len(rows)
    expected = {
        "up_max_bytes": most(sums(rows, "up_bytes", "client", "task")),
        "up_total_max_bytes": most(sums(rows, "up_bytes", "client")),
        "down_max_bytes": most(sums(rows, "down_bytes", "client", "task")),
        "up_total_bytes": sum(row.up_bytes for row in rows),
        "down_total_bytes": sum(row.down_bytes for row in rows),
        "raw": raw_of(rows),
        "by_stage": {},
    }
    for stage in sorted({row.stage for row in rows}):
        own = [row for row in rows if row.stage == stage]
        per_task: dict[int, int] = defaultdict(int)
        for (_, task), size in sums(own, "up_bytes", "client", "task").items():
            per_task[task] = max(per_task[task], size)
        expected["by_stage"][stage] = {
            "up_max_bytes": most(sums(own, "up_bytes", "client", "task")),
            "up_max_bytes_by_task": [per_task[task] for task in range(max(row.task for row in rows) + 1)],
            "up_total_bytes": sum(row.up_bytes for row in own),
            "down_total_bytes": sum(row.down_bytes for row in own),
        }
    found = ledger.communication()
    assert found == expected
    assert list(found["by_stage"]) == list(expected["by_stage"])
    for task in [None, *range(6)]:
        own = [row for row in rows if row.round == 0 and task in (None, row.task)]
        names = ("samples", "labelled", "accepted", "right")
        assert ledger.labels(task) == {name: sum(getattr(row, name) for row in own) for name in names}
    for task in range(6):
        own = [row for row in rows if row.task == task]
        totals = ledger.task_totals(task)
        assert totals["up_bytes"] == sum(row.up_bytes for row in own)
        assert totals["down_bytes"] == sum(row.down_bytes for row in own)
        assert totals["client_seconds"] == pytest.approx(sum(row.client_seconds for row in own))
        assert totals["server_seconds"] == task
    assert ledger.runtime()["client_seconds"] == pytest.approx(sum(row.client_seconds for row in rows))
    alone = ledger.single_samples()
    for name in ("one_sample_sums", "one_sample_moments"):
        assert alone[name] == sum(getattr(row, name) for row in rows)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_is_saved_is_restored_and_can_be_gone_on_with(seed):
    rows = exchanges(seed)
    ledger = entered(rows)
    restored = Ledger(7)
    restored.restore(ledger.state(), {name: tensor.clone() for name, tensor in ledger.tensors().items()})
    assert kept_by(restored) == kept_by(ledger)
    more = Upload(6, 0, 3, "new stage", 1, 1, 0, 0, 5, 6, 0.5)
    add(restored, [more])
    assert restored.uploads == (*rows, more)
    assert kept_by(restored) != kept_by(ledger)


def test_numbers_are_plain_ones_as_json_and_csv_want_them():
    ledger = entered([Upload(0, 0, 1, "model", 3, 2, 1, 0, 10, 20, 0.25)])
    [row] = ledger.values()
    assert [type(value) for value in row] == [int, int, int, str, *[int] * 6, float, int, int, int, int, int]
    told = ledger.communication()
    values = [*told.values(), *ledger.labels().values(), *told["by_stage"]["model"].values()]
    values += [*ledger.single_samples().values(), *(value for name, value in told["raw"].items() if name != "kind")]
    assert {type(value) for value in values} == {int, dict, list}


def test_an_earlier_task_is_refused():
    ledger = entered([Upload(1, 0, 0, "model", 1, 1, 0, 0, 1, 1, 0.0)])
    with pytest.raises(ValueError, match="in order"):
        add(ledger, [Upload(0, 0, 0, "model", 1, 1, 0, 0, 1, 1, 0.0)])


def test_all_stages_can_be_renamed():
    rows = [Upload(0, round_, 0, STAGES[round_], 1, 1, 0, 0, 1, 1, 0.0) for round_ in range(3)]
    ledger = entered(rows)
    ledger.rename_stages("adaptation")
    assert [row.stage for row in ledger.uploads] == ["adaptation"] * 3
    assert list(ledger.communication()["by_stage"]) == ["adaptation"]


def long_ledger(tasks: int, clients: int) -> Ledger:
    ledger = Ledger(clients)
    columns = dict.fromkeys(("samples", "labelled", "accepted", "right", "one_sample_sums", "one_sample_moments"), 1)
    columns |= {"client": np.arange(clients), "up_bytes": 4, "down_bytes": 8, "client_seconds": 0.5}
    for task in range(tasks):
        ledger.add_round(task, 0, "statistics", columns)
        ledger.server_seconds.append(1.0)
    return ledger


def test_what_is_asked_of_a_task_visits_its_rows_only():
    """Rows, not seconds: what one task's totals look at does not grow with the tasks before it."""
    for tasks in (10, 1000):
        ledger = long_ledger(tasks, clients=20)
        assert len(ledger.rows) == 20 * tasks
        for task in (0, tasks // 2, tasks - 1):
            assert len(ledger._of_task(task)) == 20
        assert sum(len(rows) for rows in ledger._tasks()) == len(ledger.rows)
        assert ledger.communication()["up_total_bytes"] == 4 * len(ledger.rows)


def test_a_row_is_65_bytes_and_room_to_spare_is_a_third_at_most():
    ledger = long_ledger(tasks=50, clients=1000)
    assert ledger.tensors()["rows.uploads"].nbytes == 65 * 50_000
    assert ledger._rows._room.nbytes <= 1.5 * 65 * 50_000


def test_growing_moves_each_row_a_few_times_however_many_there_are(monkeypatch):
    """Counts the bytes of every new room: proportional to the rows, where a copy each time would make it the square."""
    made, zeros = [], np.zeros
    monkeypatch.setattr(
        "fcl_bench.engine.ledger.np.zeros", lambda *given, **named: made.append(zeros(*given, **named)) or made[-1]
    )
    rows = Rows(np.dtype(np.int64))
    for number in range(3000):
        rows.extend(np.array([number]))
    np.testing.assert_array_equal(rows.array, np.arange(3000))
    assert sum(map(len, made)) <= 5 * 3000


def test_clients_that_keep_the_same_share_one_set():
    ledger = Ledger(1000)
    for broadcast in (
        Message({"a": torch.zeros(3), "b": torch.zeros(2)}, cached=["a"]),
        Message({"a": torch.zeros(3), "c": torch.zeros(5)}, cached=["a", "c"]),
    ):
        sent = {ledger.cached.send(client, broadcast) for client in range(1000)}
        assert len(sent) == 1
    assert len({id(names) for names in ledger.cached.names.values()}) == 1
    assert ledger.cached.names[7] == {"a", "c"}
    state = ledger.state()
    assert state["cached"] == [["a", "c"]]
    restored = Ledger(1000)
    restored.restore(state, ledger.tensors())
    assert kept_by(restored) == kept_by(ledger)
    assert len({id(names) for names in restored.cached.names.values()}) == 1


@pytest.mark.parametrize("takes_part", [True, False], ids=["with the client", "without it"])
def test_what_changes_again_costs_again_whoever_had_it(takes_part):
    """As the class weights of a class that comes back: at rest in one task, trained in the next, at rest again."""
    ledger = Ledger(2)
    resting = Message({"a": torch.zeros(3)}, cached=["a"])
    assert [ledger.cached.send(0, resting), ledger.cached.send(0, resting)] == [12, 0]
    changing = Message({"a": torch.zeros(3), "b": torch.zeros(2)}, cached=["b"] if takes_part else [])
    assert ledger.cached.send(0 if takes_part else 1, changing) == 20
    assert ledger.cached.send(0, Message({"a": torch.zeros(3)}, cached=["a"])) == 12


def test_samples_are_counted_once_however_often_they_are_told():
    ledger = entered([Upload(0, 0, 1, "model", 3, 2, 1, 0, 10, 20, 0.25, 4, 1)])
    for told in ([7, 3], [], [3, 100_000], [0, 7]):
        ledger.revealed.add(np.array(told, dtype=np.int64))
    assert ledger.single_samples() == {"one_sample_sums": 4, "one_sample_moments": 1, "revealed_samples": 4}
    restored = Ledger(7)
    restored.restore(json.loads(json.dumps(ledger.state())), ledger.tensors())
    assert restored.communication() == ledger.communication()  # and so what a raw sample costs
    restored.revealed.add(np.array([3, 5]))
    assert restored.single_samples()["revealed_samples"] == 5
    assert ledger.single_samples()["revealed_samples"] == 4
