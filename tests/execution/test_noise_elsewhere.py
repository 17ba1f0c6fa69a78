"""Noise where clients are in other processes, and where uploads are added up on their way to the server."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from fcl_bench.data.sources.array_files import SiteFile
from fcl_bench.flower.site import _key, _secret
from tests.flower import test_sites
from tests.flower.fake_superlink import FakeSuperLink, reached
from tests.small_runs import run_in, settings_for

pytest.importorskip("dp_accounting", reason="pip install '.[privacy]'")

SMALL = ("data=digits", "tasks=2", "clients=5", "beta=1", "logger=none")
NOISE = ("noise=gaussian", "noise.multiplier=0.05")
UPDATES = ("noise=gaussian", "noise.unit=client", "noise.multiplier=0.05")
TRAINED = ("method=fedavg", "method.trains=features", "method.training.rounds=2", "method.training.epochs=1")


def tensors(outcome) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in load_file(outcome.folder / "model.safetensors").items()}


@pytest.mark.parametrize("method", [("fedlda",), ("afl", "method.upload=sums")])
@pytest.mark.parametrize("way", [("transport=tree", "transport.fan_in=2"), ("secure=sums",)])
def test_sums_on_the_way_are_solved_with_the_noise_of_all_who_are_in_them(tmp_path, method, way):
    name, *more = method
    given = (*SMALL, f"method={name}", *more, "wire.dtype=float64", *NOISE)
    if way == ("secure=sums",):
        pytest.importorskip("cryptography")
    alone, summed = (tensors(run_in(tmp_path, *given, *own)) for own in ((), way))
    for key, tensor in alone.items():
        assert np.abs(summed[key] - tensor).max() <= 1e-5 * np.abs(tensor).max(), key


@pytest.mark.slow_cases("given0", "given1")
@pytest.mark.parametrize(
    "given",
    [
        (
            "method=stsa",
            "method.M=64",
            *NOISE,
            "faults=listed",
            "faults.late=[1@0]",
            "faults.silent=[2@1]",
            "predictions=true",
        ),
        (*TRAINED, *UPDATES, "faults=listed", "faults.silent=[2@1]", "evaluate_rounds=1"),
    ],
)
def test_the_noise_of_a_client_is_the_same_wherever_it_lives(tmp_path, monkeypatch, given):
    link = FakeSuperLink(tmp_path / "nodes")
    link.add_node(0, 3)
    link.add_node(1, 2, 4)
    one = run_in(tmp_path / "here", *SMALL, *given)
    with reached(link, monkeypatch):
        many = run_in(tmp_path / "there", *SMALL, *given, "transport=flower")
    names = {path.name for path in one.folder.iterdir()}
    assert names == {path.name for path in many.folder.iterdir()}
    for name in {name for name in names if name.endswith((".npz", ".safetensors"))}:
        assert (many.folder / name).read_bytes() == (one.folder / name).read_bytes(), name
    for part in ("run_id", "metrics", "communication", "privacy", "absences"):
        assert many.record[part] == one.record[part], part


@pytest.mark.slow
def test_the_noise_of_a_site_comes_from_a_secret_of_its_own(tmp_path, monkeypatch):
    whole = test_sites.divided(tmp_path)
    link = FakeSuperLink(tmp_path / "nodes")
    test_sites.add_nodes(link, tmp_path)
    given = (*test_sites.GIVEN, "method.upload=sums", "noise=gaussian", "noise.multiplier=0.5")
    sites = (*given, *test_sites.SITES, f"data.path={tmp_path / 'test.npz'}")
    known = run_in(tmp_path / "known", *given, *whole)
    with reached(link, monkeypatch):
        ours = run_in(tmp_path / "first", *sites)
        again = run_in(tmp_path / "again", *sites)
    assert tensors(again)["W"].tobytes() == tensors(ours)["W"].tobytes()
    assert not np.allclose(tensors(ours)["W"], tensors(known)["W"])
    guarantees = [outcome.record["privacy"]["guarantee"] for outcome in (ours, known)]
    assert [own.pop("against_server") for own in guarantees] == [True, False]
    assert [own.pop("generator").split()[0] for own in guarantees] == ["discrete", "simulated:"]
    assert guarantees[0] == guarantees[1]
    # Neither which samples are alone in a sum, nor a hash that tells whether a guess of all samples is right.
    assert known.record["privacy"]["one_sample_sums"] > 0
    assert ours.record["privacy"]["one_sample_sums"] == 0
    plain = SiteFile(path=str(tmp_path / "site-0.npz")).read().fingerprint
    assert plain not in [node["data"] for node in ours.record["transport"]["nodes"]]
    secrets = [path.read_bytes() for path in sorted((tmp_path / "nodes").glob("*/nodes/noise.secret"))]
    assert len(set(secrets)) == 3
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "nodes").glob("*/nodes/noise.secret")} == {0o600}
    # Two runs with the same noise would tell by their difference what is without it.
    settings, other = (settings_for(tmp_path / "known", *given, *whole, f"noise.clip={clip}") for clip in (1, 2))
    about = [{"id": run, "config": config} for run in ("one", "two") for config in ({}, {"x": 1})]
    keys = [_key(secrets[0], settings, run) for run in about]
    assert len({*keys, _key(secrets[0], other, {"id": "one"}), _key(secrets[1], settings, {"id": "one"})}) == 4
    assert {len(key) for key in keys} == {32}


def test_a_node_that_is_killed_while_it_makes_its_secret_makes_another(tmp_path, monkeypatch):
    """It left an empty file, which the next node refused; so did one that read the file before it was written."""
    settings = settings_for(tmp_path, *SMALL, *NOISE, "method=stsa", "method.M=8")

    def killed(count: int) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fcl_bench.flower.site.secrets.token_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            _secret(settings)
    assert _secret(settings) == _secret(settings)
    assert (tmp_path / "nodes" / "noise.secret").stat().st_mode & 0o777 == 0o600
