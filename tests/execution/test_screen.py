"""What a run looks like on the terminal."""

from __future__ import annotations

import re

from fcl_bench.execution.screen import print_record

COUNTS = ("synthetic_images", "sample_gradients", "reconstructed_images")
COUNTS += ("one_sample_sums", "one_sample_moments", "revealed_samples")


def record_of(accuracy: list[float], **metrics) -> dict:
    undefined = dict.fromkeys(("forgetting", "retention", "stability", "plasticity"), 1.0)
    return {
        "method": "fedran",
        "data": "digits",
        "backbone": "pixels",
        "partition": "dirichlet",
        "beta": 0.1,
        "seed": 0,
        "tasks": len(accuracy),
        "clients": 5,
        "metrics": {"accuracy": accuracy, "A_avg": 2.0, "A_T": 3.0, **undefined, **metrics},
        "task_aware": {"A_avg": 4.0, "A_T": 5.0, **undefined},
        "protocol": "task-agnostic",
        **dict.fromkeys(("faults", "noise", "secure", "adapt"), "none"),
        "rounds": None,
        "validation": None,
        "gates": [],
        "partition_skew": {"total_variation": 0.5, "percentile": None, "draws": 0, "why": "x"},
        "transport": {"name": "in_process", "processes": 1},
        "absences": {},
        "privacy": {**dict.fromkeys(COUNTS, 0), "guarantee": None},
        **{"client_storage_bytes": {}, "client_storage_max_bytes": 0, "client_samples_kept": 0},
        "routing": None,
        "adaptation": None,
        "communication": {
            "up_max_bytes": 2 * 2**20,
            "up_total_max_bytes": 9000,
            "up_total_bytes": 10**9,
            "down_max_bytes": 16,
            "by_stage": {"statistics": {"up_max_bytes": 2 * 2**20}},
            "wire": {"dtype": "float32", "gram": "full", "columns": "task", "projection": "seed"},
            "raw": None,
            "accounting": {"fedran_mib": 134.2656, "stsa_mib": 1.0},
        },
        "runtime": {
            "seconds_per_task": 1.0,
            "client_seconds": 1.0,
            "server_seconds": 1.0,
            "feature_seconds": 0.0,
            "feature_cost_seconds": 866.0,
            "feature_cache_hit": True,
            "total_seconds": 1.0,
            "peak_memory_bytes": 2**30,
        },
        "labels": {"rate": 1.0, "samples": 100, "labelled": 100, "accepted": 0, "right": 0},
        "bounds": [],
        "environment": {"device": "cpu", "threads": 2},
    }


def test_undefined_metrics_say_so(capsys):
    print_record(record_of([75.0], forgetting=None), "outputs/runs/x")
    out = capsys.readouterr().out
    assert "not defined" in out
    assert "nan" not in out.lower()
    assert out.rstrip().endswith("run folder: outputs/runs/x")


def test_sizes_are_in_readable_units_and_a_cache_hit_shows_what_it_saved(capsys):
    print_record(record_of([75.0, 60.0]), "x")
    out = capsys.readouterr().out
    for text in ("2.00 MiB", "8.8 KiB", "16 B", "953.67 MiB", "134.27 MiB", "866.00 s"):
        assert text in out


def test_a_long_stream_shows_its_first_and_last_task_and_few_between(capsys):
    print_record(record_of([float(100 - t / 10) for t in range(200)]), "x")
    found = re.findall(r"^│ (\d+) +│ +([\d.]+) │", capsys.readouterr().out, flags=re.M)
    assert len(found) == 12
    assert (found[0], found[-1]) == (("1", "100.00"), ("200", "80.10"))
    assert all(float(value) == 100 - (int(task) - 1) / 10 for task, value in found)


def test_scarce_labels_are_counted(capsys):
    record = record_of([75.0, 60.0])
    print_record(record, "x")
    assert "given a label" not in capsys.readouterr().out
    record["labels"] = {"rate": 0.2, "samples": 100, "labelled": 20, "accepted": 60, "right": 45}
    print_record(record, "x")
    out = capsys.readouterr().out
    for line in (r"training samples +100", r"labelled +20", r"given a label by their client +60", r"right +45"):
        assert re.search(line, out)


def test_what_clients_keep_has_a_table_where_they_keep_something(capsys):
    record = record_of([75.0, 60.0])
    kept = {"client_storage_bytes": {}, "client_storage_max_bytes": 0, "client_samples_kept": 0}
    print_record({**record, **kept}, "x")
    assert "Stored by a client" not in capsys.readouterr().out
    kept = {"client_storage_bytes": {"images": 3000}, "client_storage_max_bytes": 3000, "client_samples_kept": 15}
    print_record({**record, **kept}, "x")
    out = capsys.readouterr().out
    for line in (r"images +2\.9 KiB", r"raw samples \(images, features\) +15"):
        assert re.search(line, out)
    kept = {"client_storage_bytes": {"images": 3000, "model": 900}, "client_storage_max_bytes": 3100}
    print_record({**record, "client_samples_kept": 15, **kept}, "x")
    assert re.search(r"all kinds together +3\.0 KiB", capsys.readouterr().out)


def test_uploads_stand_beside_raw_samples_with_a_warning_where_they_are_larger(capsys):
    record = record_of([75.0, 60.0])
    raw = {"kind": "features", "sample_bytes": 100, "busiest_bytes": 2048, "total_bytes": 2 * 10**8}
    record["communication"]["raw"] = {**raw, "uploads": 1200, "larger": 1100}
    print_record(record, "x")
    out = capsys.readouterr().out
    assert re.search(r"raw samples, same client and task +2\.0 KiB", out)
    assert re.search(r"raw samples, everyone +190\.73 MiB", out)
    assert "warning: 1,100 of 1,200 uploads (per client and task) are larger than the client's raw features" in out
    assert "together are 5.00 times as large" in out
    record["communication"]["raw"] = {**raw, "total_bytes": 10**10, "uploads": 1200, "larger": 1}
    print_record(record, "x")
    out = capsys.readouterr().out
    assert "warning: 1 of 1,200" in out
    assert "times as large" not in out
    record["communication"]["raw"] = {**raw, "uploads": 1200, "larger": 0}
    print_record(record, "x")
    assert "warning" not in capsys.readouterr().out


def test_samples_that_left_alone_have_a_table(capsys):
    record = record_of([75.0, 60.0])
    privacy = record["privacy"]
    told = {"one_sample_sums": 1234, "one_sample_moments": 0, "revealed_samples": 12}
    print_record({**record, "privacy": {**privacy, **told}}, "x")
    out = capsys.readouterr().out
    assert re.search(r"sums of one sample that clients sent +1,234", out)
    assert re.search(r"training samples that were sent alone +12\n", out)
    assert "second moments" not in out
    print_record(record, "x")
    assert "left the clients" not in capsys.readouterr().out
    print_record({**record, "privacy": {**privacy, "sample_gradients": 3}}, "x")
    assert "gradients of single samples" in capsys.readouterr().out


def test_lost_clients_are_shown_without_faults(capsys):
    """Of a federation whose rounds go on without them."""
    counts = {"silent": 0, "gone": 0, "lost": 3, "late": 0, "late_arrived": 0, "late_absorbed": 0, "late_dropped": 0}
    print_record({**record_of([75.0]), "faults": "none", "absences": counts}, "x")
    assert re.search(r"lost on the way, or too late +3", capsys.readouterr().out)
    print_record({**record_of([75.0]), "faults": "none", "absences": {**counts, "lost": 0}}, "x")
    assert "Turns of clients that failed" not in capsys.readouterr().out
