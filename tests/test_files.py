"""Whole or absent, on disk or an error, and texts that no program obeys."""

from __future__ import annotations

import csv
import errno
import os

import pytest

from fcl_bench.errors import UserError, printable
from fcl_bench.files import appending, csv_cell, file_checksum, replacing, user_path


def failing(monkeypatch, error: int, folders: bool) -> None:
    """fsync of files, or of folders, fails with this error."""
    real = os.fsync

    def fsync(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}") == folders:
            raise OSError(error, os.strerror(error))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize(
    ("error", "folders"), [(errno.EIO, False), (errno.ENOSPC, False), (errno.EINVAL, False), (errno.EIO, True)]
)
def test_what_may_not_be_on_disk_is_an_error(tmp_path, monkeypatch, error, folders):
    failing(monkeypatch, error, folders)
    with pytest.raises(OSError) as told, replacing(tmp_path / "file") as temporary:
        temporary.write_text("content")
    assert told.value.errno == error
    assert told.value.filename.startswith(str(tmp_path))
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "file"] == []
    with pytest.raises(OSError), appending(tmp_path / "rows", 0) as file:
        file.write(b"rows")


def test_network_file_systems_that_sync_no_folders_will_do(tmp_path, monkeypatch):
    failing(monkeypatch, errno.EINVAL, folders=True)
    with replacing(tmp_path / "file") as temporary:
        temporary.write_text("content")
    assert (tmp_path / "file").read_text() == "content"


def test_a_failed_sync_is_one_line_of_the_command(command, tmp_path, monkeypatch):
    failing(monkeypatch, errno.EIO, folders=False)
    code, _, err = command("method=fedncm", "tasks=2", "clients=2", f"out={tmp_path}/out")
    assert (code, err.count("\n")) == (2, 1)
    assert "writing failed" in err
    assert "Input/output error" in err
    assert not list(tmp_path.glob("out/runs/*/run.json"))


def test_no_file_but_a_regular_one_is_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="it is a FIFO"):
        file_checksum(tmp_path / "fifo")
    with pytest.raises(OSError, match="it is a folder"):
        file_checksum(tmp_path)
    with pytest.raises(FileNotFoundError):
        file_checksum(tmp_path / "none")


@pytest.mark.parametrize("value", ["=HYPERLINK(1)", "+x", "-x", "@SUM", "\tx", "\rx", "-", "=1+1"])
def test_a_spreadsheet_takes_no_cell_for_a_formula(value):
    assert csv_cell(value) == f"'{value}"


@pytest.mark.parametrize("value", ["-1.5", "+3", "-1e-9", "-inf", "plain", "", "a=b", -1.5, 3, None, True])
def test_numbers_and_plain_texts_are_cells_as_they_are(value):
    assert csv_cell(value) is value


def test_formulas_are_quoted_in_every_file_of_a_table(tmp_path):
    import pandas as pd

    from fcl_bench.results.tables.markup import _csv

    frame = pd.DataFrame({"=label": ["=cmd", "stsa"], "A_T": [-1.5, 2.0], "n": [1, 2], "size": ["-", -0.5]})
    rows = list(csv.reader(_csv(frame).splitlines()))
    # A lone "-" is no formula, but what stands in place of a number.
    assert rows == [["'=label", "A_T", "n", "size"], ["'=cmd", "-1.5", "1", "-"], ["stsa", "2.0", "2", "-0.5"]]


def test_a_path_is_a_path():
    assert user_path("out", "~/x").is_absolute()
    assert str(user_path("out", "a/../b")) == "a/../b"
    for wrong in ("~nobody9/x", "x" * 300, "x/" * 3000, "a\0b"):
        with pytest.raises(UserError, match="^out="):
            user_path("out", wrong)


def test_messages_are_short_and_printable():
    told = str(UserError(f"key={'x' * 9999} \x1b[31m \u202e is wrong", "this\nor that"))
    assert told.isprintable()
    assert len(told) < 400
    assert told.startswith("key=xxx")
    assert told.endswith(r" \x1b[31m \u202e is wrong (this or that)")
    assert "more]xxx" in told
    assert len(str(UserError("many words " * 9999, "none"))) < 2100
    assert str(UserError("a" * 240, "b")) == "a" * 240 + " (b)"
    assert printable("two\nlines\tand é") == "two\nlines\tand é"
