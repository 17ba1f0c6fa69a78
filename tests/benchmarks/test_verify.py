"""Numbers on pages: each has a command or a reason, a wrong one is found, and what is on no page is an error."""

from __future__ import annotations

import logging

import pandas as pd
import pytest

from benchmarks.verify import __main__ as verify
from benchmarks.verify import claims, sources
from benchmarks.verify.pages import Page, Span
from fcl_bench.errors import UserError

TEXT = """# A page
Its median is 12.5 %, beside `0.25` in code and 3 of nothing; [link](a/1.5).

    fcl-bench -m method=afl,stsa data=digits seed=0,1

## Results
| | A_T | upload (MiB) |
|---|---:|---:|
| AFL, lambda 0.1 | 95.21 ± 0.40 | 7 |
| STSA | 96.00 ± 1.00 | 0.5 |
"""
COMMAND = "fcl-bench -m method=afl,stsa data=digits seed=0,1"
TABLE = {
    "under": "Results",
    "source": "runs",
    "rows": {"AFL, lambda 0.1": "method=afl", "STSA": "method=stsa"},
    "columns": {2: "mean A_T, std A_T", 3: "one up_max_mib"},
}
MEDIAN = {"text": "Its median is {} %", "source": "sum", "is": ["5 + 7.5"]}
SOURCES = {"runs": {"run": COMMAND, "cost": 5}, "sum": {"arithmetic": "a + b"}}


def claimed(*entries: dict, text: str = TEXT) -> claims.Claimed:
    return claims.of_page(Page("page.md", text), {"sources": SOURCES, "claims": list(entries)})


def row(method: str, seed: int, A_T: float, up: float) -> dict:
    return {"method": method, "seed": seed, "A_T": A_T, "up_max_mib": up}


