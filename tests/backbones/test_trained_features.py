"""Features of a network that has been trained, or is about to be."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image

from fcl_bench.backbones.backbone import Trainable, weights_hash
from fcl_bench.backbones.extract import FeatureCache, extract_features
from fcl_bench.backbones.network_extractor import NetworkExtractor
from fcl_bench.backbones.timm_backbone import Adapters, Timm
from fcl_bench.backbones.tiny import Tiny
from fcl_bench.data.images.stored import Images
from fcl_bench.data.sources.base import Dataset, Split, image_split
from fcl_bench.data.sources.digits import Digits
from tests.backbones.start_cases import CPU, VIT, checkpoint, images, scratch


def standardised(split: Split, start: Trainable) -> torch.Tensor:
    """float32 (n, 3, size, size), straight from the definition."""
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in (split.inputs[i] for i in range(len(split)))])
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    return (x - torch.tensor(start.mean).view(3, 1, 1)) / torch.tensor(start.std).view(3, 1, 1)


def test_a_trained_network_gives_its_bodys_features():
    data = Digits().load()
    start = Tiny(width=4).trainable(data, seed=0)
    body = start.build()
    x = standardised(data.train, start)
    body(x).sum().backward()  # moves the running statistics, as training does
    extractor = NetworkExtractor(body, start, CPU)
    parts = list(extractor.batches(data.train))
    assert len(parts) > 1
    features = torch.cat(parts)
    assert body.training
    with torch.no_grad():
        torch.testing.assert_close(features, body.eval()(x), rtol=1e-4, atol=1e-5)
    assert extractor.dimension(data.train) == features.shape[1] == 32
    rest = torch.cat(list(extractor.batches(data.train, start=len(parts[0]))))
    torch.testing.assert_close(rest, features[len(parts[0]) :])
    assert list(extractor.batches(data.train, start=len(data.train))) == []


def test_a_trained_network_is_known_by_its_weights_and_stays_as_it_was():
    data = Digits().load()
    start = Tiny(width=4).trainable(data, seed=0)
    body = start.build()
    before = NetworkExtractor(body, start, CPU)
    features = next(before.batches(data.train))
    with torch.no_grad():
        next(body.parameters()).add_(1)
    after = NetworkExtractor(body, start, CPU)
    assert torch.equal(next(before.batches(data.train)), features)
    assert not torch.equal(next(after.batches(data.train)), features)
    assert before.identity == {**start.identity, "precision": "float32", "device": "cpu"}
    assert after.identity == {**before.identity, "weights": weights_hash(body)}
    assert NetworkExtractor(body, start, CPU, precision="bfloat16").identity["precision"] == "bfloat16"


def test_features_of_a_network_can_be_learnt_from():
    """They outlive the pass without marks of it: a classifier on top can ask for gradients."""
    data = Digits().load()
    features = next(Tiny(width=4).open(data, CPU).batches(data.train))
    torch.nn.Linear(32, 2)(features).sum().backward()


def test_features_of_a_trained_network_go_through_the_cache(tmp_path):
    data = Digits().load()
    made = [
        extract_features("tiny", Tiny(width=4).open(data, CPU, seed), data, FeatureCache(tmp_path))
        for seed in (0, 0, 1)
    ]
    assert [features.cache_hit for features in made] == [False, True, False]
    assert torch.equal(made[0].test, made[1].test)


def test_tiny_opens_untrained_and_says_so(caplog):
    data = Digits().load()
    with caplog.at_level(logging.WARNING):
        first, again, other = (next(Tiny().open(data, CPU, seed).batches(data.test)) for seed in (0, 0, 1))
    assert "untrained network" in caplog.text
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_images_of_several_sizes_are_brought_to_the_first_ones(tmp_path):
    class Mixed(Images):
        fingerprint = "mixed"

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return Image.fromarray(np.full((8 + index, 9), 10 * index, dtype=np.uint8))

        def describe(self, index):
            return f"image {index}"

    split = image_split([0, 1, 0], Mixed())
    data = Dataset("mixed", split, split)
    extractor = Tiny(width=4).open(data, CPU)
    assert Tiny().trainable(data, seed=0).size == 8
    assert torch.cat(list(extractor.batches(data.train))).shape == (3, 32)


def test_frozen_features_follow_the_knobs_too(tmp_path, caplog):
    data = images()
    with caplog.at_level(logging.WARNING):
        extractor = scratch(stem="cifar").open(data, CPU, seed=5)
    assert "features are those of test_resnet with random weights" in caplog.text
    assert extractor.identity["stem"] == "cifar"
    start = scratch(stem="cifar").trainable(data, seed=5)
    assert extractor.identity["weights"] == start.identity["weights"]
    with torch.no_grad():
        expected = start.build().eval()(standardised(data.train, start))
    torch.testing.assert_close(torch.cat(list(extractor.batches(data.train))), expected, rtol=1e-4, atol=1e-5)
    path, _ = checkpoint(tmp_path, VIT)
    plain, adapted = (Timm(VIT, checkpoint=path, adapters=a).open(data, CPU) for a in (None, Adapters(8)))
    assert torch.equal(next(plain.batches(data.train)), next(adapted.batches(data.train)))
    assert json.loads(adapted.identity["adapters"])["width"] == 8


@pytest.mark.gpu
def test_a_trained_network_gives_the_same_on_cpu_and_gpu():
    data = Digits().load()
    start = Tiny(width=4).trainable(data, seed=0)
    cpu, gpu = (
        torch.cat(list(NetworkExtractor(start.build(), start, torch.device(device), "float32").batches(data.test)))
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(gpu, cpu, rtol=1e-3, atol=1e-3)
