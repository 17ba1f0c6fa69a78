"""Whole runs with noise: what they record, that they resume, what is refused, and what stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from fcl_bench.errors import UserError
from fcl_bench.execution.plan import make_plan
from fcl_bench.execution.screen import print_record
from fcl_bench.options.noise.gaussian import multiplier_for
from fcl_bench.results.collect import collect
from tests.small_runs import interrupted_in, run_in, settings_for

pytest.importorskip("dp_accounting", reason="pip install '.[privacy]'")

SMALL = ("data=digits", "tasks=2", "clients=3", "beta=1")
STSA = ("method=stsa", "method.M=null", "method.gamma=1", *SMALL)
NOISE = ("noise=gaussian", "noise.epsilon=4")
SHARED = (*NOISE, "noise.share_of=3", "secure=sums")
ON_FEATURES = (
    "method=fedavg",
    "method.trains=features",
    "method.training.rounds=3",
    "method.training.epochs=1",
    *SMALL,
)


def W_of(outcome) -> np.ndarray:
    return load_file(outcome.folder / "model.safetensors")["W"].numpy()


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    out = tmp_path_factory.mktemp("noisy")
    return out, run_in(out, *STSA, *NOISE)


def test_the_record_says_what_is_promised(noisy, capsys):
    out, outcome = noisy
    assert outcome.record["noise"] == "gaussian"
    found = outcome.record["privacy"]["guarantee"]
    assert found["epsilon"] == pytest.approx(4, rel=1e-6)
    assert {key: found[key] for key in ("delta", "unit", "clip", "releases", "of_sums")} == {
        "delta": 1e-5,
        "unit": "sample",
        "clip": 1.0,
        "releases": 1,
        "of_sums": False,
    }
    assert found["multiplier"] == pytest.approx(multiplier_for(4.0, 1e-5, 1))
    assert found["accountant"].startswith("dp-accounting 0.")
    print_record(outcome.record, "x")
    assert "Noise: each client's uploads: (4, 1e-05)-private per sample" in capsys.readouterr().out
    frame = collect(out / "runs")
    assert frame["epsilon"].iloc[0] == pytest.approx(4, rel=1e-6)
    assert (frame["noise"].iloc[0], frame["noise.epsilon"].iloc[0]) == ("gaussian", 4.0)
    assert load_file(outcome.folder / "model.safetensors")["clip"].item() == 1.0


@pytest.mark.slow
def test_an_interrupted_run_has_the_same_noise(noisy, tmp_path, monkeypatch):
    _, whole = noisy
    for method in (STSA, ("method=fedlda", *SMALL)):
        first = whole if method is STSA else run_in(tmp_path / "whole", *method, *NOISE)
        with interrupted_in(1, monkeypatch):
            run_in(tmp_path, *method, *NOISE)
        resumed = run_in(tmp_path, *method, *NOISE)
        assert resumed.record["run_id"] == first.record["run_id"]
        assert np.array_equal(W_of(resumed), W_of(first))
        assert resumed.record["metrics"] == first.record["metrics"]
        assert resumed.record["privacy"] == first.record["privacy"]


def test_another_seed_has_other_noise_and_another_epsilon_another_run(noisy):
    settings = [
        settings_for("x", *STSA, *more) for more in (NOISE, (*NOISE, "seed=1"), (*NOISE[:1], "noise.epsilon=3"))
    ]
    assert len({make_plan(one).id for one in settings}) == 3


@pytest.mark.slow_cases(
    "ranpac-wire.dtype=bfloat16", "ranpac-wire.dtype=float64", "stsa-wire.columns=held", "stsa-wire.dtype=bfloat16"
)
@pytest.mark.slow_cases(
    "afl-wire.columns=held",
    "afl-wire.dtype=bfloat16",
    "afl-wire.dtype=float64",
    "fedlda-wire.columns=held",
    "fedlda-wire.dtype=bfloat16",
    "fedlda-wire.dtype=float64",
    "fedncm-wire.columns=held",
    "fedncm-wire.dtype=bfloat16",
    "fedncm-wire.dtype=float64",
)
@pytest.mark.parametrize("wire", ["wire.dtype=float64", "wire.gram=packed", "wire.columns=held", "wire.dtype=bfloat16"])
@pytest.mark.parametrize("method", ["stsa", "afl", "fedncm", "fedlda", "ranpac"])
def test_every_method_and_wire_admits_what_its_clients_send(tmp_path, method, wire):
    more = ("method.upload=sums",) if method == "afl" else ("method.M=20",)
    record = run_in(tmp_path, f"method={method}", *more, *SMALL, wire, "noise=gaussian", "noise.epsilon=0.5").record
    assert record["dropped"] == {"uploads": 0, "clients": []}
    assert record["privacy"]["guarantee"]["epsilon"] == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("method", [STSA, ("method=afl", "method.upload=sums", *SMALL), ("method=fedlda", *SMALL)])
def test_a_clip_that_nothing_reaches_and_no_noise_change_nothing(tmp_path, method):
    plain = run_in(tmp_path, *method)
    clipped = run_in(tmp_path, *method, "noise=gaussian", "noise.multiplier=0", "noise.clip=1e6")
    assert np.array_equal(W_of(clipped), W_of(plain))
    assert clipped.record["metrics"] == plain.record["metrics"]
    assert clipped.record["privacy"]["guarantee"]["epsilon"] is None
    assert clipped.record["privacy"]["guarantee"]["accountant"] is None
    assert plain.record["privacy"]["guarantee"] is None
    assert plain.record["noise"] == "none"


@pytest.mark.slow
def test_no_noise_at_all_is_clipping_alone_and_ever_less_comes_to_it(tmp_path):
    clipped = W_of(run_in(tmp_path, *STSA, "noise=gaussian", "noise.multiplier=0"))
    apart = []
    for multiplier in (1e-2, 1e-4, 1e-8):
        W = W_of(run_in(tmp_path, *STSA, "wire.dtype=float64", "noise=gaussian", f"noise.multiplier={multiplier}"))
        apart.append(np.abs(W - clipped).max() / np.abs(clipped).max())
    assert apart[0] > apart[1] > apart[2]
    # The clipped run's wire was float32.
    assert apart[2] < 1e-5


@pytest.mark.slow
def test_afl_s_sums_are_its_solutions(tmp_path):
    for more in ((), ("method.M=30", "method.ridge=auto"), ("method.ridge=gcv",)):
        ours, plain = (
            W_of(run_in(tmp_path, "method=afl", f"method.upload={upload}", *more, *SMALL, "wire.dtype=float64"))
            for upload in ("sums", "solution")
        )
        assert np.abs(ours - plain).max() < 1e-9 * np.abs(plain).max()


@pytest.mark.slow
def test_model_updates_are_private_per_client(tmp_path):
    knobs = ("noise=gaussian", "noise.unit=client", "noise.epsilon=20", "noise.clip=0.5")
    found = run_in(tmp_path, *ON_FEATURES, *knobs).record["privacy"]["guarantee"]
    assert (found["unit"], found["releases"]) == ("client", 6)
    assert found["epsilon"] == pytest.approx(20, rel=1e-6)
    assert found["multiplier"] == pytest.approx(multiplier_for(20.0, 1e-5, 6))
    part = (*ON_FEATURES, "clients=8", "method.training.fraction=0.5", *knobs)
    seen = run_in(tmp_path, *part).record["privacy"]["guarantee"]
    assert seen["releases"] < 6
    assert seen["epsilon"] < 20


@pytest.mark.slow_cases("afl")
@pytest.mark.parametrize("method", ["afl", "fedlda"])
def test_a_tree_of_noisy_statistics_is_the_noisy_run(tmp_path, method):
    """Combined on their way, uploads still count one by one in the noise that the solve allows for."""
    more = ("method.upload=sums",) if method == "afl" else ()
    run = (f"method={method}", *more, *SMALL, "clients=5", "wire.dtype=float64", "noise=gaussian", "noise.epsilon=4")
    plain, tree = (W_of(run_in(tmp_path, *run, *how)) for how in ((), ("transport=tree", "transport.fan_in=2")))
    assert np.abs(tree - plain).max() < 1e-9 * np.abs(plain).max()


@pytest.mark.slow_cases("samples")
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_secure_sums_of_noisy_updates_are_the_noisy_run(tmp_path, weighting):
    pytest.importorskip("cryptography", reason="pip install '.[secure]'")
    knobs = ("noise=gaussian", "noise.unit=client", "noise.multiplier=0.01", "noise.clip=0.5", "wire.dtype=float64")
    run = (*ON_FEATURES, f"method.training.weighting={weighting}", *knobs)
    plain, summed = (W_of(run_in(tmp_path, *run, f"secure={secure}")) for secure in ("none", "sums"))
    assert np.abs(summed - plain).max() < 1e-5 * np.abs(plain).max()


@pytest.mark.slow_cases("afl", "fedncm", "ranpac", "stsa")
@pytest.mark.parametrize("method", ["stsa", "afl", "fedncm", "fedlda", "ranpac"])
def test_secure_sums_of_noisy_statistics_are_the_noisy_run(tmp_path, method):
    pytest.importorskip("cryptography", reason="pip install '.[secure]'")
    more = ("method.upload=sums",) if method == "afl" else ("method.M=20",)
    run = (f"method={method}", *more, *SMALL, "wire.dtype=float64", "noise=gaussian", "noise.epsilon=4")
    plain, summed = (run_in(tmp_path, *run, f"secure={secure}") for secure in ("none", "sums"))
    assert np.abs(W_of(summed) - W_of(plain)).max() < 1e-5 * np.abs(W_of(plain)).max()
    assert summed.record["privacy"]["guarantee"] == plain.record["privacy"]["guarantee"]


def test_shares_of_the_noise_go_with_models_of_equal_weight(tmp_path):
    run = (*ON_FEATURES, *SHARED, "noise.unit=client")
    with pytest.raises(UserError, match="weighting=samples: with noise.share_of=3"):
        run_in(tmp_path, *run)
    assert not list(tmp_path.glob("runs/*/*"))
    found = run_in(tmp_path, *run, "method.training.weighting=uniform", "beta=100").record["privacy"]["guarantee"]
    assert found["epsilon"] == pytest.approx(4, rel=1e-6)


@pytest.mark.parametrize("method", [STSA, ("method=fedlda", *SMALL), ("method=fedncm", *SMALL)])
def test_shares_of_the_noise_make_the_noise_of_the_sum(tmp_path, method):
    pytest.importorskip("cryptography", reason="pip install '.[secure]'")
    run = (*method, "clients=3", *NOISE, "secure=sums", "beta=100")
    found = run_in(tmp_path, *run, "noise.share_of=3").record
    assert found["privacy"]["guarantee"]["epsilon"] == pytest.approx(4, rel=1e-6)
    assert found["privacy"]["guarantee"]["of_sums"]
    # Where fewer take part than the noise is shared among, the record has what that comes to.
    assert run_in(tmp_path, *run, "noise.share_of=12").record["privacy"]["guarantee"]["epsilon"] > 8


@pytest.mark.slow
def test_updates_that_are_clipped_by_nothing_are_the_plain_run(tmp_path):
    """The update is added to the model that it came from: the last bit may differ."""
    plain = W_of(run_in(tmp_path, *ON_FEATURES))
    clipped = ("noise=gaussian", "noise.unit=client", "noise.multiplier=0", "noise.clip=1e6")
    assert np.allclose(W_of(run_in(tmp_path, *ON_FEATURES, *clipped)), plain, atol=1e-6)
    tight = W_of(run_in(tmp_path, *ON_FEATURES, *clipped[:-1], "noise.clip=1e-3"))
    assert not np.allclose(tight, plain, atol=1e-3)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("noise=gaussian",), "neither noise.epsilon nor noise.multiplier"),
        (
            ("noise=gaussian", "noise.epsilon=1", "noise.multiplier=1"),
            "both noise.epsilon=1.0 and noise.multiplier=1.0",
        ),
        ((*NOISE, "noise.clip=inf"), "noise.clip=inf"),
        ((*NOISE, "noise.clip=0"), "noise.clip=0"),
        ((*NOISE, "noise.delta=1"), "noise.delta=1"),
        ((*NOISE, "noise.epsilon=-1"), "noise.epsilon=-1"),
        ((*NOISE, "noise.share_of=0"), "noise.share_of=0"),
        ((*NOISE, "noise.unit=client"), "noise.unit=client: method=stsa sends statistics"),
        ((*NOISE, "wire.dtype=float16", "wire.gram=packed"), "wire.dtype=float16 wire.gram=packed"),
        ((*NOISE, "noise.share_of=3"), "noise.share_of=3: the server would see every upload"),
        ((*SHARED, "faults=random"), "faults=random: with noise.share_of=3"),
        ((*SHARED, "secure.fraction_bits=0"), "secure.fraction_bits=0 rounds it to multiples of 1"),
        ((*NOISE, "adapt=fedavg", "backbone=tiny"), "adapt=fedavg: the first stage sends models without noise"),
    ],
)
def test_what_can_t_be_promised_is_refused_in_one_line(tmp_path, overrides, said):
    with pytest.raises(UserError) as refused:
        run_in(tmp_path, *STSA, *overrides)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("runs/*/*"))


def test_rounds_that_may_lose_clients_are_refused_where_each_has_a_part_of_the_noise(tmp_path):
    partial = ("transport=flower", "transport.minimum=0.5")
    with pytest.raises(UserError, match="noise.share_of=3 with transport=flower"):
        make_plan(settings_for(tmp_path, *STSA, *SHARED, *partial))
    make_plan(settings_for(tmp_path, *STSA, *NOISE, *partial))


@pytest.mark.slow_cases("centralised_ridge")
@pytest.mark.parametrize(
    "method",
    ["afl", "afcl", "air", "ds_al", "fedran", "stsa_e", "centred_sketch", "centralised_ridge", "fedklda", "fedfecam"],
)
def test_methods_whose_uploads_nobody_bounded_are_refused(tmp_path, method):
    with pytest.raises(UserError, match=f"one sample changes of method={method}'s uploads") as refused:
        run_in(tmp_path, f"method={method}", *SMALL, *NOISE)
    assert "docs/explanation/noise.md" in str(refused.value)


def test_batch_norm_and_wrong_units_are_refused_of_models(tmp_path):
    images = ("method=fedavg", "backbone=tiny", "backbone.width=4", "data=digits", "tasks=2")
    with pytest.raises(UserError, match="noise.unit=sample: method=fedavg sends model updates"):
        run_in(tmp_path, *images, *NOISE)
    with pytest.raises(UserError, match="batch norm"):
        run_in(tmp_path, *images, "backbone.architecture=conv", *NOISE, "noise.unit=client")
    with pytest.raises(UserError, match="method=fot"):
        run_in(tmp_path, "method=fot", *images[1:], *NOISE, "noise.unit=client")


def test_noise_is_part_of_a_runs_identity(tmp_path):
    assert settings_for(tmp_path, *STSA).identity()["noise"] == {"choice": "none"}
    assert settings_for(tmp_path, *STSA, *NOISE).identity()["noise"]["choice"] == "gaussian"
