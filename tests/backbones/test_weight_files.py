"""Local weights: a wrong or damaged file is named, torchvision's files are understood, a hash tells what was loaded."""

from __future__ import annotations

import pytest
import timm
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fcl_bench.backbones.backbone import weights_hash
from fcl_bench.backbones.timm_backbone import Timm
from fcl_bench.backbones.timm_weights import load_weights, read_checkpoint, timm_network
from fcl_bench.errors import UserError
from tests.backbones.test_backbones import CPU, NAME, images
from tests.small_runs import run_in


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(NAME, num_classes=0)


def as_int8(state):
    return {name: (100 * value).to(torch.int8) for name, value in state.items()}


def with_nan(state):
    changed = {name: value.clone() for name, value in state.items()}
    changed["bn1.weight"][3] = float("nan")
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (as_int8, r"has type int8, test_resnet needs float32"),
        (with_nan, r"bn1\.weight holds NaN or infinity"),
        (lambda state: {name: value.to("meta") for name, value in state.items()}, "shapes but no values"),
        (lambda state: {"net": state}, "holds no state dict"),
        (lambda state: {1: state["bn1.weight"]}, "cannot be loaded"),
        (lambda state: {}, "lacks bn1.bias .* for test_resnet"),
    ],
)
def test_weights_of_no_use_are_told_with_the_file(tmp_path, network, change, message):
    file = tmp_path / "weights.pth"
    torch.save(change(network.state_dict()), file)
    with pytest.raises(UserError, match=rf"backbone\.checkpoint={file}.*{message}"):
        Timm(NAME, checkpoint=str(file)).open(images(), CPU)


def test_a_folder_is_no_checkpoint(tmp_path):
    (tmp_path / "weights.pth").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        Timm(NAME, checkpoint=str(tmp_path / "weights.pth"))


