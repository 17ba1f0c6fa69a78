"""Backbones: pixels, identity, and timm networks from local checkpoints."""

from __future__ import annotations

import pickle
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fcl_bench.backbones.backbone import Extractor, Identity, Pixels, weights_hash
from fcl_bench.backbones.extract import FeatureCache, extract_features
from fcl_bench.backbones.timm_backbone import Timm, Transform
from fcl_bench.data.images.stored import ArrayImages, Images
from fcl_bench.data.sources.base import Dataset, Split, image_split
from fcl_bench.data.sources.digits import Digits
from fcl_bench.data.sources.hub_images import HubImages
from fcl_bench.data.sources.image_source import OpenImages
from fcl_bench.errors import UserError
from tests.conftest import shared

CPU = torch.device("cpu")
NAME = "test_resnet"  # timm's own network for tests


def images(count: int = 10, size: int = 40, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    sides = (rng.integers(0, 256, (n, size, size, 3), dtype=np.uint8) for n in (count, 4))
    return Dataset("made", *(image_split(np.arange(len(side)) % 2, ArrayImages(side)) for side in sides))


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    import timm

    torch.manual_seed(0)
    return timm.create_model(NAME).state_dict()


@pytest.fixture
def checkpoint(tmp_path, weights):
    path = tmp_path / "weights.safetensors"
    save_file(weights, path)
    return path


def features_of(backbone, dataset) -> torch.Tensor:
    return torch.cat(list(backbone.open(dataset, CPU).batches(dataset.train)))


def test_pixels_are_the_scaled_image():
    data = Digits().load()
    features = features_of(Pixels(), data)
    assert features.shape == (len(data.train), 64)
    np.testing.assert_allclose(features[3].numpy(), np.asarray(data.train.inputs[3]).ravel() / 255, rtol=1e-6)
    assert float(features.min()) == 0
    assert float(features.max()) == 1


@pytest.mark.parametrize("colours", [(), (3,)])
@pytest.mark.parametrize("start", [0, 1024, 1030])
def test_pixels_of_an_array_are_those_of_images_opened_one_by_one(colours, start):
    array = ArrayImages(np.random.default_rng(0).integers(0, 256, (1100, 3, 2, *colours), dtype=np.uint8))
    opened = OpenImages([array[index] for index in range(len(array))])
    at_once, one_by_one = (
        list(Pixels().open(Dataset("mine", side, side), CPU).batches(side, start))
        for side in (image_split(np.zeros(len(array)), images) for images in (array, opened))
    )
    assert [len(rows) for rows in at_once] == [len(rows) for rows in one_by_one]
    assert torch.equal(torch.cat(at_once), torch.cat(one_by_one))


def test_pixels_of_different_sizes_ask_for_a_size(tmp_path):
    small, large = (np.zeros((1, side, side), dtype=np.uint8) for side in (8, 9))

    class Mixed(Images):
        fingerprint = "mixed"

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return Image.fromarray((small if index == 0 else large)[0])

        def describe(self, index):
            return f"image {index}"

    split = image_split([0, 1], Mixed())
    data = Dataset("mixed", split, split)
    with pytest.raises(UserError, match=r"backbone\.size=32"):
        features_of(Pixels(), data)
    assert features_of(Pixels(size=4), data).shape == (2, 48)


def test_train_and_test_of_different_widths_are_told():
    colour, grey = images(), Digits().load()
    mixed = Dataset("mixed", colour.train, grey.test)
    with pytest.raises(UserError, match=r"4800 features for train and 64 for test .*backbone\.size=32"):
        extract_features("pixels", Pixels().open(mixed, CPU), mixed, None)


def test_a_network_says_its_dimension_and_what_size_it_takes(checkpoint, tmp_path):
    import timm

    data = images()
    extractor = Timm(NAME, checkpoint=str(checkpoint)).open(data, CPU)
    assert extractor.dimension(data.train) == next(extractor.batches(data.train)).shape[1]
    save_file(timm.create_model("vit_tiny_patch16_224").state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(UserError, match="vit_tiny_patch16_224 does not take images of .*32, 32"):
        Timm("vit_tiny_patch16_224", checkpoint=str(tmp_path / "vit.safetensors"), transform=Transform(size=32)).open(
            data, CPU
        )
    with pytest.raises(UserError, match="model_args=.*failed"):
        Timm(NAME, checkpoint=str(checkpoint), model_args={"act_layer": "bogus"}).open(data, CPU)


def test_backbones_refuse_the_wrong_kind_of_data():
    ready = Split(np.zeros(3, dtype=np.int64), np.zeros((3, 2)), "x")
    with pytest.raises(UserError, match="backbone=identity"):
        Pixels().open(Dataset("features", ready, ready), CPU)
    with pytest.raises(UserError, match="needs ready features"):
        Identity().open(Digits().load(), CPU)


def test_a_checkpoint_in_either_format_gives_the_same_features_and_hash(tmp_path, weights, checkpoint):
    torch.save({"state_dict": weights}, tmp_path / "weights.pth")
    data = images()
    opened = [
        Timm(NAME, checkpoint=str(tmp_path / name)).open(data, CPU) for name in ("weights.safetensors", "weights.pth")
    ]
    assert opened[0].identity == opened[1].identity
    first, second = (torch.cat(list(extractor.batches(data.train))) for extractor in opened)
    assert torch.equal(first, second)
    assert first.shape[0] == 10


def test_features_are_what_the_classifier_would_see(weights, checkpoint):
    """timm's own preprocessing and pooled features, straight from its documentation."""
    import timm
    from timm.data import create_transform, resolve_model_data_config

    data = images()
    model = timm.create_model(NAME).eval()
    model.load_state_dict(weights)
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    with torch.inference_mode():
        pixels = torch.stack([transform(data.train.inputs[i]) for i in range(10)])
        expected = model.forward_head(model.forward_features(pixels), pre_logits=True)
    torch.testing.assert_close(
        features_of(Timm(NAME, checkpoint=str(checkpoint)), data), expected, rtol=1e-4, atol=1e-5
    )


def test_extraction_can_start_at_any_sample(checkpoint):
    data = images()
    extractor = Timm(NAME, checkpoint=str(checkpoint)).open(data, CPU)
    extractor.batch = 2
    whole, rest = (torch.cat(list(extractor.batches(data.train, start))) for start in (0, 4))
    assert torch.equal(whole[4:], rest)


@pytest.mark.slow_cases("change0")
@pytest.mark.parametrize(
    "change",
    [
        {"precision": "bfloat16"},
        {"transform": Transform(size=64)},
        {"transform": Transform(mean=[0.3], std=[0.2])},
        {"transform": Transform(interpolation="bilinear", crop_pct=0.5)},
    ],
)
def test_the_identity_holds_all_that_determines_features(checkpoint, change):
    data = images()
    plain = Timm(NAME, checkpoint=str(checkpoint))
    changed = Timm(NAME, checkpoint=str(checkpoint), **change)
    assert plain.open(data, CPU).identity != changed.open(data, CPU).identity
    assert not torch.equal(features_of(plain, data), features_of(changed, data))


def test_one_changed_weight_changes_the_hash(weights):
    import timm

    model = timm.create_model(NAME)
    model.load_state_dict(weights)
    before = weights_hash(model)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3
    assert weights_hash(model) != before


class Exploit:
    def __reduce__(self):
        return (print, ("code in a checkpoint ran",))


@pytest.mark.parametrize("content", ["text", "pickle", "empty", "list", "truncated"])
def test_damaged_and_dangerous_checkpoints_are_named_and_not_run(tmp_path, weights, content, capsys):
    path = tmp_path / "weights.pth"
    if content == "list":
        torch.save([1, 2], path)
    elif content == "truncated":
        torch.save(weights, path)
        path.write_bytes(path.read_bytes()[:-1000])
    else:
        path.write_bytes({"text": b"hello\n", "pickle": pickle.dumps(Exploit()), "empty": b""}[content])
    with pytest.raises(UserError, match=r"backbone\.checkpoint=.*weights\.pth"):
        Timm(NAME, checkpoint=str(path)).open(images(), CPU)
    assert "ran" not in capsys.readouterr().out


def test_weights_of_another_network_are_refused(tmp_path, weights, checkpoint):
    with pytest.raises(UserError, match="lacks .* such entries"):
        Timm("test_vit", checkpoint=str(checkpoint)).open(images(), CPU)
    first = "conv1.weight" if "conv1.weight" in weights else min(weights)
    save_file(
        {**weights, first: weights[first].repeat(2, *[1] * (weights[first].ndim - 1))}, tmp_path / "w.safetensors"
    )
    with pytest.raises(UserError, match=f"{first} has shape"):
        Timm(NAME, checkpoint=str(tmp_path / "w.safetensors")).open(images(), CPU)
    save_file({**weights, "extra.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="unexpected extra.weight"):
        Timm(NAME, checkpoint=str(tmp_path / "x.safetensors")).open(images(), CPU)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnt18.tv_in1k", "did you mean resnet18"),
        ("resnet18", "names no weights"),
        ("resnet18.tv_in2k", "did you mean resnet18.tv_in1k"),
    ],
)
def test_unknown_networks_and_weights_name_the_near_ones(name, message):
    with pytest.raises(UserError, match=message):
        Timm(name).open(images(), CPU)


def test_hub_weights_out_of_reach_say_what_to_do(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"could not be fetched .*backbone\.checkpoint=FILE"):
        Timm("test_resnet.r160_in1k").open(images(), CPU)


def test_features_that_are_not_finite_are_an_error(tmp_path, weights):
    broken = {name: tensor * 1e30 if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    save_file(broken, tmp_path / "large.safetensors")
    backbone, data = Timm(NAME, checkpoint=str(tmp_path / "large.safetensors")), images()
    with pytest.raises(UserError, match="not finite for train sample 0"):
        extract_features(NAME, backbone.open(data, CPU), data, None)


class Odd(Extractor):
    """Features of any shape, said to be of five numbers."""

    identity: ClassVar[dict[str, str]] = {"backbone": "odd"}
    cacheable = True

    def __init__(self, *shape):
        self.shape = shape

    def dimension(self, split):
        return 5

    def batches(self, split, start=0):
        yield torch.zeros(self.shape)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((4, 6), r"backbone=odd gave train features of the shape \(4, 6\) \(\(samples, 5\), as its dimension says\)"),
        ((4, 5, 2, 2), r"gave train features of the shape \(4, 5, 2, 2\) \("),
        ((20,), r"gave train features of the shape \(20,\) \("),
        ((3, 5), r"gave 3 rows for .* samples.* \(one for each\)"),
    ],
)
def test_a_backbone_that_gives_other_features_than_it_says_is_told(shape, told, cached, tmp_path):
    with pytest.raises(UserError, match=told):
        extract_features("odd", Odd(*shape), images(), FeatureCache(tmp_path / "cache") if cached else None)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_extraction_goes_through_the_cache(tmp_path, checkpoint):
    data = images()
    backbone = Timm(NAME, checkpoint=str(checkpoint))
    first, second = (
        extract_features(NAME, backbone.open(data, CPU), data, FeatureCache(tmp_path / "cache")) for _ in range(2)
    )
    assert (first.cache_hit, second.cache_hit) == (False, True)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.test, second.test)
    assert second.seconds == 0
    assert second.cost == first.seconds
    other = images(seed=1)
    assert not extract_features(NAME, backbone.open(other, CPU), other, FeatureCache(tmp_path / "cache")).cache_hit


