"""What every figure shares: who looks like what, for colour-blind readers and in grey."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from fcl_bench.results.figures.selection import CEILING_LOOKS, KINDS, METHODS, line_look, looks
from fcl_bench.results.summarise import CEILINGS
from tests.conftest import REPOSITORY

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
PROTAN = np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]])
DEUTAN = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]])
TRITAN = np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]])


def lab(colour, seen):
    """CIE L*a*b* (D65) of a colour as someone sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = to_xyz @ np.clip(seen @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("seen", [np.eye(3), PROTAN, DEUTAN, TRITAN], ids=["all", "protan", "deutan", "tritan"])
def test_colours_differ_for_colour_blind_readers(seen):
    colours = {colour for colour, _ in METHODS.values()}
    for one, other in itertools.combinations(sorted(colours), 2):
        # About 2.3 is a just noticeable difference of large patches; lines want several times that.
        assert np.linalg.norm(lab(one, seen) - lab(other, seen)) > 9, (one, other)


def test_markers_alone_tell_methods_apart_in_grey():
    markers = [marker for _, marker in METHODS.values()]
    assert len(set(markers)) == len(markers)


PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")), REPOSITORY / "Makefile")
SWEEPS = sorted(
    {found for page in PAGES for found in re.findall(r"method=([a-z0-9_]+(?:,[a-z0-9_]+)+)", page.read_text())}
)


@pytest.mark.parametrize("names", SWEEPS)
def test_methods_that_a_page_compares_have_different_colours(names):
    rivals = {*names.split(",")} & {*METHODS}
    assert len({METHODS[name][0] for name in rivals}) == len(rivals)


@pytest.mark.parametrize(
    "names",
    [
        "fedran,stsa,stsa_e,afl,afcl,centred_sketch,fedncm,fedlda,fedavg,fedprotip",
        "fedavg,fedprox,feddyn,scaffold,moon,fedntd,feddisco,fedgen,fedewc,fedlwf",
        "fedavg,fot,fedprotip,fedewc,fedicarl,target,lander,mfcl,glfc,lga",
        "fedavg,fedncm,coda_prompt,cprompt,dualprompt,l2p,pilora,lorm,regmean,fedcbc",
    ],
)
def test_ten_methods_of_one_kind_have_ten_colours(names):
    test_methods_that_a_page_compares_have_different_colours(names)


def test_every_method_of_the_configuration_has_a_look_of_its_own():
    methods = {file.stem for file in (REPOSITORY / "conf" / "method").glob("[!_]*.yaml")}
    assert len(methods) > 5
    pairs = looks(methods - set(CEILING_LOOKS))
    assert len(set(pairs.values())) == len(pairs)


@given(names=st.sets(st.text("abcdefgh_", min_size=1, max_size=6), max_size=30))
def test_unknown_methods_differ_from_known_ones_and_from_each_other(names):
    pairs = looks([*METHODS, *names])
    assert len(set(pairs.values())) == len(pairs)
    assert pairs == looks([*METHODS, *sorted(names, reverse=True)])


def test_a_known_method_looks_the_same_whoever_else_is_there():
    assert looks(["stsa", "mine"])["stsa"] == looks(["fedran", "stsa"])["stsa"] == METHODS["stsa"]
    assert looks(["mine"])["mine"] == looks(["fedran", "mine"])["mine"]


def test_sixteen_variants_of_a_method_differ_without_colour():
    drawn = [line_look(METHODS["fedran"], variant) for variant in range(16)]
    assert len({(str(look["linestyle"]), look["fillstyle"]) for look in drawn}) == 16
    assert {look["color"] for look in drawn} == {METHODS["fedran"][0]}
    assert not {str(look["linestyle"]) for look in drawn} & {str(look["linestyle"]) for look in CEILING_LOOKS.values()}


def test_every_method_here_has_a_look_of_its_own():
    here = {file.stem for file in (REPOSITORY / "conf" / "method").glob("[!_]*.yaml")}
    assert here - {*CEILING_LOOKS} == {*METHODS}


def test_every_ceiling_has_a_look():
    assert list(CEILING_LOOKS) == list(CEILINGS)


PROGRAM = """
import sys
from matplotlib.figure import Figure
from fcl_bench.results.figures.selection import drawn
figure = Figure()
figure.subplots().errorbar([1, 2], [3, 4], [0.1, 0.2], label="a")
figure.legend()
sys.stdout.buffer.write(drawn(figure, sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_figure_is_the_same_file_each_time(kind):
    def written():
        # On another day; and another process draws other random ids.
        day = {"SOURCE_DATE_EPOCH": str(next(days))}
        done = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, env={**os.environ, **day})
        assert done.returncode == 0, done.stderr
        return done.stdout

    days = itertools.count(10**9, 10**5)
    first = written()
    assert first == written()
    assert (b"<svg" in first) == (kind == "svg")
    assert b"<dc:date>" not in first