SMALL = {"a.weight": torch.arange(40, dtype=torch.float32).reshape(8, 5), "a.bias": torch.ones(8)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, bytes]:
    """The same weights in every kind of file."""
    folder = tmp_path_factory.mktemp("saved")
    torch.save(SMALL, folder / "zip.pth")
    torch.save(SMALL, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    save_file(SMALL, folder / "plain.safetensors")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(["zip.pth", "legacy.pth", "plain.safetensors"]), kept=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_off_anywhere_is_named(saved, tmp_path_factory, kind, kept):
    file = tmp_path_factory.mktemp("cut") / kind
    file.write_bytes(saved[kind][: int(kept * len(saved[kind]))])
    with pytest.raises(UserError, match=rf"backbone\.checkpoint={file} cannot be loaded"):
        read_checkpoint(str(file))


@settings(max_examples=100, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(place=0.84375, bit=4)  # marks a tensor of the archive as a folder
def test_one_wrong_bit_in_what_torch_saved_is_named_or_changes_nothing(saved, tmp_path_factory, place, bit):
    content = bytearray(saved["zip.pth"])
    content[int(place * len(content))] ^= 1 << bit
    file = tmp_path_factory.mktemp("flipped") / "weights.pth"
    file.write_bytes(content)
    told, state = "", SMALL
    try:
        state = read_checkpoint(str(file))
    except UserError as error:
        told = str(error)
    assert told == "" or told.startswith(f"backbone.checkpoint={file} ")
    assert state.keys() == SMALL.keys()
    assert all(torch.equal(state[name], SMALL[name]) for name in SMALL)


def test_a_file_without_counts_of_batches_is_the_same_network(tmp_path, network):
    """Files saved before torch counted batches have none, torchvision's older ones among them."""
    state = {name: value for name, value in network.state_dict().items() if "num_batches" not in name}
    assert len(state) < len(network.state_dict())
    torch.save(state, tmp_path / "old.pth")
    identity = Timm(NAME, checkpoint=str(tmp_path / "old.pth")).open(images(), CPU).identity
    assert identity["weights"] == weights_hash(network)


SMALL_RUN = ("data=digits", "tasks=2", "clients=2", "beta=1")
TRAINED = (
    *SMALL_RUN,
    "method=fedavg",
    *("backbone=timm", f"backbone.name={NAME}", "backbone.pretrained=false", "backbone.transform.size=16"),
    *("method.training.rounds=1", "method.training.epochs=1", "method.training.batch_size=256"),
)


@pytest.mark.slow
def test_the_network_that_a_run_trained_is_a_checkpoint(tmp_path):
    """Its batch norms too; the classifier of the run's classes stays behind, and a checkpoint is where a run starts."""
    saved = run_in(tmp_path, *TRAINED).folder / "model.safetensors"
    state = load_file(saved)
    assert {"W", "bias", "class_order"} <= state.keys()
    ours = Timm(NAME, checkpoint=str(saved))._network(7)
    assert any("running_mean" in name for name in ours.state_dict())
    for name, value in ours.state_dict().items():
        assert name.endswith("num_batches_tracked") or torch.equal(value, state[f"body.{name}"])
    begun = run_in(tmp_path, *TRAINED, "backbone.pretrained=true", f"backbone.checkpoint={saved}")
    assert begun.record["features"]["weights"] == weights_hash(ours)


def test_a_run_whose_network_is_another_or_none_is_told(tmp_path, network):
    of_run = {"W": torch.zeros(4, 2), "bias": torch.zeros(2), "class_order": torch.arange(2)}
    body = {f"body.{name}": value for name, value in network.state_dict().items()}
    file = tmp_path / "model.safetensors"
    for change, message in (
        ({}, r"is the model of a run that trained no network \(the model\.safetensors of a run that trains images"),
        ({**body, "body.more": torch.ones(1)}, "has the unexpected more"),
        ({**body, "body.bn1.weight": torch.ones(3)}, r"bn1\.weight has shape \(3,\), test_resnet needs"),
        ({name: value for name, value in body.items() if name != "body.bn1.bias"}, r"lacks bn1\.bias"),
    ):
        save_file({**of_run, **change}, file)
        with pytest.raises(UserError, match=rf"backbone\.checkpoint={file}.*{message}"):
            Timm(NAME, checkpoint=str(file)).open(images(), CPU)


class SmallVGG(torch.nn.Module):
    """timm's naming: fully connected layers are convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_cfg = {"classifier": "head.fc"}
        self.features = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.pre_logits = torch.nn.Module()
        self.pre_logits.fc1 = torch.nn.Conv2d(4, 6, 7)
        self.pre_logits.fc2 = torch.nn.Conv2d(6, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pre_logits.fc2(self.pre_logits.fc1(self.features(x)).relu()).relu().flatten(1)


def test_torchvisions_fully_connected_layers_are_timms_convolutions():
    torch.manual_seed(0)
    features = torch.nn.Conv2d(3, 4, 3, padding=1)
    layers = [torch.nn.Linear(4 * 49, 6), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(6, 5)]
    theirs = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(5, 2)).eval()
    state = {f"features.{name}": value for name, value in features.state_dict().items()}
    state |= {f"classifier.{name}": value for name, value in theirs.state_dict().items()}
    ours = SmallVGG()
    load_weights(ours, state, "small", "FILE")
    x = torch.randn(2, 3, 7, 7)
    torch.testing.assert_close(ours(x), theirs[:6](features(x).flatten(1)))
    with pytest.raises(UserError, match=r"FILE: pre_logits\.fc1\.weight has shape \(6, 49\), small needs"):
        load_weights(ours, {**state, "classifier.0.weight": torch.zeros(6, 49)}, "small", "FILE")


@pytest.mark.slow
def test_torchvisions_vgg11_gives_the_features_that_its_classifier_sees(tmp_path):
    """129 million parameters: half a gigabyte on disk."""
    from torchvision.models import vgg11

    torch.manual_seed(0)
    theirs = vgg11().eval()
    torch.save(theirs.state_dict(), tmp_path / "vgg11.pth")
    ours = timm_network("vgg11.tv_in1k", {}, pretrained=False).eval()
    load_weights(ours, read_checkpoint(str(tmp_path / "vgg11.pth")), "vgg11", "FILE")
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        features = ours(x)
        torch.testing.assert_close(theirs.classifier[6](features), theirs(x), rtol=1e-4, atol=1e-5)
    assert features.shape == (1, 4096)
