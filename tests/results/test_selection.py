"""Which settings and which configurations a figure shows."""

from __future__ import annotations

import pandas as pd

from fcl_bench.results.figures.selection import lines, panels, seeds_text, select, shared, styles
from fcl_bench.results.summarise import summarise, used_runs
from tests.results.frames import made_up


def summary_of(*runs):
    return summarise(used_runs(made_up(*runs)))


def labels(panel):
    return list(panel.rows["label"])


def test_settings_never_share_a_panel():
    different = [
        {},
        {"beta": 1.0},
        {"faults": "random"},
        {"device": "cuda"},
        {"wire.dtype": "float16"},
        {"label_rate": 0.1},
        {"clients": 9},
    ]
    whole = {"protocol": "task-agnostic", "label_rate": 1.0, "faults": "none"}
    shown, left_out = panels(
        summary_of(*(whole | one for one in different), {**whole, "protocol": "task-pure"}), most=9
    )
    assert [len(panel.rows) for panel in shown] == [1] * 8
    assert len({panel.title for panel in shown}) == 8
    assert left_out == ""


def test_the_settings_with_most_configurations_are_shown_in_the_order_of_the_table():
    runs = [{"beta": beta, "method": f"m{i}"} for beta, count in ((0.1, 1), (0.5, 3), (1.0, 2)) for i in range(count)]
    shown, left_out = panels(summary_of(*runs), most=2)
    assert [panel.title for panel in shown] == ["beta 0.5", "beta 1"]
    assert left_out == "1 more setting has no panel here; to draw others: fcl-tables --figures --where beta=0.1."


def test_a_swept_quantity_does_not_split_a_panel_but_what_goes_with_it_does():
    runs = [{"clients": clients, "partition.min_size": size} for clients, size in ((5, 1), (10, 1), (10, 0), (100, 0))]
    shown, _ = panels(summary_of(*runs), ["clients"])
    assert [(panel.title, list(panel.rows["clients"])) for panel in shown] == [
        ("partition.min_size 1", [5, 10]),
        ("partition.min_size 0", [10, 100]),
    ]


def test_few_configurations_are_all_drawn():
    shown, _ = panels(summary_of(*({"method_rank": rank} for rank in range(1, 11))))
    fewer, said = lines(shown)
    assert (len(fewer[0].rows), said) == (10, "")


def test_of_many_each_family_keeps_its_most_run_then_most_accurate_and_each_method_its_best():
    sizes = [{"method_rank": rank, "A_avg": 50.0 + rank} for rank in (8, 16, 32, 64)]
    runs = [{**one, "method_complement": way} for one in sizes for way in ("drop", "floor")]
    # Less accurate, but run in both settings.
    runs += [{"method_rank": 16, "method_complement": "drop", "A_avg": 20.0, "beta": 1.0}]
    runs += [{"method": "afl", "A_avg": 1.0}, {"method": "centralised_ridge", "A_avg": 99.0}]
    shown, _ = panels(summary_of(*runs))
    fewer, said = lines(shown, most=4)
    assert labels(fewer[0]) == [
        "afl",
        "centralised_ridge",
        "fedran rank=16 complement=drop",
        "fedran rank=64 complement=floor",
    ]
    assert labels(fewer[1]) == ["fedran rank=16 complement=drop"]
    assert said.startswith("Of 9 configurations 3 are drawn")
    # The best of each method comes before a method's second.
    assert labels(lines(shown, most=3)[0][0]) == ["afl", "centralised_ridge", "fedran rank=16 complement=drop"]


def test_a_configuration_that_meets_a_gate_comes_after_a_sound_one_and_is_named_so():
    runs = [{"method_rank": 8, "A_avg": 50.0}, {"method_rank": 16, "A_avg": 90.0, "gates": "growth"}]
    shown, _ = panels(summary_of(*runs, {"method": "afl"}))
    assert labels(lines(shown, most=2)[0][0]) == ["afl", "fedran rank=8"]
    named = list(select(summary_of(*runs, {"method": "afl"})).legend())
    assert named == ["afl", "fedran rank=8", "fedran rank=16 (gate)"]


def test_lines_of_one_method_share_its_colour_and_marker_and_differ_in_dashes_or_filling():
    rows = summary_of({"method_rank": 8}, {"method_rank": 16}, {"method": "stsa"}, {"method": "centralised_ridge"})
    ceiling, first, second, other = styles(rows).values()
    assert (first["color"], first["marker"]) == (second["color"], second["marker"])
    assert first["linestyle"] != second["linestyle"]
    assert "marker" not in ceiling
    assert other["color"] != first["color"]


def test_the_caption_says_n_and_what_all_share():
    rows = summary_of({"seed": 0}, {"seed": 1}, {"method": "afl"})
    assert seeds_text(rows) == "n = 1 to 2 seeds, without a deviation where it is 1"
    assert seeds_text(rows[rows["n"] == 2]) == "n = 2 seeds"
    assert shared(rows) == "All: data digits, beta 0.1, clients 5, tasks 5, wire.dtype float32, device cpu."
    usual = {"adapt": "none", "faults": "none", "on_bad_upload": "fail", "protocol": "task-agnostic", "label_rate": 1}
    assert shared(summary_of(usual)) == shared(rows)
    assert "faults random" in shared(summary_of({"faults": "random"}))
    assert "on_bad_upload drop" in shared(summary_of({"on_bad_upload": "drop"}))
    mixed = pd.concat([rows, summary_of({"beta": 1.0})])
    assert "beta" not in shared(mixed)
