"""Files that are not what their place says: special files, formats that run programs, columns without images."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fcl_bench.data.images.stored import FileImages
from fcl_bench.data.sources.hub_images import HubImages
from fcl_bench.data.sources.image_source import ImageFolder
from fcl_bench.errors import UserError
from fcl_bench.tracking.console import log_to_terminal

RASTER = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "bmp": "BMP", "gif": "GIF", "tif": "TIFF", "ppm": "PPM"}
PIXELS = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    for side in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / side / name).mkdir(parents=True)
            Image.fromarray(PIXELS).save(tmp_path / side / name / "0.png")
    return tmp_path


def put_special(path: Path, kind: str) -> None:
    """A FIFO, a device or a folder in place of the file."""
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("suffix", list(RASTER))
def test_seven_formats_are_read(tmp_path, suffix):
    Image.fromarray(PIXELS).save(tmp_path / f"x.{suffix}", RASTER[suffix])
    assert FileImages(tmp_path, [tmp_path / f"x.{suffix}"])[0].size == (8, 8)


def other_formats() -> list[str]:
    Image.init()
    return sorted(set(Image.SAVE) - set(RASTER.values()) - {"MPO"})


@pytest.mark.filterwarnings("ignore:.*image format is deprecated:DeprecationWarning")  # Pillow's, of IM
@pytest.mark.parametrize("kind", other_formats())
def test_no_other_is_whatever_its_name(tmp_path, kind):
    """Pillow itself would open most of them."""
    path = tmp_path / "x.png"
    # Under a suffix of its own: Pillow's SPIDER takes the suffix that it writes for its own from then on.
    written = tmp_path / f"x.{kind.lower()}-of-this-test"
    for mode in ("RGB", "L", "1", "P", "F"):
        try:
            Image.fromarray(PIXELS).convert(mode).save(written, kind)
            written.rename(path)
            break
        except Exception:
            path.write_bytes(EPS)
    if kind in ("JPEG2000", "PDF", "XBM", "PALM"):
        assert path.stat().st_size > 0
    with pytest.raises(UserError, match=r"cannot be read: not an image in PNG, JPEG, WEBP, BMP, GIF, TIFF or PPM"):
        FileImages(tmp_path, [path])[0]


def test_eps_is_not_looked_into(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin.EpsImageFile, "__init__", lambda *_, **__: pytest.fail("its plugin was called"))
    (tmp_path / "x.png").write_bytes(EPS)
    with pytest.raises(UserError, match="not an image"):
        FileImages(tmp_path, [tmp_path / "x.png"])[0]


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
def test_a_special_file_among_images_is_named(folder, kind):
    path = folder / "train" / "dog" / "0.png"
    put_special(path, kind)
    with pytest.raises(UserError, match=rf"dog/0\.png cannot be read: it is a {kind} \("):
        ImageFolder(path=str(folder)).load()


def hub(folder: Path, **columns: list) -> HubImages:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    for side in ("train", "test"):
        datasets.Dataset.from_dict(columns).to_parquet(folder / f"{side}-00000-of-00001.parquet")
    return HubImages("made", "a/b", None, "img", "label", path=str(folder))


@pytest.mark.parametrize("column", [[1, 2], [1.5, 2.5], [[1, 2], [3, 4]], [True, False], [{"x": 1}, {"x": 2}]])
def test_a_column_of_numbers_holds_no_images(tmp_path, column):
    with pytest.raises(UserError, match="column img of train holds no encoded images"):
        hub(tmp_path, img=column, label=[0, 1]).load()


@pytest.mark.parametrize("column", [["a", "b"], [None, None]])
def test_a_column_of_paths_embeds_none(tmp_path, column):
    with pytest.raises(UserError, match="column img refers to files that are not embedded"):
        hub(tmp_path, img=column, label=[0, 1]).load()


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device"])
def test_a_special_file_in_place_of_a_table_is_named(tmp_path, kind):
    source = hub(tmp_path, img=[b"x", b"y"], label=[0, 1])
    path = tmp_path / "train-00000-of-00001.parquet"
    put_special(path, kind)
    with pytest.raises(UserError, match=rf"train-00000-of-00001\.parquet is a {kind} \("):
        source.load()


def test_a_damaged_table_is_one_message(tmp_path, caplog, capfd):
    """The library logs its error as well as raising it."""
    source = hub(tmp_path, img=[b"x", b"y"], label=[0, 1])
    (tmp_path / "train-00000-of-00001.parquet").write_bytes(b"PAR1junk")
    capfd.readouterr()
    with pytest.raises(UserError, match="is not a readable parquet file"):
        source.load()
    assert capfd.readouterr().err == ""
    assert "datasets" not in {record.name.partition(".")[0] for record in caplog.records}


def test_what_libraries_say_is_one_line_of_ours(capsys, monkeypatch):
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    with warnings.catch_warnings():  # which undoes what is done to warnings
        warnings.simplefilter("always")
        log_to_terminal("fcl-bench")
        warnings.warn("Corrupt EXIF data.\n  Expecting \x1b[31m4 bytes", stacklevel=1)
    assert capsys.readouterr().err == "fcl-bench: Corrupt EXIF data. Expecting \\x1b[31m4 bytes\n"
    lone = logging.Logger("library")  # without the handlers of a test run
    lone.error("two\nlines")
    assert capsys.readouterr().err == "fcl-bench: library: two lines\n"