RUNS = [row("afl", 0, 94.93, 7), row("afl", 1, 95.49, 7), row("stsa", 0, 95.2929, 0.5), row("stsa", 1, 96.7071, 0.5)]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs that have been carried out, as a command gives them."""
    made = sources.Bench(tmp_path, {}, seconds=100)
    for one in RUNS:
        made.rows[(f"method={one['method']}", "data=digits", f"seed={one['seed']}")] = one
    return made


def states(page: claims.Claimed, bench: sources.Bench) -> dict[str, str]:
    return {claim.printed: verify.checked(claim, bench)[0] for claim in page.claims}


def test_what_looks_measured_is_told_unless_claimed():
    candidates = [TEXT[span.start : span.end] for span in Page("page.md", TEXT).candidates()]
    assert candidates == ["12.5", "0.1", "95.21", "0.40", "7", "96.00", "1.00", "0.5"]
    assert claimed(MEDIAN, TABLE).silent() == []  # "lambda 0.1" is a setting wherever it stands
    assert claimed(MEDIAN).silent() == [
        f"page.md:{line}: {number} has no command"
        for line, number in [(9, "95.21"), (9, "0.40"), (9, "7"), (10, "96.00"), (10, "1.00"), (10, "0.5")]
    ]
    assert claimed(MEDIAN, {**TABLE, "columns": [2, 3], "exempt": "a setting"}).silent() == []


def test_numbers_are_compared_to_their_last_digit(bench):
    assert states(claimed(MEDIAN, TABLE), bench) == dict.fromkeys(
        ["12.5", "95.21", "0.40", "7", "96.00", "1.00", "0.5"], verify.OK
    )


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("95.21", "95.20"), ("± 0.40", "± 0.41"), ("96.00", "96.0001"), ("| 7 |", "| 8 |"), ("12.5", "12.6")],
)
def test_a_planted_wrong_number_is_found(right, wrong, bench):
    planted = claimed(MEDIAN, TABLE, text=TEXT.replace(right, wrong))
    assert [number for number, state in states(planted, bench).items() if state == verify.DIFFERS] == [
        wrong.strip("± |")
    ]


def unread(**told) -> claims.Claim:
    return claims.Claim("page.md", 1, "2.5", Span(0, 3), sources.Source(told), {}, "")


def test_of_seconds_only_the_command_is_told_and_a_test_passes_or_fails(bench, monkeypatch):
    assert verify.checked(unread(timing="make bench"), bench) == (verify.TIMING, "make bench")
    assert verify.checked(unread(costly="make results"), bench) == (verify.NOT_RUN, "make results")
    claim = unread(test="pytest x.py", cost=1)
    bench.printed["pytest x.py"] = "1 passed"
    assert verify.checked(claim, bench) == (verify.BY_TEST, "pytest x.py")

    def fails(command):
        raise UserError(f"{command}: exit code 1", "no message")

    monkeypatch.setattr(bench, "program", fails)
    assert verify.checked(claim, bench) == (verify.DIFFERS, "pytest x.py: exit code 1")


def test_a_program_runs_in_the_repository_and_its_failure_is_told(tmp_path):
    made = sources.Bench(tmp_path, {}, seconds=100)
    assert made.program("python -c 'import os; print(os.path.isfile(\"Makefile\"))'") == "True\n"
    with pytest.raises(UserError, match="exit code 3"):
        made.program("python -c 'raise SystemExit(3)'")
    with pytest.raises(sources.Missing, match="needs FEATURES="):
        made.program("python -c 'pass' FEATURES.npz")


def test_rows_that_are_too_dear_are_not_drawn():
    closed_form = sources.Source({"stored": "closed-form"})
    assert set(closed_form.affordable(20)["method"]) == {"afl", "fedlda", "fedncm", "stsa_e"}


def test_what_is_too_dear_or_lacks_its_data_is_not_run(bench):
    bench.rows.clear()
    bench.seconds = 9
    assert verify.checked(claimed(TABLE).claims[0], bench) == (verify.NOT_RUN, "needs about 10 s")
    (lacking,) = sources.swept("fcl-bench data=features data.path=FEATURES.npz")
    with pytest.raises(sources.Missing, match="needs FEATURES="):
        bench.with_files(lacking)
    bench.files["FEATURES"] = "mine.npz"
    assert bench.with_files(lacking) == ["data=features", "data.path=mine.npz"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({**MEDIAN, "text": "Its mean is {} %"}, "0 times"),
        ({**MEDIAN, "is": ["1", "2"]}, "has 1 numbers"),
        ({**TABLE, "under": "Result"}, "0 tables under 'Result'"),
        ({**TABLE, "rows": {"AFL": "method=afl"}}, "0 rows of 'Results' begin with AFL"),
        ({**TABLE, "columns": {2: "mean A_T"}}, "more numbers than `is`"),
        ({**TABLE, "source": "none"}, "has no source none"),
    ],
)
def test_a_claim_of_what_is_not_on_the_page_is_an_error(entry, said):
    with pytest.raises(UserError, match=said):
        claimed(entry)


def test_a_command_that_the_page_lacks_is_an_error():
    with pytest.raises(UserError, match="has not the command"):
        claimed(MEDIAN, text=TEXT.replace("seed=0,1", "seed=0"))
    page = Page("page.md", TEXT + "\n    make no-such-thing\n")
    with pytest.raises(UserError, match="no target no-such-thing"):
        claims.of_page(page, {"sources": {"seconds": {"timing": "make no-such-thing"}}})


def test_conditions_and_measures_that_no_run_has_are_errors():
    frame = pd.DataFrame(RUNS)
    functions = sources.values(frame, {"method": "afl"})
    assert functions["mean"]("A_T") == pytest.approx(95.21)
    assert functions["std"]("A_T") == pytest.approx(0.39598, abs=1e-5)
    assert (functions["least"]("A_T"), functions["most"]("A_T"), functions["one"]("up_max_mib")) == (94.93, 95.49, 7)
    for ask, said in [
        (lambda: functions["mean"]("A_t"), "no measure A_t"),
        (lambda: functions["one"]("A_T"), "2 values of A_T"),
        (lambda: functions["mean"]("A_T", "method.rank=3"), "no run has the key method.rank"),
        (lambda: sources.values(frame, {"method": "fedran"})["mean"]("A_T"), "no run has method=fedran"),
    ]:
        with pytest.raises(UserError, match=said):
            ask()


def test_a_programs_tables_are_read_by_their_headers():
    printed = "words\n| K | size |\n|-:|-|\n| 5 | 30 1083.5 |\n| 50 | **7** |\n\n| K | more |\n|---|---|\n| 5 | 1 |\n"
    frame = sources.markdown_table(printed)
    assert frame.shape == (3, 3)
    cell = sources.values(frame, {"K": "50"})["cell"]
    assert cell("size") == 7
    assert sources.values(frame.iloc[:1], {"K": "5"})["cell"]("size", 1) == 1083.5


def test_a_stored_runs_command_has_its_settings():
    frame = sources._stored("closed-form-digits")
    keys = [key for key in sources._keys("closed-form-digits") if key not in sources._NO_KEYS]
    words = sources.stored_words(frame.iloc[0], keys, sources.STORED["closed-form-digits"]["words"])
    assert {"method=afl", "data=digits", "tasks=10", "seed=0", "wire.factors=int8", "method.scale_scores=false"} <= set(
        words
    )
    assert not [word for word in words if word.startswith(("backbone=", "method.revision=", "features="))]


def test_two_draws_of_one_seed_are_alike(capsys, monkeypatch):
    monkeypatch.setattr(verify, "every", lambda: [claimed(MEDIAN, TABLE)])
    monkeypatch.setattr(verify, "stored_runs", lambda each: [])
    arguments = ["-n", "3", "--seed", "4", "--each", "0"]
    assert verify.main(arguments) == 0
    first = capsys.readouterr().out
    assert verify.main(arguments) == 0
    assert capsys.readouterr().out == first
    assert first.startswith("numbers without a command: 0\n7 numbers: 1 arithmetic, 6 run\n")
    assert "page.md:" in first
    monkeypatch.setattr(verify, "every", lambda: [claimed(TABLE)])
    assert verify.main(arguments) == 1
    assert logging.getLogger("fcl_bench").isEnabledFor(logging.WARNING), "whoever called it goes on to log"
    assert "page.md:2: 12.5 has no command\nnumbers without a command: 1\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", claims.pages())
def test_every_number_of_a_page_has_a_command(name):
    assert claims.by_name(name).silent() == []


def test_every_file_of_claims_is_of_a_page():
    assert {file["page"] for file in claims.told().values()} <= set(claims.pages())
    assert set(claims._exempt()["pieces"]) <= set(claims.pages())


@pytest.mark.slow
def test_stored_rows_and_arithmetic_give_what_the_pages_print(tmp_path):
    bench = sources.Bench(tmp_path, {}, seconds=0)
    kinds = ("stored", "arithmetic")
    found = [claim for page in claims.every() for claim in page.claims if claim.source.kind in kinds]
    assert len(found) > 600
    assert [claim for claim in found if verify.checked(claim, bench)[0] == verify.DIFFERS] == []


@pytest.mark.slow
def test_a_stored_run_is_made_again(tmp_path):
    claim = next(claim for claim in verify.stored_runs(10) if claim.page == "results/closed-form-digits.csv")
    state, found = verify.rerun(claim, sources.Bench(tmp_path, {}, seconds=100))
    assert (state, found) == (verify.OK, claim.printed)


def test_spans_are_within_each_other():
    assert Span(2, 3).within(Span(2, 4))
    assert not Span(2, 5).within(Span(2, 4))
