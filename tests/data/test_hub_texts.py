"""Text data sets of the hub, and any image set: a hub on this machine has repositories laid out as the real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tests.small_runs import settings_for

#: Data set -> repository, folder of its files, their endings, label column, and labels of its three classes.
LAYOUTS = {
    "ag_news": ("fancyzhx/ag_news", "data", "{}-00000-of-00001", "label", ["World", "Sports", "Business"]),
    "banking77": ("legacy-datasets/banking77", "data", "{}-00000-of-00001", "label", ["age_limit", "atm", "card"]),
    "clinc150": ("clinc/clinc_oos", "plus", "{}-00000-of-00001", "intent", ["oos", "yes", "no"]),
    "newsgroups": ("SetFit/20_newsgroups", "default", "{}/0000", "label_text", ["sci.space", "rec.autos", "alt"]),
}


def write(root: Path, name: str) -> Path:
    """Six training and three test texts, of which one is empty, as in 20 Newsgroups; labels by number but there."""
    import datasets

    repo, folder, ending, label, names = LAYOUTS[name]
    numbered = name != "newsgroups"
    for side, count in (("train", 6), ("test", 3)):
        labels = [number % 3 if numbered else names[number % 3] for number in range(count)]
        rows = {"text": ["", *(f"{side} {number}" for number in range(1, count))], label: labels}
        kind = datasets.ClassLabel(names=names) if numbered else datasets.Value("string")
        features = datasets.Features({"text": datasets.Value("string"), label: kind})
        path = root / repo / folder / f"{ending.format(side)}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict(rows, features).to_parquet(path)
    return root / repo


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_text_set_downloads_with_its_own_settings_and_reads_the_same_from_a_folder(name, hub, tmp_path):
    folder = write(hub.root, name)
    pd.DataFrame({"text": ["other"], "intent": [0]}).to_parquet(folder / "other-00000-of-00001.parquet")
    source = settings_for(tmp_path, f"data={name}").data
    [wanted] = source.repositories()
    hub.commits[wanted.repo] = wanted.revision if "/" not in wanted.revision else hub.commit(wanted.repo)
    if "/" in wanted.revision:  # a branch, which the small hub has not
        source = settings_for(tmp_path, f"data={name}", "data.revision=main").data
    data, copy = source.load(), settings_for(tmp_path, f"data={name}", f"data.path={folder}").data.load()
    names = sorted(set(LAYOUTS[name][4]) - {"oos"})
    assert (data.kind, list(data.class_names)) == ("texts", names)
    assert (len(data.train), len(data.test)) == ((4, 2) if name == "clinc150" else (6, 3))
    assert data.fingerprint == copy.fingerprint
    assert data.origin == f"{wanted.repo} at {hub.commit(wanted.repo)}"


def test_a_text_set_takes_a_file_of_ones_own(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"t{number},c{number % 2}\n" for number in range(20)))
    data = settings_for(tmp_path, "data=ag_news", f"data.path={tmp_path}/a.csv").data.load()
    assert (len(data.train), len(data.test), data.class_names) == (16, 4, ("c0", "c1"))


def test_any_image_set_of_the_hub_needs_its_name_alone(hub, tmp_path):
    import datasets

    pixels = [np.full((4, 4, 3), number, dtype=np.uint8) for number in range(9)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "ant"])})
    for side, rows in (("train", range(6)), ("test", range(6, 9))):
        path = hub.root / "some/pets" / "data" / f"{side}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        images = {"image": [Image.fromarray(pixels[row]) for row in rows], "label": [row % 2 for row in rows]}
        datasets.Dataset.from_dict(images, features).to_parquet(path)
    data = settings_for(tmp_path, "data=imagetable", "data.repo=some/pets", "data.revision=main").data.load()
    assert (data.kind, data.class_names, len(data.train), len(data.test)) == ("images", ("ant", "cat"), 6, 3)
    assert data.test.labels.tolist() == [1, 0, 1]
    assert [np.asarray(image).max() for image in data.test.inputs.decoded([2, 0])] == [8, 6]
    copy = settings_for(tmp_path, "data=imagetable", f"data.path={hub.root}/some/pets").data.load()
    assert copy.fingerprint == data.fingerprint
