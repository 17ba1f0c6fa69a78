"""What readers make of damaged bytes, drawn by Hypothesis: what was written, or nothing, and no other error."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.faults import mutations
from benchmarks.faults.scenarios import write_features
from fcl_bench.backbones import extract
from fcl_bench.data.sources.array_files import FeatureFile
from fcl_bench.engine.checkpoint import GROWING, Checkpoint
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import RunFolder
from tests.small_runs import run_in

#: The folder is shared by the examples, each of which writes its own file anew.
shared_folder = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 2**32)


def of(*kinds: dict[str, mutations.Mutation]) -> st.SearchStrategy[mutations.Mutation]:
    return st.sampled_from([mutation for found in (mutations.BYTES, *kinds) for mutation in found.values()])


@shared_folder
@given(mutation=of(mutations.NPZ), seed=SEEDS)
def test_features_are_refused_or_are_numbers(tmp_path, mutation, seed):
    path = write_features(tmp_path / "features.npz")
    path.write_bytes(mutation(path.read_bytes(), random.Random(seed)))
    try:
        dataset = FeatureFile(name="features", path=str(path)).load()
    except UserError:
        return
    for split in (dataset.train, dataset.test):
        assert np.isfinite(split.inputs).all()
        assert len(split.labels) == len(split.inputs)
        assert (split.labels >= 0).all()


@shared_folder
@given(mutation=of(mutations.SAFETENSORS), seed=SEEDS)
def test_cached_features_are_what_was_written_or_none(tmp_path, mutation, seed):
    path, features, key = tmp_path / "x.safetensors", torch.arange(24.0).reshape(6, 4), {"of": "this test"}
    extract._save(path, features, 1.5, key)
    path.write_bytes(mutation(path.read_bytes(), random.Random(seed)))
    found = extract._load(path, key)
    assert found is None or torch.equal(found[0], features)


@pytest.mark.slow
@shared_folder
@given(file=st.sampled_from(["state.json", "tensors-1.safetensors", "rows-x-1.bin"]), data=st.data(), seed=SEEDS)
def test_a_checkpoint_is_what_was_saved_or_none(tmp_path, file, data, seed):
    checkpoint = Checkpoint(tmp_path / "checkpoint", schema=1, owner="me")
    checkpoint.remove()
    saved = {"w": torch.arange(6.0), f"{GROWING}x": torch.arange(8).reshape(4, 2)}
    checkpoint.save({"tasks_done": 2, "more": [1, {"a": None}]}, saved)
    path = tmp_path / "checkpoint" / file
    kinds = {"state.json": [mutations.JSON], "tensors-1.safetensors": [mutations.SAFETENSORS]}.get(file, [])
    path.write_bytes(data.draw(of(*kinds))(path.read_bytes(), random.Random(seed)))
    found = Checkpoint(tmp_path / "checkpoint", schema=1, owner="me").load()
    if found is not None:
        assert (found[0]["tasks_done"], found[0]["more"]) == (2, [1, {"a": None}])
        assert found[1].keys() == saved.keys()
        assert all(torch.equal(value, saved[name]) for name, value in found[1].items())


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fcl_bench.execution.run.drawn", lambda *_: {})
        return run_in(tmp_path_factory.mktemp("complete"), "method=afl", "tasks=2", "clients=2")


@shared_folder
@given(mutation=of(mutations.JSON, mutations.SEALED), seed=SEEDS)
def test_a_record_is_what_was_written_or_none(complete, mutation, seed):
    path = complete.folder / "run.json"
    content = path.read_bytes()
    try:
        path.write_bytes(mutation(content, random.Random(seed)))
        found = RunFolder(complete.folder).complete_record()
    finally:
        path.write_bytes(content)
    sealed = mutation in mutations.SEALED.values()
    assert found is None or sealed or found == complete.record
