"""Histogram clients: counts are exact, draws follow the histograms and the seed, nonsense is refused."""

import json

import numpy as np
import pytest

from cpkit.errors import InputError
from cpkit.workload import read_trace
from cpkit.workload.client_formats import draw_fractions


def client(windows="0,0.5,1,Gamma,1,1\r\n100,0,0,,0,0", **histograms):
    lengths = {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{3: 1.0}", **histograms}
    return {"dataset": {"0": lengths}, "trace_csv": windows}


@pytest.fixture
def read(tmp_path):
    def read_clients(*clients, **options):
        path = tmp_path / "clients"
        path.write_text(json.dumps(list(clients), indent=1))
        return read_trace(path, **options)

    return read_clients


def test_a_window_holds_its_rate_times_its_length(read):
    trace = read(client("0,0.5,1,Gamma,0.2,1\n100,0.25,1,Weibull,0.7,1\n300,0,0,,0,0"))
    arrivals = np.array([r.arrival_s for r in trace.requests])
    assert np.histogram(arrivals, [0, 100, 300, 500])[0].tolist() == [50, 50, 0]
    assert (np.diff(arrivals) >= 0).all()


def test_last_window_is_as_long_as_the_one_before_and_a_lone_one_600_s(read):
    assert len(read(client("0,0,0,,0,0\n50,0.2,1,Gamma,1,1")).requests) == 10
    assert len(read(client("0,0.2,1,Gamma,1,1")).requests) == 120


def test_lengths_follow_the_histograms(read):
    trace = read(client("0,40,1,Gamma,1,1\n100,0,0,,0,0"))
    prompts = np.array([r.prompt_len for r in trace.requests])
    assert set(prompts.tolist()) == {10, 20}
    assert abs((prompts == 20).mean() - 0.75) < 0.03  # more than four standard deviations of 4,000 draws
    assert {r.output_len for r in trace.requests} == {3}


def test_lengths_come_from_the_latest_histogram(read):
    late = client("0,0.1,1,Gamma,1,1\n100,0.1,1,Gamma,1,1")
    late["dataset"]["100"] = {"input_tokens": "{77: 1.0}", "output_tokens": "{1: 1.0}"}
    assert [r.prompt_len == 77 for r in read(late).requests] == [False] * 10 + [True] * 10


def test_the_seed_decides_and_clients_differ(read):
    def times(seed):
        return [r.arrival_s for r in read(client(), client(), seed=seed).requests]

    assert times(1) == times(1) != times(2)
    assert len(set(times(1))) == 100


def test_limit_takes_the_first_to_arrive(read):
    assert [r.arrival_s for r in read(client(), client(), limit=7).requests] == [
        r.arrival_s for r in read(client(), client()).requests[:7]
    ]


@pytest.mark.parametrize(("law", "shape"), [("Gamma", 0.02), ("Gamma", 4.0), ("Weibull", 0.5), ("Weibull", 2.0)])
def test_gaps_keep_the_laws_burstiness(law, shape):
    places = draw_fractions(law, shape, 20_000, np.random.default_rng(0))
    gaps = np.diff(places)
    moments = {("Gamma", 0.02): 50**0.5, ("Gamma", 4.0): 0.5, ("Weibull", 0.5): 5**0.5, ("Weibull", 2.0): 0.5227}
    assert 0 <= places[0] <= places[-1] <= 1
    assert gaps.std() / gaps.mean() == pytest.approx(moments[law, shape], rel=0.1)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (client(input_tokens="{}"), "no histogram"),
        (client(input_tokens="{10: 0.5}"), "sum to 0.5"),
        (client(input_tokens="{10: 2.0, 11: -1.0}"), "probability of input_tokens"),
        (client(input_tokens="{-1: 1.0}"), "input_tokens=-1"),
        (client(input_tokens="{1.5: 1.0}"), "not a whole number"),
        (client(input_tokens="__import__('os')"), "is not a printed dict"),
        (client(input_tokens=[1]), "is not a printed dict"),
        (client("0,0.5,1,Cauchy,1,1"), "law 'Cauchy'"),
        (client("0,0.5,1,Gamma,0,1"), "shape 0"),
        (client("0,0.5"), "has 2 values, not 6"),
        (client("5,1,1,Gamma,1,1\n5,1,1,Gamma,1,1"), "does not come after"),
        (client("0,nan,1,Gamma,1,1"), "rate='nan'"),
        (client("0,1e9,1,Gamma,1,1"), "at most"),
        (client(None), "trace_csv is not text"),
        ({"dataset": 3, "trace_csv": ""}, "dataset is not an object"),
        (7, "int where an object"),
    ],
)
def test_a_bad_client_is_named_or_left_out(read, bad, reason):
    with pytest.raises(InputError, match=f"client 1: .*{reason}"):
        read(client(), bad)
    trace = read(client(), bad, skip_bad=True)
    assert (len(trace.requests), trace.num_skipped) == (50, 1)
