"""Networks to be trained: the same first weights at every call, stems, adapters, stages."""

from __future__ import annotations

import logging

import pytest
import timm
import torch

from fcl_bench.backbones.backbone import Identity, Pixels, frozen_names, weights_hash
from fcl_bench.backbones.timm_backbone import Adapters, Timm, Transform
from fcl_bench.backbones.tiny import Tiny
from fcl_bench.errors import UserError
from fcl_bench.typed import typed_instance
from tests.backbones.start_cases import BACKBONES, CPU, FEATURES, RESNET, SMALL, VIT, checkpoint, images, scratch, vit


def typed(schema: type, **knobs):
    """As the command makes it of what the user typed."""
    return typed_instance(schema, knobs, "backbone")


@pytest.mark.slow_cases("vit")
@pytest.mark.parametrize("backbone", BACKBONES.values(), ids=BACKBONES.keys())
def test_initial_weights_follow_from_the_seed_alone(backbone):
    data = images()
    torch.manual_seed(1)
    first = backbone.trainable(data, seed=3)
    before = torch.get_rng_state()
    again = backbone.trainable(data, seed=3)
    bodies = [first.build(), again.build()]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    bodies += [first.build(), backbone.trainable(data, seed=3).build()]
    assert len({weights_hash(body) for body in bodies}) == 1
    assert first.identity == again.identity
    other = backbone.trainable(data, seed=4)
    assert weights_hash(other.build()) != weights_hash(bodies[0])
    assert other.identity != first.identity
    assert weights_hash(bodies[0]) == first.identity["weights"]


@pytest.mark.parametrize("backbone", BACKBONES.values(), ids=BACKBONES.keys())
def test_a_body_maps_images_to_features_and_learns_apart_from_its_siblings(backbone):
    start = backbone.trainable(images(), seed=0)
    body, sibling = start.build(), start.build()
    assert all(module.training for module in body.modules())
    features = body(torch.randn(3, 3, start.size, start.size))
    assert features.shape == (3, start.dimension)
    features.square().sum().backward()
    changing = [weight for weight in body.parameters() if weight.requires_grad]
    assert all(weight.grad is not None for weight in changing)
    torch.optim.SGD(changing, lr=0.1).step()
    assert weights_hash(body) != start.identity["weights"]
    assert weights_hash(sibling) == start.identity["weights"] == weights_hash(start.build())
    assert len(start.mean) == len(start.std) == 3


def test_resnet18_for_cifar_is_the_papers_network():
    """conv 3x3 without pooling, then 4 stages of 2 blocks: 11,168,832 parameters and feature maps of 32, 16, 8, 4."""
    body = scratch("resnet18", stem="cifar").trainable(images(), seed=0).build()
    assert sum(weight.numel() for weight in body.parameters()) == 11_168_832
    assert body.conv1.weight.shape == (64, 3, 3, 3)
    x = body.maxpool(body.act1(body.bn1(body.conv1(torch.zeros(2, 3, 32, 32)))))
    sides = []
    for stage in (body.layer1, body.layer2, body.layer3, body.layer4):
        x = stage(x)
        sides.append(x.shape[-1])
    assert sides == [32, 16, 8, 4]
    assert body(torch.zeros(2, 3, 32, 32)).shape == (2, 512)


def test_the_last_map_is_averaged_to_a_grid_channel_by_channel():
    """Features of pool=2 are the means of the map's quadrants, of pool=1 the mean of all: the same network else."""
    grid, plain = (scratch(stem="cifar", pool=pool).trainable(images(), seed=0) for pool in (2, 1))
    assert grid.dimension == 4 * plain.dimension
    assert grid.identity["weights"] == plain.identity["weights"]
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        last = plain.build().eval().forward_features(x)
        features = grid.build().eval()(x)
        whole = plain.build().eval()(x)
    assert last.shape[2:] == (4, 4)
    cells = [last[:, :, r : r + 2, c : c + 2].mean(dim=(2, 3)) for r in (0, 2) for c in (0, 2)]
    torch.testing.assert_close(features, torch.stack(cells, dim=2).flatten(1))
    torch.testing.assert_close(features.view(3, -1, 4).mean(dim=2), whole)


def test_a_grid_is_part_of_what_features_are_kept_under(tmp_path):
    path, _ = checkpoint(tmp_path, RESNET)
    plain, grid = (Timm(RESNET, checkpoint=path, pool=pool).open(images(), CPU) for pool in (1, 2))
    assert set(grid.identity.items()) - set(plain.identity.items()) == {("pool", "2")}
    assert grid.dimension(images().train) == 4 * plain.dimension(images().train)


