"""`preview=true`: what is printed, drawn and written, and that nothing is run."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from fcl_bench.execution.plan import deal
from fcl_bench.execution.preview import count, preview_figure
from tests.conftest import write_features
from tests.small_runs import settings_for

SMALL = ("tasks=3", "clients=4", "partition.min_size=0")


@pytest.fixture
def nothing_runs(monkeypatch):
    """A preview that opens a backbone, extracts a feature or starts a federation fails."""

    def forbidden(*_, **__):
        raise AssertionError("a preview runs nothing")

    for name in (
        "execution.run.run",
        "execution.plan.make_plan",
        "execution.run.Federation",
        "backbones.backbone.Pixels.open",
    ):
        monkeypatch.setattr(f"fcl_bench.{name}", forbidden)


def rows_of(out: str) -> list[list[str]]:
    """The cells of the printed table's rows."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]


@pytest.mark.slow_cases("class_incremental", "class_overlap", "si_blurry")
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("split", ["class_incremental", "class_overlap", "si_blurry"])
def test_a_preview_shows_each_task_and_runs_nothing(split, command, tmp_path):
    code, out, err = command(f"out={tmp_path}", f"split={split}", "preview=true", *SMALL)
    assert (code, err) == (0, "")
    assert f"digits, {split}: 3 tasks, 4 clients, dirichlet beta 0.1, seed 0" in out
    folder = tmp_path / re.search(rf"preview: {tmp_path}/(\S+) ", out).group(1)
    assert folder.parent == tmp_path / "previews"
    assert folder.name.startswith(f"digits-{split}-dirichlet-")
    written = {path.relative_to(folder).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert written - {".lock"} == {"split.png", "counts.csv"}
    counts = pd.read_csv(folder / "counts.csv")
    dealt = deal(settings_for(tmp_path, f"split={split}", *SMALL))
    rows = rows_of(out)
    assert len(rows) == 3
    for task, row in zip(dealt.stream.tasks, rows, strict=True):
        t = task.index
        sizes = [len(part) for part in dealt.shards[t]]
        here = counts[(counts["side"] == "train") & (counts["task"] == t)]
        tested = counts[(counts["side"] == "test") & (counts["task"] == t)]
        assert row[:5] == [
            *(str(t + 1), str(len(task.columns)), str(len(task.new_columns))),
            *(str(len(dealt.stream.train[t])), str(len(dealt.stream.test[t]))),
        ]
        assert row[5] == f"{min(sizes)}-{max(sizes)}"
        assert row[6] == f"{len(here) / 4:.1f}"
        assert tested["samples"].sum() == len(dealt.stream.test[t])
        for client, indices in enumerate(dealt.shards[t]):
            held = here[here["client"] == client]
            labels, numbers = np.unique(dealt.dataset.train.labels[indices], return_counts=True)
            assert dict(zip(held["class"], held["samples"], strict=True)) == dict(zip(labels, numbers, strict=True))
            assert held["labelled"].tolist() == held["samples"].tolist()


@pytest.mark.usefixtures("nothing_runs")
def test_what_stays_at_sites_cannot_be_shown(command, tmp_path):
    np.savez(tmp_path / "test.npz", x=np.eye(4), column=np.arange(4), task=np.arange(4) // 2)
    given = ("data=sites", f"data.path={tmp_path / 'test.npz'}", "transport=flower", "split=given", "tasks=2")
    code, _, err = command(f"out={tmp_path}", "preview=true", *given)
    assert (code, err.count("\n")) == (2, 1)
    assert "preview=true: the training samples of data=sites stay at the clients' sites" in err


@pytest.mark.slow
def test_a_preview_counts_the_labels_that_clients_know(command, tmp_path):
    code, out, _ = command(f"out={tmp_path}", "preview=true", "label_rate=0.3", *SMALL)
    assert code == 0
    dealt = deal(settings_for(tmp_path, "label_rate=0.3", *SMALL))
    assert [int(row[4]) for row in rows_of(out)] == [int(dealt.labelled[m].sum()) for m in dealt.stream.train]
    [file] = (tmp_path / "previews").glob("*/counts.csv")
    assert pd.read_csv(file)["labelled"].sum() == dealt.labelled.sum()


@pytest.mark.slow
def test_a_sweep_previews_every_combination_and_one_error_does_not_stop_it(command, tmp_path):
    sweep = ("split=class_overlap,domain_incremental", "method=afl,stsa")
    code, out, err = command("-m", f"out={tmp_path}", "preview=true", *sweep, *SMALL)
    assert code == 2
    assert err.count("fcl-bench: error: split=domain_incremental: data=digits has no domains (") == 2
    assert out.count("preview: ") == 2
    # The method has no part in a split, so it is there once.
    assert len(list((tmp_path / "previews").iterdir())) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_preview_reads_a_feature_file_and_has_no_part_in_the_run_id(command, tmp_path):
    path = write_features(tmp_path / "f.npz")
    data = ("data=features", f"data.path={path}")
    plain, previewed = (settings_for(tmp_path, *data, *extra) for extra in ((), ("preview=true",)))
    assert plain.identity() == previewed.identity()
    assert command(f"out={tmp_path}", "preview=true", *data, "tasks=2", "clients=2")[0] == 0
    assert len(list(tmp_path.glob("previews/features-*/split.png"))) == 1


@pytest.mark.slow
def test_wrong_input_is_one_line_and_leaves_nothing(command, tmp_path):
    for typed, message in (
        ("preview=perhaps", "preview=perhaps has the wrong type (true or false)"),
        ("tasks=11", "tasks=11 is more than the 10 classes"),
        ("split=class_overlap split.shared=3", "split.shared=3 with tasks=5 needs 18 classes, and there are 10"),
        ("split=si_blurry split.blurry=2", "split.blurry=2.0 is out of range (a share, 0 to 1)"),
        ("split=domain_incremental split.order=real", "split.order=real has the wrong type (a list of texts or null)"),
        ("split.shuffle=false split.order_seed=1", "split.order_seed=1 has nothing to draw"),
    ):
        code, _, err = command(f"out={tmp_path}", "preview=true", *typed.split())
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow_cases("20-100-345-100", "60-100-60-33")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("tasks", "clients", "classes", "drawn"),
    [(1, 1, 1, 1), (5, 5, 100, 5), (20, 100, 345, 100), (6, 250, 345, 100), (60, 100, 60, 33), (3000, 2, 2, 1)],
)
def test_the_picture_has_a_cell_for_every_count(tasks, clients, classes, drawn, tmp_path):
    rng = np.random.default_rng(0)
    place = np.unique(rng.integers(0, (tasks, clients, classes), (400, 3)), axis=0)
    place = np.unique(np.concatenate([place, [[tasks - 1, 0, 0]]]), axis=0)
    cells = np.concatenate([place, rng.integers(1, 500, (len(place), 1))], axis=1)
    counts = pd.DataFrame(cells, columns=["task", "client", "column", "samples"])
    figure = preview_figure("title", counts, np.arange(classes), clients)
    figure.savefig(tmp_path / "figure.png", dpi=40)
    shown = np.ma.filled(figure.axes[0].images[0].get_array(), 0)
    assert shown.shape == (classes, tasks * drawn)
    expected = np.zeros_like(shown)
    for task, client, column, number in cells:
        if client < drawn:
            expected[column, task * drawn + client] = number
    np.testing.assert_array_equal(shown, expected)
    assert figure.get_suptitle() == (
        "title" if drawn == clients else f"title\n(the first {drawn} of {clients} clients)"
    )


def test_counts_are_those_of_a_loop_over_the_samples(tmp_path):
    dealt = deal(settings_for(tmp_path, "split=si_blurry", "label_rate=0.5", *SMALL))
    expected: dict[tuple[int, int, int], list[int]] = {}
    for t, clients in enumerate(dealt.shards):
        for k, indices in enumerate(clients):
            for sample in indices.tolist():
                cell = expected.setdefault((t, k, int(dealt.stream.train_columns[sample])), [0, 0])
                cell[0] += 1
                cell[1] += bool(dealt.labelled[sample])
    found = count(dealt)
    keys = zip(found.task.tolist(), found.client.tolist(), found.column.tolist(), strict=True)
    values = zip(found.samples.tolist(), found.labelled.tolist(), strict=True)
    assert {key: list(value) for key, value in zip(keys, values, strict=True)} == expected
