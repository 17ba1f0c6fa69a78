"""A timm network with its weights: the hub's, a local checkpoint's, or random ones."""

from __future__ import annotations

import logging
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from fcl_bench.data.sources.hub import cache_unless_reachable
from fcl_bench.errors import UserError, choices, first_line
from fcl_bench.files import user_path

log = logging.getLogger(__name__)

#: torchvision's names of a VGG's layers after its convolutions, and timm's.
_VGG_LAYERS = {"classifier.0": "pre_logits.fc1", "classifier.3": "pre_logits.fc2", "classifier.6": "head.fc"}

#: Keys of every run's model.safetensors besides the network's, and the prefix of the network's weights there.
_RUN_ENTRIES = {"W", "class_order"}
_BODY = "body."


def timm_network(name: str, model_args: dict[str, Any], pretrained: bool) -> torch.nn.Module:
    """A network without classifier, in train mode on the CPU.

    Args:
        pretrained: with the weights that the hub, or its cache on this machine, has of the full name; otherwise with
            random ones from torch's generator.

    Raises:
        UserError: timm has no such network or weights, refuses the arguments, or the hub is out of reach.
    """
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise UserError(f"backbone.name={name}: timm has no {architecture}", choices(timm.list_models(), architecture))
    tagged = [full for full in timm.list_pretrained() if full.partition(".")[0] == architecture]
    if not pretrained:
        try:
            timm.models.get_pretrained_cfg(name)
        except RuntimeError as error:
            raise UserError(f"backbone.name={name}: {first_line(error)}", choices(tagged, name)) from error
        return _create(name, model_args, pretrained=False)
    if not tag or name not in tagged:
        what = "names no weights" if not tag else f"timm has no weights {tag} for {architecture}"
        raise UserError(
            f"backbone.name={name} {what}",
            f"backbone.checkpoint=FILE, or a name: {choices(tagged, name)}",
        )
    log.info("weights %s: from the hub, or its cache on this machine", name)
    with cache_unless_reachable() as why:
        return _create(name, model_args, pretrained=True, why=why)


def _create(name: str, model_args: dict[str, Any], pretrained: bool, why: str = "") -> torch.nn.Module:
    import timm

    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **model_args)
    except (TypeError, LookupError, ValueError, AssertionError, AttributeError) as error:
        if not model_args:
            raise
        raise UserError(
            f"backbone.model_args={model_args} failed ({type(error).__name__}: {first_line(error)})",
            f"arguments of timm's {name}",
        ) from error
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise UserError(
            f"backbone.name={name}: weights could not be fetched from the hub: {why or first_line(error)}",
            "backbone.checkpoint=FILE with those weights, or a machine with network to fill the hub's cache",
        ) from error


def read_checkpoint(path: str) -> dict[str, torch.Tensor]:
    """The state dict in a .safetensors, .pth or .pt file; no code in it is run.

    From the model.safetensors of a run that trained a network, the network's weights are returned.

    Raises:
        UserError: the file is damaged, or holds something else.
    """
    from timm.models import load_state_dict

    key = f"backbone.checkpoint={path}"
    file = user_path("backbone.checkpoint", path)
    try:
        if zipfile.is_zipfile(file):
            _require_checksums(key, file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = load_state_dict(str(file), device="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # torch, its unpickler, zipfile and safetensors raise many types on foreign bytes
        # The library's own advice is left out: for a pickle it is to load it unsafely.
        raise UserError(
            f"{key} cannot be loaded ({type(error).__name__})", "an undamaged state dict that holds only tensors"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{key} holds no state dict", "a flat mapping of names to tensors")
    if any(value.is_meta for value in state.values()):
        raise UserError(f"{key} holds the weights' shapes but no values", "a state dict saved from a loaded network")
    return _network_of_run(state, key) if state.keys() >= _RUN_ENTRIES else state


def _network_of_run(state: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    """The network's weights in a run's saved state, without the classifier and other state for prediction."""
    body = {name.removeprefix(_BODY): value for name, value in state.items() if name.startswith(_BODY)}
    if not body:
        raise UserError(
            f"{key} is the model of a run that trained no network",
            "the model.safetensors of a run that trains images, as method=fedavg or method=centralised do",
        )
    return body


def _require_checksums(key: str, file: Path) -> None:
    """Check the checksums in the zip archive that torch saves; torch itself ignores them."""
    with zipfile.ZipFile(file) as archive:
        # Of what one wrong bit marks as a folder (0x10) torch would return whatever is in memory.
        folder = next((entry.filename for entry in archive.infolist() if entry.external_attr & 0x10), None)
        damaged = archive.testzip()
    if folder is not None:
        raise UserError(f"{key} is damaged: {folder} is marked as a folder", "an undamaged copy of the file")
    if damaged is not None:
        raise UserError(f"{key} is damaged: {damaged} does not match its checksum", "an undamaged copy of the file")


def load_weights(model: torch.nn.Module, state: dict[str, torch.Tensor], name: str, path: str) -> None:
    """Load `state` strictly, except for the classifier, which features don't need.

    Counts of batches (`num_batches_tracked`) may be missing: torchvision's older files have none, and features don't
    need them either.

    Raises:
        UserError: an entry is missing, unexpected, of another shape or kind, or not finite; the message has the
            network's `name` and the `path`.
    """
    key = f"backbone.checkpoint={path}"
    remedy = "weights of exactly this architecture; see backbone.name, backbone.model_args and backbone.stem"
    classifier = model.pretrained_cfg.get("classifier") or ()  # type: ignore[union-attr, operator]
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    wanted = model.state_dict()
    state = {
        entry: value
        for entry, value in _in_timms_names(state, wanted).items()
        if not entry.startswith(tuple(f"{head}." for head in heads))
    }
    state = {**{entry: value for entry, value in wanted.items() if entry.endswith(".num_batches_tracked")}, **state}
    for trouble, entries in (
        ("lacks", wanted.keys() - state.keys()),
        ("has the unexpected", state.keys() - wanted.keys()),
    ):
        if entries:
            raise UserError(f"{key} {trouble} {min(entries)} ({len(entries)} such entries) for {name}", remedy)
    for entry, value in state.items():
        _require_fit(f"{key}: {entry}", value, wanted[entry], name, remedy)
    model.load_state_dict(state, strict=True)


def _require_fit(key: str, value: torch.Tensor, wanted: torch.Tensor, name: str, remedy: str) -> None:
    if value.shape != wanted.shape:
        raise UserError(f"{key} has shape {tuple(value.shape)}, {name} needs {tuple(wanted.shape)}", remedy)
    if value.is_floating_point() != wanted.is_floating_point():
        raise UserError(
            f"{key} has type {_type(value)}, {name} needs {_type(wanted)}", "weights that are not quantised"
        )
    if not torch.isfinite(value.to(wanted.dtype)).all():
        raise UserError(f"{key} holds NaN or infinity", "an undamaged file")


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _in_timms_names(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """torchvision's VGG weights under timm's names, with fully connected layers as convolutions; others unchanged."""
    if "classifier.0.weight" not in state or "pre_logits.fc1.weight" not in wanted:
        return state
    renamed = {}
    for entry, value in state.items():
        layer, _, kind = entry.rpartition(".")
        name = f"{_VGG_LAYERS.get(layer, layer)}.{kind}"
        same = layer in _VGG_LAYERS and name in wanted and value.numel() == wanted[name].numel()
        renamed[name] = value.reshape(wanted[name].shape) if same else value
    return renamed
