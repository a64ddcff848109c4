"""Reading between measured points, and collectives on links."""

import itertools

import pytest

from cpkit.sizing.chips import chip
from cpkit.sizing.cost.links import LINK_SHARE, Links, Span, collective_seconds
from cpkit.sizing.cost.tables import Curve, KernelTable, collective_curves, kernel_tables
from cpkit.topology import Topology

TABLE = KernelTable((2.0, 4.0, 8.0), (Curve((10, 20), (1, 3)), Curve((10, 20), (2, 6)), Curve((10, 40), (4, 16))))
H200 = chip("h200")


@pytest.mark.parametrize(
    ("rows", "keys", "seconds", "inside"),
    [
        pytest.param(2, 10, 1, True, id="a-point"),
        pytest.param(2, 15, 2, True, id="between-keys"),
        pytest.param(3, 10, 1.5, True, id="between-rows"),
        pytest.param(3, 15, 3, True, id="between-four-points"),
        pytest.param(8, 40, 16, True, id="the-last-point"),
        pytest.param(1, 10, 1, False, id="fewer-rows"),
        pytest.param(16, 40, 16, False, id="more-rows"),
        pytest.param(2, 5, 1, False, id="fewer-keys"),
        pytest.param(2, 99, 3, False, id="more-keys"),
        pytest.param(6, 30, 7, False, id="where-one-curve-ends"),  # read at 20 keys: (6 + 8) / 2
    ],
)
def test_a_table_is_read_between_points_and_never_beyond_silently(rows, keys, seconds, inside):
    reading = TABLE.read(rows, keys)
    assert (reading.seconds, reading.inside) == (pytest.approx(seconds), inside)
    if not inside:  # the place that was read lies in the table, and is not the one asked for
        assert 2 <= reading.rows <= 8 and 10 <= reading.keys <= 40
        assert (reading.rows, reading.keys) != (rows, keys)


def test_shipped_tables_hold_what_was_measured():
    tables = kernel_tables("h200")
    logits = tables["mqa_logits"].read(8192, 4096.5)
    assert logits.inside and 2 * 8192 * 4096.5 * 32 * 128 / logits.seconds == pytest.approx(949e12, rel=0.01)
    assert tables["mqa_logits_decode"].read(64, 131072).seconds == pytest.approx(289e-6)
    assert collective_curves("h200")["all_gather", 2].read(512 << 20)[0] == pytest.approx(1.042e-3, rel=0.01)
    assert kernel_tables("mi300x") == {}


def test_a_measured_collective_is_what_was_measured():
    figure = collective_seconds(H200, "all_gather", Span(8, 1), 64 << 20)
    assert (figure.kind, figure.value) == ("measured", pytest.approx(0.20628e-3))


@pytest.mark.parametrize(
    ("whole", "edge", "kind"),
    [
        pytest.param(511, 512, "calibrated", id="below-the-smallest"),
        pytest.param(512, 512, "measured", id="smallest"),
        pytest.param(512 << 20, 512 << 20, "measured", id="largest"),
        pytest.param(1 << 30, 512 << 20, "calibrated", id="above-the-largest"),
    ],
)
def test_sizes_outside_the_table_are_marked(whole, edge, kind):
    figure, at_edge = (collective_seconds(H200, "all_gather", Span(8, 1), size) for size in (whole, edge))
    assert (figure.kind, figure.value) == (kind, pytest.approx(at_edge.value * max(whole / edge, 1)))


def test_one_rank_and_no_bytes_cost_nothing():
    assert collective_seconds(H200, "all_reduce", Span(1, 1), 1e9).value == 0
    assert collective_seconds(H200, "all_reduce", Span(8, 1), 0).value == 0


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
def test_more_bytes_never_take_less_time_by_much_and_unmeasured_ranks_are_marked(op):
    sizes = [1 << shift for shift in range(8, 34)]
    for span in (Span(2, 1), Span(3, 1), Span(8, 1), Span(16, 2), Span(8, 8)):
        figures = [collective_seconds(H200, op, span, size) for size in sizes]
        assert all(b.value > 0.5 * a.value for a, b in itertools.pairwise(figures))  # small messages are noise
        assert figures[-1].value > 5 * figures[0].value
        measured = span.num_hosts == 1 and span.num_ranks in (2, 8)
        assert (figures[10].kind == "measured") == measured


def test_beyond_the_host_the_network_bounds():
    whole = 1 << 30
    inside, across = (collective_seconds(H200, "all_gather", span, whole).value for span in (Span(8, 1), Span(8, 8)))
    least = whole * 7 / 8 / (H200.network_bytes.value * LINK_SHARE)
    assert across > least > 4 * inside


def test_a_chip_without_tables_is_latency_and_bandwidth():
    figure = collective_seconds(chip("mi300x"), "all_gather", Span(8, 1), 1 << 30)
    received = (1 << 30) * 7 / 8
    assert figure.kind == "hardware"
    assert figure.value == pytest.approx(received / (448e9 * LINK_SHARE), rel=0.01)
    small = collective_seconds(chip("mi300x"), "all_gather", Span(8, 1), 512)
    assert small.kind == "assumed" and "an assumed 10 us" in small.source


def test_groups_span_the_hosts_that_their_ranks_lie_on():
    spans = Links(H200, Topology(tp=8, pcp=2, dcp=16)).spans
    assert (spans["tp"], spans["pcp"], spans["dcp"]) == (Span(8, 1), Span(2, 2), Span(16, 2))
    assert Links(H200, Topology(tp=2, pcp=4, dcp=4)).spans["pcp"] == Span(4, 1)
