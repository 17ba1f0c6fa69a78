"""Which logits compete, against a restatement class by class."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.protocol.message import Message
from fcl_bench.training.network import Heads


@st.composite
def streams(draw) -> list[tuple[int, ...]]:
    """The classes of some tasks, numbered by first appearance; a task may have no new class."""
    tasks, seen = [], 0
    for _ in range(draw(st.integers(1, 5))):
        new = draw(st.integers(0 if seen else 1, 3))
        old = draw(st.sets(st.integers(0, seen - 1), min_size=0 if new else 1)) if seen else set()
        tasks.append(tuple(sorted({*old, *range(seen, seen + new)})))
        seen += new
    return tasks


def heads_of(tasks: list[tuple[int, ...]], full: bool) -> Heads:
    """A head a task: for all its classes, or for those that no earlier task has."""
    if full:
        return Heads(tuple(tasks), tasks[-1])
    new = [tuple(c for c in task if all(c not in other for other in tasks[:t])) for t, task in enumerate(tasks)]
    return Heads(tuple(new), tasks[-1])


@pytest.mark.slow
@given(streams(), st.booleans(), st.sampled_from(["seen", "task"]))
def test_the_logits_that_compete(tasks, full, over):
    heads = heads_of(tasks, full)
    owners = [(head, column) for head, columns in enumerate(heads.columns) for column in columns]
    expected = []
    for logit, (head, column) in enumerate(owners):
        if column in heads.task:
            # The task's own head answers for its classes; a class that it lacks has a single logit anyway.
            mine = head == len(heads.columns) - 1 or column not in heads.columns[-1]
        else:
            mine = over == "seen"
        expected += [logit] if mine else []
    chosen, position = heads.competition(over)
    if chosen is None:
        assert position is None
        assert expected == list(range(len(owners)))
        assert [column for _, column in owners] == list(range(len(owners)))
        return
    assert chosen.tolist() == expected
    for column in heads.task:
        assert owners[chosen[position[column]]][1] == column
    assert len({int(position[column]) for column in heads.task}) == len(heads.task)


@given(streams(), st.booleans())
def test_a_message_tells_the_heads(tasks, full):
    heads = heads_of(tasks, full)
    message = heads.to_message()
    assert Heads.from_message(Message(message)) == heads
    trivial = heads.logits == sorted(set(heads.logits)) and heads.columns[-1] == heads.task
    assert (message.keys() == {"classes"}) == trivial


@given(streams(), st.integers(0, 2**32 - 1))
def test_a_class_scores_the_largest_of_its_logits(tasks, seed):
    heads = heads_of(tasks, True)
    logits = torch.from_numpy(np.random.default_rng(seed).standard_normal((4, sum(heads.sizes))))
    scores = heads.class_scores(logits)
    assert scores.shape == (4, 1 + max(map(max, tasks)))
    for column in range(scores.shape[1]):
        own = [logit for logit, of in enumerate(heads.logits) if of == column]
        assert torch.equal(scores[:, column], logits[:, own].max(dim=1).values)


def test_reused_heads_and_their_frozen_rows():
    heads = Heads(((0, 1, 2), (3,), (4,)), (1, 3, 4))
    assert heads.reused == {0, 1}
    assert heads.frozen_rows["heads.0.weight"] == heads.frozen_rows["heads.0.bias"] == [0, 2]
    assert heads.frozen_rows["heads.1.weight"] == []
    assert Heads(((0, 1, 2), (1, 3)), (1, 3)).reused == frozenset()


def test_an_old_tasks_competition_is_under_its_own_head():
    heads = Heads(((0, 1, 2), (1, 2, 3)), (1, 2, 3))
    for task, head, competing in ((None, -1, [0, 3, 4, 5]), ((0, 1, 2), 0, [0, 1, 2, 5])):
        chosen, position = heads.competition("seen", task, head)
        assert chosen.tolist() == competing
        assert position.tolist() == [0, 1, 2, 3]