@pytest.mark.slow
def test_mobilenet_on_real_images_agrees_with_the_recipe_of_its_weights():
    """../shared/weights says how timm loads them; here with torchvision's transforms, written out."""
    import timm
    from torchvision import transforms
    from torchvision.transforms import InterpolationMode

    path = shared("weights/mobilenetv2_100/model.safetensors")
    folder = shared("data/cifar100")
    data = HubImages("cifar100", "uoft-cs/cifar100", "local", "img", "fine_label", path=str(folder)).load()
    few = Split(data.test.labels[:12], data.test.inputs, data.test.fingerprint)
    backbone = Timm(
        "mobilenetv2_100",
        checkpoint=str(path),
        model_args={"pad_type": "same"},
        transform=Transform(224, 1.0, "bicubic", [0.5] * 3, [0.5] * 3),
    )
    ours = torch.cat(list(backbone.open(data, CPU).batches(few)))

    model = timm.create_model("mobilenetv2_100", pad_type="same")
    model.load_state_dict(load_file(path), strict=True)
    model.eval()
    recipe = transforms.Compose(
        [
            transforms.Resize((224, 224), interpolation=InterpolationMode.BICUBIC),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    with torch.inference_mode():
        pixels = torch.stack([recipe(data.test.inputs[i].convert("RGB")) for i in range(12)])
        expected = model.forward_head(model.forward_features(pixels), pre_logits=True)
    assert ours.shape == (12, 1280)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_cpu_and_gpu_features_agree(checkpoint):
    data = images()
    cpu = features_of(Timm(NAME, checkpoint=str(checkpoint), precision="float32"), data)
    gpu = Timm(NAME, checkpoint=str(checkpoint), precision="float32").open(data, torch.device("cuda"))
    torch.testing.assert_close(torch.cat(list(gpu.batches(data.train))), cpu, rtol=1e-3, atol=1e-3)
