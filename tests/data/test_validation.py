"""Which training samples are held out for validation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.data.validation import draw_validation
from fcl_bench.errors import UserError
from fcl_bench.execution.plan import deal
from tests.small_runs import settings_for


@given(
    samples=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=150),
    share=st.floats(0.01, 0.9),
    seed=st.integers(0, 1000),
)
def test_every_class_gives_its_share_and_every_client_its_own_of_it(samples, share, seed):
    columns, clients = np.array(samples).T
    held = draw_validation(columns, clients, share, np.random.default_rng(seed))
    for column in np.unique(columns):
        of_class = columns == column
        wanted = max(np.floor(share * of_class.sum() + 0.5), of_class.sum() > 1)
        assert held[of_class].sum() == wanted
        for client in np.unique(clients[of_class]):
            own = of_class & (clients == client)
            assert np.floor(share * own.sum() + 1e-9) <= held[own].sum() <= np.floor(share * own.sum() + 1e-9) + 1


def test_clients_with_one_sample_each_give_some_together():
    """Twenty clients with one sample of the class: a tenth of one is none, and two of them give theirs."""
    draws = [draw_validation(np.zeros(20, int), np.arange(20), 0.1, np.random.default_rng(s)) for s in range(500)]
    assert {int(held.sum()) for held in draws} == {2}
    assert np.abs(np.mean(draws, axis=0) - 0.1).max() < 0.06  # whose it is, is drawn


SMALL = ("tasks=3", "clients=4", "beta=0.3")


def dealt(out: Path, *overrides: str):
    return deal(settings_for(out, *SMALL, *overrides))


@pytest.mark.parametrize("split", ["class_incremental", pytest.param("si_blurry", marks=pytest.mark.slow)])
def test_training_validation_and_test_share_no_sample_and_nothing_is_lost(tmp_path, split):
    whole = dealt(tmp_path, f"split={split}")
    found = dealt(tmp_path, f"split={split}", "data.validation=0.2")
    for t, held in enumerate(found.stream.validation):
        kept = np.concatenate(list(found.shards[t]))
        np.testing.assert_array_equal(np.sort(kept), found.stream.train[t])
        np.testing.assert_array_equal(np.sort([*kept, *held]), whole.stream.train[t])
        for before, after in zip(whole.shards[t], found.shards[t], strict=True):  # nobody gets another's samples
            assert np.isin(after, before).all()
        np.testing.assert_array_equal(found.stream.test[t], whole.stream.test[t])
    again = dealt(tmp_path, f"split={split}", "data.validation=0.2")
    other = dealt(tmp_path, f"split={split}", "data.validation=0.2", "seed=1")
    assert all(map(np.array_equal, again.stream.validation, found.stream.validation))
    assert not all(map(np.array_equal, other.stream.validation, found.stream.validation))


def test_labels_are_hidden_among_what_is_left(tmp_path):
    found = dealt(tmp_path, "data.validation=0.2", "label_rate=0.5")
    for t, shards in enumerate(found.shards):
        for own in shards:
            assert abs(found.labelled[own].sum() - 0.5 * len(own)) <= 0.5
        assert found.labelled[found.stream.validation[t]].all()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("data.validation=1",), r"data.validation=1.0 is out of range \(a share, 0 to below 1\)"),
        (("data.validation=-0.1",), r"data.validation=-0.1 is out of range"),
        (("data.test=false",), r"data.test=false leaves nothing to test on \(data.validation=0.1 beside it\)"),
        (("data.validation=0.999",), r"of the \d+ training samples of task 0, \d+ would be held out"),
    ],
)
def test_what_cannot_be_held_out_is_one_line(tmp_path, typed, message):
    with pytest.raises(UserError, match=message):
        dealt(tmp_path, *typed)


def test_without_validation_a_run_keeps_its_id(tmp_path):
    settings = settings_for(tmp_path, *SMALL)
    assert "held_out" not in settings.identity()
    ids = [
        settings_for(tmp_path, *SMALL, *more).identity() for more in (["data.validation=0.1"], ["data.validation=0.2"])
    ]
    assert ids[0] != ids[1] != settings.identity()
