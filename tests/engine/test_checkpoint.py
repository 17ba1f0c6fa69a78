"""The state of unfinished work: what was saved last, or nothing, whatever happened to it."""

from __future__ import annotations

import json
import logging
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fcl_bench.engine import checkpoint as checkpoint_module
from fcl_bench.engine.checkpoint import GROWING, Checkpoint, for_disk
from fcl_bench.files import read_json, write_json

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


def test_files_have_the_mode_that_the_users_umask_gives(tmp_path):
    (tmp_path / "plain").touch()
    files = [*saved(tmp_path).folder.iterdir(), tmp_path / "plain"]
    assert len({file.stat().st_mode for file in files}) == 1


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


def growing(rows: int) -> dict[str, torch.Tensor]:
    """What a run has after so many tasks: a small model, and tables with a few rows a task."""
    return {
        "W": torch.full((3, 4), float(rows)),
        GROWING + "uploads": torch.arange(5 * rows * 7, dtype=torch.uint8).reshape(5 * rows, 7),
        GROWING + "answers": torch.arange(rows * 8).reshape(rows, 4, 2),
        GROWING + "server_seconds": torch.arange(rows, dtype=torch.float64) / 3,
    }


def row_files(checkpoint: Checkpoint) -> list[Path]:
    return sorted(checkpoint.folder.glob("rows-*.bin"))


def grown_to(folder, *sizes: int) -> Checkpoint:
    checkpoint = Checkpoint(folder / "checkpoint", 1)
    for rows in sizes:
        checkpoint.save({"tasks_done": rows}, growing(rows))
    return checkpoint


def holds_rows(checkpoint: Checkpoint, rows: int) -> bool:
    found = checkpoint.load()
    return found is not None and found[0]["tasks_done"] == rows and same(found[1], growing(rows))


@pytest.mark.parametrize("sizes", [(0,), (1,), (0, 1, 2), (1, 1, 4), (2, 5, 5, 6)])
def test_rows_are_added_to_and_loaded_as_a_whole(tmp_path, sizes):
    checkpoint = grown_to(tmp_path, *sizes)
    assert holds_rows(checkpoint, sizes[-1])
    assert holds_rows(Checkpoint(tmp_path / "checkpoint", 1), sizes[-1])
    assert len(row_files(checkpoint)) == 3


def test_a_loaded_state_is_gone_on_with_in_the_same_files(tmp_path):
    before = row_files(grown_to(tmp_path, 1, 2))
    again = Checkpoint(tmp_path / "checkpoint", 1)
    assert again.load() is not None
    again.save({"tasks_done": 3}, growing(3))
    assert row_files(again) == before
    assert holds_rows(Checkpoint(tmp_path / "checkpoint", 1), 3)


@pytest.mark.parametrize("sizes", [(5, 2), (3, 0)])
def test_a_state_with_fewer_rows_and_one_that_was_never_loaded_start_new_files(tmp_path, sizes):
    assert holds_rows(grown_to(tmp_path, *sizes), sizes[-1])
    fresh = Checkpoint(tmp_path / "checkpoint", 1)
    fresh.save({"tasks_done": 1}, growing(1))
    assert holds_rows(fresh, 1)
    assert len(row_files(fresh)) == 3


def test_each_row_is_written_once(tmp_path, monkeypatch):
    """Bytes, not seconds: those of a hundred tasks are twice those of fifty, and no JSON grows with the rows."""
    written: list[int] = []
    appending = checkpoint_module.appending

    @contextmanager
    def counted(path, size):
        with appending(path, size) as file:
            begin = file.tell()
            yield file
            written.append(file.tell() - begin)

    monkeypatch.setattr(checkpoint_module, "appending", counted)
    monkeypatch.setattr("fcl_bench.files._to_disk", lambda path: None)
    checkpoint, jsons = Checkpoint(tmp_path / "checkpoint", 1), []
    for rows in range(1, 101):
        checkpoint.save({"tasks_done": rows}, growing(rows))
        jsons.append((checkpoint.folder / "state.json").stat().st_size)
    grown = sum(tensor.nbytes for name, tensor in growing(100).items() if name.startswith(GROWING))
    assert sum(written) == grown == sum(file.stat().st_size for file in row_files(checkpoint))
    assert max(jsons) - min(jsons) < 40  # longer numbers
    assert holds_rows(Checkpoint(tmp_path / "checkpoint", 1), 100)


@pytest.mark.parametrize("moment", ["while rows are added", "between rows and state"])
def test_killed_while_adding_rows_the_state_before_is_there(tmp_path, monkeypatch, moment):
    """The tail that the killed process left is cut off by the next one that goes on."""
    checkpoint = grown_to(tmp_path, 1, 2)

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "while rows are added":
            patch.setattr("fcl_bench.files._to_disk", lambda path: dies() if path.suffix == ".bin" else None)
        else:
            patch.setattr(checkpoint_module, "write_json", dies)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save({"tasks_done": 9}, growing(9))
    assert sum(file.stat().st_size for file in row_files(checkpoint)) > sum(
        tensor.nbytes for name, tensor in growing(2).items() if name.startswith(GROWING)
    )
    again = Checkpoint(tmp_path / "checkpoint", 1)
    assert holds_rows(again, 2)
    again.save({"tasks_done": 3}, growing(3))
    assert holds_rows(Checkpoint(tmp_path / "checkpoint", 1), 3)
    assert sum(file.stat().st_size for file in row_files(again)) == sum(
        tensor.nbytes for name, tensor in growing(3).items() if name.startswith(GROWING)
    )


@pytest.mark.parametrize("damage", ["cut", "altered", "gone"])
def test_damaged_rows_are_told_and_nothing_is_taken_over(tmp_path, caplog, damage):
    checkpoint = grown_to(tmp_path, 1, 2)
    file = row_files(checkpoint)[0]
    {
        "cut": lambda: file.write_bytes(file.read_bytes()[:-1]),
        "altered": lambda: flip(file, 3),
        "gone": file.unlink,
    }[damage]()
    assert Checkpoint(tmp_path / "checkpoint", 1).load() is None
    assert "starting from the first task" in caplog.text


def test_a_checkpoint_of_an_older_form_is_left_alone_and_told(tmp_path, caplog):
    checkpoint = grown_to(tmp_path, 1)
    edit(checkpoint.folder / "state.json", format=1)
    assert checkpoint.load() is None
    assert "another version's form; starting from the first task" in caplog.text
    checkpoint.save({"tasks_done": 2}, growing(2))
    assert holds_rows(Checkpoint(tmp_path / "checkpoint", 1), 2)


def test_a_tensor_that_needs_no_copy_for_disk_is_not_copied():
    matrix = torch.rand(5, 5)
    made = for_disk({"G": matrix, "again": matrix, "part": matrix[1:3]})
    assert made["G"].data_ptr() == matrix.data_ptr()
    assert len({tensor.untyped_storage().data_ptr() for tensor in made.values()}) == 3


def test_what_a_killed_process_did_not_remove_is_removed_by_whoever_tidies(tmp_path, monkeypatch):
    checkpoint = saved(tmp_path)

    def killed(self):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "tidy", killed)
        with pytest.raises(SystemExit):
            checkpoint.save(STATE, tensors(1))
    again = Checkpoint(tmp_path / "checkpoint", 1)
    assert holds(again, 1)
    assert files(again) == {"state.json", "tensors-1.safetensors", "tensors-2.safetensors"}
    again.tidy()
    assert files(again) == {"state.json", "tensors-2.safetensors"}
    assert holds(again, 1)
