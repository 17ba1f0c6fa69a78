"""Printed numbers of the papers' communication tables."""

from __future__ import annotations

import pytest

from fcl_bench.federation.accounting import fedran_mib, fedran_under_stsa_mib


@pytest.mark.parametrize(
    ("M", "rank", "classes", "printed"),
    [
        (8192, 2048, 100, "134.27"),  # Table 4: CIFAR-100
        (8192, 2048, 200, "140.52"),  # ImageNet-R
        (8192, 512, 50, "35.13"),  # VTAB
        (2048, 512, 100, "9.57"),  # ViT, CIFAR-100
        (2048, 512, 200, "11.13"),  # ViT, ImageNet-R
        (2048, 1024, 100, "17.6"),  # Fig. 6
        (2048, 2048, 100, "33.6"),
        (8192, 1024, 100, "70.3"),
    ],
)
def test_fedrans_table_to_the_printed_digit(M, rank, classes, printed):
    decimals = len(printed.partition(".")[2])
    assert f"{fedran_mib(M, rank, classes):.{decimals}f}" == printed


def test_under_stsas_convention_tasks_add_up():
    one = 4 * (2048 * 512 + 512 + 2048 * 10) / 2**20
    assert fedran_under_stsa_mib(2048, [512] * 10, [10] * 10) == pytest.approx(10 * one)
    assert f"{one:.2f}" == "4.08"  # methods.md, "One accounting for all"