def test_training_images_have_the_transforms_size_and_scale_or_the_models_own():
    start = scratch().trainable(images(), seed=0)
    assert (start.size, start.mean, start.std) == (32, tuple(SMALL.mean), tuple(SMALL.std))
    own = vit().trainable(images(), seed=0)
    config = timm.create_model(VIT).pretrained_cfg
    assert (3, own.size, own.size) == config["input_size"]
    assert (own.mean, own.std) == (config["mean"], config["std"])


def test_pretrained_weights_are_where_training_starts(tmp_path):
    path, model = checkpoint(tmp_path, RESNET)
    start = Timm(RESNET, checkpoint=path, transform=SMALL).trainable(images(), seed=0)
    assert start.identity["weights"] == weights_hash(model)


def test_a_cifar_stem_under_pretrained_weights_is_new_and_said_so(tmp_path, caplog):
    path, model = checkpoint(tmp_path, RESNET)
    backbone = Timm(RESNET, checkpoint=path, stem="cifar", transform=SMALL)
    with caplog.at_level(logging.WARNING):
        first, second = (backbone.trainable(images(), seed).build() for seed in (0, 1))
    assert caplog.text.count("the stem of test_resnet is new, with random weights") == 2
    assert not torch.equal(first.conv1.weight, second.conv1.weight)
    assert torch.equal(first.layer4[0].conv1.weight, model.layer4[0].conv1.weight)
    assert weights_hash(first.layer1) == weights_hash(second.layer1) == weights_hash(model.layer1)


def test_a_checkpoint_with_a_cifar_stem_keeps_it(tmp_path, caplog):
    def stem(model):
        model.conv1 = torch.nn.Conv2d(3, 32, 3, padding=1, bias=False)

    path, model = checkpoint(tmp_path, RESNET, stem)
    with caplog.at_level(logging.WARNING):
        body = Timm(RESNET, checkpoint=path, stem="cifar", transform=SMALL).trainable(images(), seed=0).build()
    assert weights_hash(body) == weights_hash(model)
    assert isinstance(body.maxpool, torch.nn.Identity)
    assert not caplog.text
    with pytest.raises(UserError, match=r"backbone\.stem"):
        Timm(RESNET, checkpoint=path).trainable(images(), seed=0)


def test_adapters_start_as_the_plain_network_and_alone_train(tmp_path):
    path, plain = checkpoint(tmp_path, VIT)
    start = Timm(VIT, checkpoint=path, adapters=Adapters(width=8)).trainable(images(), seed=0)
    body = start.build()
    x = torch.randn(2, 3, start.size, start.size)
    assert torch.equal(body.eval()(x), plain(x))
    changing = {name for name, weight in body.named_parameters() if weight.requires_grad}
    assert changing == {
        f"blocks.{block}.mlp.{layer}.{kind}"
        for block in range(len(plain.blocks))
        for layer in ("down", "up")
        for kind in ("weight", "bias")
    }


def test_adapters_add_what_the_papers_equation_says(tmp_path):
    """STSA Eq. 63: x_o = MLP(x_i) + s ReLU(x_i W_down) W_up, x_i what the block's MLP gets."""
    path, plain = checkpoint(tmp_path, VIT)
    body = Timm(VIT, checkpoint=path, adapters=Adapters(8, scale=0.3)).trainable(images(), seed=0).build()
    adapted, mlp = body.blocks[1].mlp, plain.blocks[1].mlp
    x = torch.randn(2, 5, plain.embed_dim)
    torch.nn.init.normal_(adapted.up.weight)
    expected = mlp(x) + 0.3 * (x @ adapted.down.weight.T).clamp_min(0) @ adapted.up.weight.T
    torch.testing.assert_close(adapted(x), expected)
    assert bool(adapted.down.weight.any())


@pytest.mark.parametrize("bias", [True, False])
def test_adapters_of_a_vit_have_the_papers_number_of_parameters(bias):
    """12 blocks of d x r down and r x d up: 2 d r each, and r + d biases that Eq. 63 does not have."""
    body = scratch("vit_tiny_patch16_224", transform=Transform(), adapters=Adapters(width=64, bias=bias))
    body = body.trainable(images(), seed=0).build()
    changing = sum(weight.numel() for weight in body.parameters() if weight.requires_grad)
    assert changing == 12 * (2 * 192 * 64 + bias * (64 + 192))
    down, up = body.blocks[0].mlp.down.weight, body.blocks[0].mlp.up.weight
    assert (down.shape, up.shape) == ((64, 192), (192, 64)), "torch keeps W': W_down is d x r, W_up r x d"


