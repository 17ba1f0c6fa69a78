"""The state of unfinished work: what was saved last, or nothing, whatever happened to it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch

from fcl_bench.report.checkpoint import Checkpoint, for_disk, read_json, write_json

STATE = {"tasks_done": 2, "seconds": 0.1 + 0.2, "rows": [{"drift": 1e-17, "none": None}], "kept": {"3": ["a", "b"]}}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(2, 3, 4, 5, generator=generator)
    return {
        "conv": image.contiguous(memory_format=torch.channels_last),
        "matrix": torch.rand(4, 6, generator=generator, dtype=torch.float64).T,
        "shared": image[0],
        "labels": torch.arange(5),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "known": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 3),
        "half": torch.rand(3, generator=generator).bfloat16(),
    }


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return set(first) == set(second) and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def saved(folder, seed: int = 0, schema: int = 1) -> Checkpoint:
    checkpoint = Checkpoint(folder / "checkpoint", schema)
    checkpoint.save(STATE, tensors(seed))
    return checkpoint


def files(checkpoint: Checkpoint) -> set[str]:
    return {entry.name for entry in checkpoint.folder.iterdir()}


def holds(checkpoint: Checkpoint, seed: int = 0) -> bool:
    found = checkpoint.load()
    return found is not None and STATE.items() <= found[0].items() and same(found[1], tensors(seed))


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path):
    assert holds(saved(tmp_path))
    assert holds(Checkpoint(tmp_path / "checkpoint", 1))


def test_nothing_is_loaded_where_nothing_was_saved_without_a_word(tmp_path, caplog):
    assert Checkpoint(tmp_path / "checkpoint", 1).load() is None
    assert caplog.text == ""
    assert list(tmp_path.iterdir()) == []


def test_the_newest_state_replaces_the_older_ones(tmp_path):
    checkpoint = saved(tmp_path, seed=0)
    first = files(checkpoint)
    for seed in (1, 2, 3):
        checkpoint.save({**STATE, "seed": seed}, tensors(seed))
        assert len(files(checkpoint)) == 2
    assert holds(checkpoint, seed=3)
    assert checkpoint.load()[0]["seed"] == 3
    assert files(checkpoint) != first


def test_removing_forgets_all_and_can_be_done_twice(tmp_path):
    checkpoint = saved(tmp_path)
    checkpoint.remove()
    checkpoint.remove()
    assert checkpoint.load() is None
    assert not checkpoint.folder.exists()


def the_tensors(checkpoint: Checkpoint):
    [file] = checkpoint.folder.glob("*.safetensors")
    return file


def flip(file, where: int) -> None:
    content = bytearray(file.read_bytes())
    content[where] ^= 1
    file.write_bytes(bytes(content))


def edit(file, **changes) -> None:
    """Other values under a checksum that is right again."""
    content = {name: value for name, value in json.loads(file.read_text()).items() if name != "checksum"}
    write_json(file, {**content, **changes})


DAMAGES = {
    "tensors cut": lambda c: the_tensors(c).write_bytes(the_tensors(c).read_bytes()[:-3]),
    "tensors altered": lambda c: flip(the_tensors(c), -3),
    "tensors empty": lambda c: the_tensors(c).write_bytes(b""),
    "tensors gone": lambda c: the_tensors(c).unlink(),
    "tensors a folder": lambda c: (the_tensors(c).unlink(), (c.folder / "tensors-1.safetensors").mkdir()),
    "state cut": lambda c: (c.folder / "state.json").write_text((c.folder / "state.json").read_text()[:-20]),
    "state altered": lambda c: (c.folder / "state.json").write_text(
        (c.folder / "state.json").read_text().replace('"tasks_done": 2', '"tasks_done": 3')
    ),
    "state empty": lambda c: (c.folder / "state.json").write_text(""),
    "state no text": lambda c: (c.folder / "state.json").write_bytes(b"\xff\xfe{}"),
    "state a list": lambda c: (c.folder / "state.json").write_text("[1, 2]"),
    "state a number": lambda c: (c.folder / "state.json").write_text("3"),
    "state null": lambda c: (c.folder / "state.json").write_text("null"),
    "state without tensors": lambda c: edit(c.folder / "state.json", tensors=None),
    "state of other tensors": lambda c: edit(c.folder / "state.json", tensors_checksum="0" * 32),
    "another schema": lambda c: edit(c.folder / "state.json", schema=2),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_told_and_nothing_is_taken_over(tmp_path, caplog, damage):
    checkpoint = saved(tmp_path)
    damage(checkpoint)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.load() is None
    assert len(caplog.records) == 1
    assert "starting from the first task" in caplog.text
    assert str(checkpoint.folder) in caplog.text


def test_work_starts_anew_over_a_damaged_state(tmp_path):
    checkpoint = saved(tmp_path)
    (checkpoint.folder / "state.json").write_text("")
    checkpoint.save(STATE, tensors(4))
    assert holds(checkpoint, seed=4)
    assert len(files(checkpoint)) == 2


def test_safetensors_under_a_right_checksum_that_are_none_are_refused(tmp_path, caplog):
    from fcl_bench.files import file_checksum

    checkpoint = saved(tmp_path)
    the_tensors(checkpoint).write_bytes(b"no tensors at all")
    edit(checkpoint.folder / "state.json", tensors_checksum=file_checksum(the_tensors(checkpoint)))
    assert checkpoint.load() is None
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("moment", ["before the tensors", "between tensors and state", "before the old is deleted"])
def test_killed_while_saving_one_whole_state_is_there(tmp_path, monkeypatch, moment):
    """The old one until the new one is complete; and the next save tidies up."""
    checkpoint = saved(tmp_path, seed=0)
    replace, done = os.replace, []

    def dies(source, target):
        if moment == "before the tensors" or (done and moment == "between tensors and state"):
            raise KeyboardInterrupt
        replace(source, target)
        done.append(target)

    unlink = Path.unlink

    def dies_at_the_old(path, missing_ok=False):
        if moment == "before the old is deleted" and path.name.startswith("tensors-"):
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr("fcl_bench.files.os.replace", dies)
        patch.setattr(Path, "unlink", dies_at_the_old)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(STATE, tensors(1))
    assert holds(checkpoint, seed=1 if moment == "before the old is deleted" else 0)
    checkpoint.save(STATE, tensors(2))
    assert holds(checkpoint, seed=2)
    assert len([name for name in files(checkpoint) if not name.startswith(".")]) == 2


def test_tensors_for_disk_are_plain_copies():
    parameter = torch.nn.Parameter(torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    given = {"a": parameter, "b": parameter.data[0], "c": torch.rand(3, 4).T}
    made = for_disk(given)
    for name, tensor in made.items():
        assert torch.equal(tensor, given[name])
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    made["a"].zero_()
    assert parameter.any()
    assert made["b"].any()


def test_json_has_no_nan(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "state.json", {"loss": float("nan")})
    assert not (tmp_path / "state.json").exists()


def test_json_reads_back_as_it_was_returned_and_notices_a_change(tmp_path):
    path = tmp_path / "state.json"
    returned = write_json(path, {"b": (1, 2), 3: "c"})
    assert read_json(path) == returned
    assert returned["b"] == [1, 2]
    path.write_text(path.read_text().replace("2", "4", 1))
    with pytest.raises(ValueError, match="checksum"):
        read_json(path)
