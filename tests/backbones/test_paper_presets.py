"""Backbones as the papers have them: the network, the images as their code shows them to it, the page that says so."""

from __future__ import annotations

import dataclasses
import re

import pytest
import timm
import torch
from timm.data import resolve_data_config
from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor
from torchvision.transforms import InterpolationMode as Mode

from fcl_bench.backbones.timm_backbone import Adapters, Timm, Transform
from fcl_bench.composition import config_dir
from tests.backbones.test_backbones import CPU, NAME, images
from tests.conftest import REPOSITORY, shared
from tests.test_configs import compose_settings

HALF = Normalize([0.5] * 3, [0.5] * 3)
IMAGENET = Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
VIT_21K = "vit_base_patch16_224.augreg_in21k"
# YAML: timm's name, d of that network as it is, and the transforms of the paper's public code for test images, in
# torchvision's words.
PRESETS = {
    "resnet18": ("resnet18.tv_in1k", 512, [Resize(256), CenterCrop(224), ToTensor(), IMAGENET]),
    "resnet18_32": ("resnet18.tv_in1k", 512, [Resize(32), ToTensor(), IMAGENET]),
    "resnet18_fedprotip": ("resnet18.tv_in1k", 512, [Resize(32), ToTensor(), IMAGENET]),
    "resnet18_afl": ("resnet18.tv_in1k", 512, [Resize(224), ToTensor(), HALF]),
    "vgg11": ("vgg11.tv_in1k", 4096, [Resize(256), CenterCrop(224), ToTensor(), IMAGENET]),
    "vgg11_afl": ("vgg11.tv_in1k", 4096, [Resize(224), ToTensor(), HALF]),
    "vit_b16": (VIT_21K, 768, [Resize(248, Mode.BICUBIC), CenterCrop(224), ToTensor(), HALF]),
    "vit_b16_afl": ("vit_base_patch16_224.augreg_in1k", 768, [Resize(224), ToTensor(), HALF]),
    "vit_b16_stsa": (VIT_21K, 768, [Resize(256, Mode.BICUBIC), CenterCrop(224), ToTensor()]),
    "vit_b16_fedprotip": (VIT_21K, 768, [Resize(224), ToTensor(), IMAGENET]),
}
PAGE = (REPOSITORY / "docs" / "reference" / "backbones.md").read_text()


def preset(choice: str) -> Timm:
    backbone = compose_settings(f"backbone={choice}").backbone
    assert isinstance(backbone, Timm)
    return backbone


@pytest.mark.slow_cases("vit_b16")
@pytest.mark.parametrize("choice", PRESETS)
def test_a_preset_names_the_papers_network(choice):
    assert preset(choice).name == PRESETS[choice][0]


@pytest.mark.parametrize(("name", "dimension"), sorted({known[:2] for known in PRESETS.values()}))
def test_a_papers_network_has_weights_at_the_hub_and_so_many_features(name, dimension):
    assert name in timm.list_pretrained()
    with torch.device("meta"):  # shapes alone: a VGG-11 has half a gigabyte of weights
        features = timm.create_model(name, num_classes=0)(torch.zeros(1, 3, 224, 224))
    assert features.shape == (1, dimension)


@pytest.mark.parametrize("choice", PRESETS)
@pytest.mark.parametrize("side", [32, 300])
def test_a_preset_shows_images_as_the_papers_code_does(choice, side):
    """A small network in the place of theirs: what it sees is what differs."""
    backbone, recipe = preset(choice), Compose(PRESETS[choice][2])
    config = backbone.transform.over(
        resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(backbone.name).to_dict())
    )
    knobs = {name: config[name] for name in ("crop_pct", "interpolation")}
    knobs |= {name: list(config[name]) for name in ("mean", "std")}
    transform = Transform(size=config["input_size"][-1], **knobs)
    data = images(count=2, size=side)
    small = Timm(NAME, pretrained=False, transform=transform)
    features = torch.cat(list(small.open(data, CPU).batches(data.train)))
    with torch.no_grad():
        expected = small.trainable(data, 0).build().eval()(torch.stack([recipe(data.train.inputs[i]) for i in (0, 1)]))
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_cases("resnet18_fedprotip_scratch")
@pytest.mark.parametrize("choice", ["resnet18_fedprotip", "resnet18_fedprotip_scratch"])
def test_fedprotips_resnet_has_a_small_stem_and_four_cells(choice):
    """4 x 4 at the end on CIFAR-100, averaged to 2 x 2: 2,048 features of 11,168,832 weights."""
    start = dataclasses.replace(preset(choice), pretrained=False).trainable(images(count=2, size=32), 0)
    body = start.build().eval()
    assert (start.size, start.dimension) == (32, 2048)
    assert body.conv1.weight.shape == (64, 3, 3, 3)
    assert sum(weight.numel() for weight in body.parameters()) == 11_168_832
    assert body.forward_features(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)


def test_stsas_vit_has_the_papers_adapters():
    """r and s of E.2; Eq. 63 has neither biases nor dropout, the public code's layers have both."""
    assert preset("vit_b16_adapters").adapters == Adapters(64, 0.1, bias=False)
    assert preset("vit_b16_stsa").adapters == Adapters(64, 0.1, bias=True, reads="stream", dropout=0.1)


def test_stsas_network_for_tiny_imagenet_has_the_imagenet_stem_at_64_pixels():
    """Its code: 7 x 7 with stride 2, then pooling, so that the last map is 2 x 2; Normalize as there."""
    backbone = preset("resnet18_tiny_imagenet")
    start = backbone.trainable(images(count=2, size=64), 0)
    body = start.build()
    stem = body.conv1
    assert (stem.kernel_size, stem.stride, type(body.maxpool)) == ((7, 7), (2, 2), torch.nn.MaxPool2d)
    assert (start.size, start.dimension) == (64, 512)
    assert body.forward_features(torch.zeros(1, 3, 64, 64)).shape[2:] == (2, 2)
    expected = Normalize([0.4802, 0.4481, 0.3975], [0.2302, 0.2265, 0.2262])
    assert (list(start.mean), list(start.std)) == (expected.mean, expected.std)


def test_every_backbone_is_on_the_page():
    for file in sorted((config_dir() / "backbone").glob("*.yaml")):
        assert re.search(rf"^\|.*`{file.stem}`", PAGE, flags=re.M), file.stem


QUOTES = re.findall(r"“([^”]+)” \((\w+)\.txt\)", PAGE)


def plain(text: str) -> str:
    """Without the line ends, escapes and links that turning a paper into text has left."""
    text = re.sub(r"\(https?://[^)]*\)", "", text.replace("\\", ""))
    return re.sub(r"[\s\[\]]+", "", text)


@pytest.mark.parametrize(("quote", "paper"), QUOTES)
def test_what_the_page_quotes_stands_in_the_paper(quote, paper):
    text = plain(shared(f"papers/{paper}.txt").read_text())
    for part in quote.split(" ... "):
        assert plain(part) in text


def test_the_page_quotes_every_paper():
    assert {paper for _, paper in QUOTES} == {"afcl", "afl", "fedprotip", "fedran", "stsa"}