def test_adapters_that_read_the_stream_get_what_comes_before_the_norm(tmp_path):
    """STSA's public code: x + a(x) + MLP(norm(x)), where Eq. 63 gives both the same input."""
    path, plain = checkpoint(tmp_path, VIT)
    adapters = Adapters(8, scale=0.3, reads="stream", dropout=0.5)
    body = Timm(VIT, checkpoint=path, adapters=adapters).trainable(images(), seed=0).build().eval()
    images_ = torch.randn(2, 3, 160, 160)
    assert torch.equal(body(images_), plain(images_)), "W_up is 0 at first"
    block, before = body.blocks[0], plain.blocks[0]
    torch.nn.init.normal_(block.mlp.up.weight)
    torch.nn.init.normal_(block.mlp.up.bias)
    x = torch.randn(2, 5, plain.embed_dim)
    stream = x + before.attn(before.norm1(x))
    units = (stream @ block.mlp.down.weight.T + block.mlp.down.bias).clamp_min(0)
    added = 0.3 * (units @ block.mlp.up.weight.T + block.mlp.up.bias)
    torch.testing.assert_close(block(x), stream + before.mlp(before.norm2(stream)) + added)


def test_adapters_drop_units_in_training_alone(tmp_path):
    path, _ = checkpoint(tmp_path, VIT)
    body = Timm(VIT, checkpoint=path, adapters=Adapters(8, dropout=0.5)).trainable(images(), seed=0).build()
    mlp, x = body.blocks[0].mlp, torch.randn(2, 5, body.embed_dim)
    torch.nn.init.normal_(mlp.up.weight)
    assert torch.equal(mlp.eval()(x), mlp(x))
    assert not torch.equal(mlp.train()(x), mlp(x))


def test_the_first_stages_freeze_with_their_stem_and_buffers():
    start = scratch("resnet18", stem="cifar").trainable(images(), seed=0)
    assert start.stages == ("layer1", "layer2", "layer3", "layer4")
    body = start.build()
    names = frozen_names(body, start.stages, 1)
    assert {name.partition(".")[0] for name in names} == {"conv1", "bn1", "layer1"}
    assert {"conv1.weight", "bn1.running_mean", "bn1.num_batches_tracked", "layer1.1.bn2.running_var"} <= names
    assert names == {name for name in body.state_dict() if name.startswith(("conv1.", "bn1.", "layer1."))}
    assert frozen_names(body, start.stages, 0) == set()
    assert frozen_names(body, start.stages, 4) == set(body.state_dict())


def test_the_first_block_of_a_vit_freezes_with_its_embedding():
    start = scratch("vit_tiny_patch16_224", transform=Transform()).trainable(images(), seed=0)
    assert start.stages == tuple(f"blocks.{block}" for block in range(12))
    body = start.build()
    names = frozen_names(body, start.stages, 2)
    assert {"cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.1.mlp.fc2.bias"} <= names
    assert not any(name.startswith(("blocks.2.", "blocks.10.", "blocks.11.", "norm.")) for name in names)


def test_tiny_freezes_by_stages_too():
    start = Tiny(width=4).trainable(images(), seed=0)
    assert start.stages == ("stage1", "stage2", "stage3", "stage4")
    body = start.build()
    assert frozen_names(body, start.stages, 2) == {
        name for name in body.state_dict() if name.startswith(("stage1.", "stage2."))
    }


def test_buffers_that_no_state_dict_holds_are_frozen_as_well():
    body = torch.nn.Sequential()
    body.add_module("stage1", torch.nn.Linear(2, 2))
    body.stage1.register_buffer("table", torch.zeros(1), persistent=False)
    assert frozen_names(body, ("stage1",), 1) == {"stage1.weight", "stage1.bias", "stage1.table"}


@pytest.mark.parametrize(("size", "sides"), [(8, [8, 4, 2, 2]), (15, [15, 8, 4, 4]), (16, [16, 8, 4, 2])])
def test_tiny_halves_large_images_once_more(size, sides):
    start = Tiny(width=4).trainable(images(size), seed=0)
    assert (start.size, start.dimension, start.mean, start.std) == (size, 32, (0.5,) * 3, (0.5,) * 3)
    body, seen = start.build(), []
    x = torch.zeros(2, 3, size, size)
    for stage in start.stages:
        x = getattr(body, stage)(x)
        seen.append(x.shape[-1])
    assert seen == sides
    assert body(torch.zeros(2, 3, size, size)).shape == (2, 32)
    assert Tiny(size=24).trainable(images(size), seed=0).size == 24


@pytest.mark.parametrize(("width", "heads"), [(1, 1), (4, 2), (7, 2), (11, 4), (13, 4), (16, 8)])
def test_a_tiny_transformer_has_heads_of_any_width(width, heads):
    body = Tiny(width=width, architecture="vit").trainable(images(8), seed=0).build()
    assert {module.num_heads for module in body.modules() if hasattr(module, "num_heads")} == {heads}
    assert body(torch.zeros(2, 3, 8, 8)).shape == (2, 8 * width)


