"""What a run looks like on the terminal."""

from __future__ import annotations

import re

from fcl_bench.execution.screen import print_record

RAW = {"kind": "features", "sample_bytes": 100, "busiest_bytes": 2048, "total_bytes": 2 * 10**8}
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
    assert "run folder: outputs/runs/x\n" in out
    assert out.splitlines()[-1].startswith("next: fcl-tables puts runs side by side; ")


def test_one_table_answers_and_the_rest_is_asked_for(capsys):
    record = record_of([75.0, 60.0], forgetting=12.5)
    record["communication"]["raw"] = {**RAW, "uploads": 1200, "larger": 1100}
    print_record(record, "my out/runs/x")
    out = capsys.readouterr().out
    rows = re.findall(r"^│ (.+?) +│ +(\S+(?: \w+)?) │$", out, flags=re.M)
    assert rows == [
        ("after task 1", "75.00"),
        ("after task 2", "60.00"),
        ("A_avg", "2.00"),
        ("A_T", "3.00"),
        ("forgetting", "12.50"),
        ("upload, busiest client and task", "2.00 MiB"),
        ("seconds per task (mean client + server)", "1.000 s"),
        ("seconds in all", "1.00 s"),
    ]
    assert out.count("┏") == 1
    for text in ("larger than", "134.27", "partition:", "peak memory", "warning"):
        assert text not in out
    assert "next: fcl-tables --out 'my out' puts" in out
    print_record(record, "outputs/runs/x", details=True)
    assert "details=true" not in capsys.readouterr().out


def test_details_are_the_measures_of_run_json_under_their_keys(capsys):
    record = record_of([float(100 - t) for t in range(20)], stability_by_task=[None, 98.0])
    record["communication"]["raw"] = RAW
    kept = {"client_storage_bytes": {"images": 3000}, "client_storage_max_bytes": 3100, "report": {"name": "[b]"}}
    print_record({**record, **kept}, "x", details=True)
    told = dict(re.findall(r"^([\w.]+) +(.+?) *$", capsys.readouterr().out, flags=re.M))
    assert told["metrics.accuracy"].startswith("[100.0, 99.0, 98.0, ")
    assert told["metrics.stability_by_task"] == "[None, 98.0]"
    assert told["communication.accounting.fedran_mib"].startswith("134.2")
    assert told["communication.raw.total_bytes"] == str(RAW["total_bytes"])
    assert told["runtime.feature_cache_hit"] == "True"
    assert (told["report.name"], told["client_storage_bytes.images"]) == ("[b]", "3000")
    assert told["client_storage_max_bytes"] == "3100"
    assert not [key for key in told if key.startswith(("files", "features"))]


def test_a_long_stream_shows_its_first_and_last_task_and_few_between(capsys):
    print_record(record_of([float(100 - t / 10) for t in range(200)]), "x")
    found = re.findall(r"^│ after task (\d+) +│ +([\d.]+) │", capsys.readouterr().out, flags=re.M)
    assert len(found) == 12
    assert (found[0], found[-1]) == (("1", "100.00"), ("200", "80.10"))
    assert all(float(value) == 100 - (int(task) - 1) / 10 for task, value in found)
