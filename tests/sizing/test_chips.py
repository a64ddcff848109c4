"""Chips: every number of the file arrives in plain units, with its source."""

import json
from pathlib import Path

import pytest

import cpkit
from cpkit.errors import ConfigError
from cpkit.sizing.chips import chip, chip_names
from cpkit.sizing.figures import KINDS, Figure

FACTS = json.loads((Path(cpkit.__file__).parent / "data" / "chips.json").read_text(encoding="utf-8"))["chips"]


def figures(value):
    """Every Figure inside a value."""
    if isinstance(value, Figure):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from figures(inner)
    elif hasattr(value, "__slots__"):
        for name in value.__slots__:
            yield from figures(getattr(value, name))


def test_every_chip_of_the_file_is_known():
    assert chip_names() == list(FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_numbers_carry_their_source(name):
    found = list(figures(chip(name)))
    assert len(found) >= 8
    assert all(figure.source and figure.kind in KINDS and figure.value > 0 for figure in found)


def test_units_are_plain():
    h200 = chip("H200")
    assert h200.name == "h200" and h200.label == "H200-SXM"
    assert h200.hbm_bytes.value == 141 * 10**9
    assert h200.hbm_bandwidth.value == 48 * 10**11
    assert h200.peak_flops["fp8"].value == 1979 * 10**12
    assert h200.link_bytes.value == 450 * 10**9 and h200.network_bytes.value == 50 * 10**9


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param("h100", (True, True, False), id="hopper"),
        pytest.param("gb200", (True, False, True), id="blackwell"),
        pytest.param("mi300x", (False, False, False), id="not-cuda"),
    ],
)
def test_families(name, family):
    it = chip(name)
    assert (it.is_nvidia, it.is_hopper, it.is_blackwell) == family


def test_what_a_chip_lacks_is_absent():
    assert "fp4" not in chip("h200").peak_flops and "fp4" in chip("b200").peak_flops
    assert "low certainty" in chip("mi300x").network_bytes.source


def test_an_unknown_chip_names_those_there_are():
    with pytest.raises(ConfigError, match=r"unknown chip 'a100': use one of h100, h200, b200"):
        chip("a100")