def test_the_identity_of_a_plain_network_names_no_new_knobs(tmp_path):
    """Feature caches made before the knobs existed stay valid."""
    path, model = checkpoint(tmp_path, RESNET)
    identity = Timm(RESNET, checkpoint=path, model_args={"drop_rate": 0.1}).open(images(), CPU).identity
    assert identity.pop("transform").startswith('{"crop_mode": "center", "crop_pct": 0.95, "input_size": [3, 160, 160]')
    assert identity == {
        "backbone": RESNET,
        "model_args": '{"drop_rate": 0.1}',
        "weights": weights_hash(model),
        "precision": "float32",
        "device": "cpu",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"stem": "cifar"},
        {"transform": Transform(size=64), "pool": 2},
        {"name": VIT, "transform": Transform()},
        {"model_args": {"drop_rate": 0.1}},
        {"transform": Transform(size=64, mean=[0.5], std=[0.5])},
    ],
)
def test_the_identity_of_a_start_holds_all_that_determines_it(change):
    plain, changed = (
        Timm(**{"name": RESNET, "pretrained": False, "transform": SMALL, **knobs}).trainable(images(), seed=0).identity
        for knobs in ({}, change)
    )
    assert plain != changed
    assert set(plain) == {"backbone", "model_args", "stem", "adapters", "weights", "size", "mean", "std"}
    assert all(isinstance(value, str) for value in plain.values())


def test_adapters_of_another_scale_are_another_start():
    first, second = (vit(adapters=Adapters(8, scale)).trainable(images(), seed=0).identity for scale in (0.1, 0.2))
    assert first != second
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize("off", [None, False])
def test_null_and_false_are_no_adapters(off):
    assert typed(Timm, name=VIT, adapters=off).adapters is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vit(stem="cifar").trainable(images(), 0), r"stem=cifar: test_vit has no conv1 and maxpool"),
        (lambda: vit(pool=2).trainable(images(), 0), r"backbone\.pool=2: test_vit has no global_pool of a feature map"),
        (
            lambda: scratch("resnet18", pool=2).trainable(images(), 0),
            r"backbone\.pool=2 is more than the last map of resnet18 has: 1 x 1 .*backbone\.stem=cifar",
        ),
        (lambda: typed(Timm, name=RESNET, pool=0), r"backbone\.pool=0"),
        (lambda: scratch(adapters=Adapters()).trainable(images(), 0), "test_resnet has no blocks with an MLP"),
        (
            lambda: scratch("mobilenetv2_100", adapters=Adapters()).trainable(images(), 0),
            "mobilenetv2_100 has no blocks with an MLP",
        ),
        (lambda: typed(Timm, name=RESNET, stem="imagenet"), r"backbone\.stem=imagenet is not known"),
        (lambda: typed(Timm, name=VIT, adapters={"width": 0}), r"backbone\.adapters\.width=0"),
        (lambda: typed(Timm, name=VIT, adapters={"scale": 0}), r"backbone\.adapters\.scale=0"),
        (lambda: typed(Timm, name=VIT, adapters={"dropout": 1.0}), r"backbone\.adapters\.dropout=1\.0"),
        (lambda: typed(Timm, name=VIT, adapters={"reads": "norm"}), r"backbone\.adapters\.reads=norm is not known"),
        (lambda: typed(Tiny, width=0), r"backbone\.width=0"),
        (lambda: typed(Tiny, width=10**6), r"backbone\.width=1000000 .*at most 1024"),
        (lambda: typed(Tiny, size=0), r"backbone\.size=0"),
        (lambda: scratch("resnt18").trainable(images(), 0), "did you mean resnet18"),
        (lambda: scratch("resnet18.tv_in2k").trainable(images(), 0), "did you mean resnet18.tv_in1k"),
        (lambda: scratch("vit_tiny_patch16_224").trainable(images(), 0), "does not take images of .*32, 32"),
        (lambda: Pixels().trainable(images(), 0), r"backbone=pixels has nothing to train .*resnet18_cifar"),
        (lambda: Identity().trainable(FEATURES, 0), "backbone=identity has nothing to train"),
        (lambda: Tiny().trainable(FEATURES, 0), "backbone=tiny needs images"),
        (lambda: Tiny().open(FEATURES, CPU), "backbone=tiny needs images"),
        (lambda: scratch().trainable(FEATURES, 0), "needs images"),
        (lambda: frozen_names(torch.nn.Sequential(), ("a", "b"), 3), r"method\.frozen_stages=3 .*at most 2: a, b"),
        (lambda: frozen_names(torch.nn.Sequential(), (), 1), r"method\.frozen_stages=1 .*names no stages"),
    ],
)
def test_what_cannot_be_is_told(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_checkpoint_and_a_start_from_scratch_exclude_each_other(tmp_path):
    path, _ = checkpoint(tmp_path, RESNET)
    with pytest.raises(UserError, match=r"checkpoint=.*pretrained=false"):
        Timm(RESNET, pretrained=False, checkpoint=path)
