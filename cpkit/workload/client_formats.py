"""Clients described by histograms (ServeGen JSON), drawn into requests with a seed.

Each client has windows with a request rate and a law of the gaps, and, for longer windows, histograms of lengths:

    trace_csv     start_s, rate, cv, Gamma | Weibull, shape, scale     one line a window; a rate of 0 has no law
    dataset       start_s -> input_tokens, output_tokens               each a printed {value: probability}

A window holds round(rate * length) requests, always. Their gaps are drawn from the law and scaled to fill the window,
so the law's shape gives the bursts, and its scale is not needed. Lengths come from the latest histograms at the
window's start, input and output independently, since the source keeps no joint law.
"""

import ast
from itertools import pairwise
from typing import Any

import numpy as np

from cpkit.arrays import FloatArray, IntArray
from cpkit.errors import InputError
from cpkit.workload.request import Request
from cpkit.workload.trace_source import Read, TraceSource, as_length, as_seconds, json_field, parse_json

Histogram = tuple[IntArray, FloatArray]
"""Values [n] and their probabilities [n], which sum to 1."""

LONE_WINDOW_S = 600.0
MAX_WINDOW_REQUESTS = 1 << 22


def read_clients(source: TraceSource, limit: int | None, seed: int) -> Read:
    """All clients' requests in order of arrival; under skip_bad a client that cannot be read is left out whole."""
    try:
        clients = parse_json(source.whole_text())
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{source.path}, line 1: {error}") from error
    arrivals: list[FloatArray] = []
    lens: list[IntArray] = []
    for i, client in enumerate(clients):
        try:
            times, client_lens = draw_client(client, np.random.default_rng([seed, i]))
        except ValueError as error:
            source.reject(1, f"client {i}: {error}")
            continue
        arrivals.append(times)
        lens.append(client_lens)
    if not arrivals:
        return [], []
    arrival_s, both_lens = np.concatenate(arrivals), np.concatenate(lens)
    order = np.argsort(arrival_s, kind="stable")[:limit]
    rows = zip(arrival_s[order].tolist(), both_lens[order].tolist(), strict=True)
    requests = [Request(i, seconds, *pair) for i, (seconds, pair) in enumerate(rows)]
    return requests, [f"drawn from the histograms of {len(arrivals)} clients with seed {seed}"]


def draw_client(client: Any, rng: np.random.Generator) -> tuple[FloatArray, IntArray]:
    """Arrival times [n] and (input, output) lengths [n, 2] of one client, window after window; raises ValueError."""
    histograms = parse_dataset(json_field(client, "dataset"))
    windows = parse_windows(json_field(client, "trace_csv"))
    starts = [start for start, *_ in windows]
    lengths = [b - a for a, b in pairwise(starts)]
    lengths.append(lengths[-1] if lengths else LONE_WINDOW_S)
    times: list[FloatArray] = [np.zeros(0)]
    lens: list[IntArray] = [np.zeros((0, 2), np.int64)]
    for (start, rate, law, shape), length in zip(windows, lengths, strict=True):
        count = round(rate * length)
        if count > MAX_WINDOW_REQUESTS:
            raise ValueError(f"window {start:g}: rate={rate:g} makes {count} requests; at most {MAX_WINDOW_REQUESTS}")
        if count == 0:
            continue
        times.append(start + length * draw_fractions(law, shape, count, rng))
        current = [pair for at, pair in histograms if at <= start]
        if not current or any(len(values) == 0 for values, _ in current[-1]):
            raise ValueError(f"window {start:g} has {count} requests and no histogram of their lengths")
        lens.append(np.stack([rng.choice(values, count, p=p) for values, p in current[-1]], axis=1))
    return np.concatenate(times), np.concatenate(lens)


def draw_fractions(law: str, shape: float, count: int, rng: np.random.Generator) -> FloatArray:
    """[count] places in [0, 1], rising: count + 1 gaps of the law, scaled to sum to 1, the last one left open."""
    gaps = rng.gamma(shape, size=count + 1) if law == "Gamma" else rng.weibull(shape, size=count + 1)
    ends = np.cumsum(gaps)
    # A very bursty law can draw gaps that are all zero in float64: then everything arrives at once.
    return ends[:-1] / ends[-1] if ends[-1] > 0 else np.zeros(count)


def parse_windows(text: Any) -> list[tuple[float, float, str, float]]:
    """(start_s, rate, law, shape) of each line of trace_csv, starts rising; raises ValueError."""
    if not isinstance(text, str):
        raise ValueError("trace_csv is not text")
    windows: list[tuple[float, float, str, float]] = []
    for line in text.split():
        cells = line.split(",")
        if len(cells) != 6:
            raise ValueError(f"trace_csv line {line!r:.60} has {len(cells)} values, not 6")
        start, rate = as_seconds("window start", cells[0]), as_seconds("rate", cells[1])
        if windows and start <= windows[-1][0]:
            raise ValueError(f"window {start:g} does not come after window {windows[-1][0]:g}")
        shape = as_seconds("shape", cells[4])
        if rate > 0 and (cells[3] not in ("Gamma", "Weibull") or shape <= 0):
            raise ValueError(f"window {start:g}: gaps of law {cells[3]!r}, shape {shape:g}: Gamma or Weibull, above 0")
        windows.append((start, rate, cells[3], shape))
    return windows


def parse_dataset(data: Any) -> list[tuple[float, tuple[Histogram, Histogram]]]:
    """(start_s, (input, output) histograms), starts rising; raises ValueError."""
    if not isinstance(data, dict):
        raise ValueError("dataset is not an object")
    histograms = [
        (
            as_seconds("dataset start", start),
            (
                parse_histogram("input_tokens", json_field(entry, "input_tokens")),
                parse_histogram("output_tokens", json_field(entry, "output_tokens")),
            ),
        )
        for start, entry in data.items()
    ]
    return sorted(histograms, key=lambda item: item[0])


def parse_histogram(name: str, text: Any) -> Histogram:
    """Values and probabilities of a printed dict {tokens: probability}; an empty one is allowed; raises ValueError."""
    try:
        printed = ast.literal_eval(text) if isinstance(text, str) else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        printed = None
    if not isinstance(printed, dict):
        raise ValueError(f"{name}={text!r:.40} is not a printed dict of value: probability")
    values = np.array([as_length(name, value) for value in printed], np.int64)
    weights = np.array([as_seconds(f"probability of {name}", weight) for weight in printed.values()], np.float64)
    if len(values) and not abs(weights.sum() - 1) < 1e-3:
        raise ValueError(f"probabilities of {name} sum to {weights.sum():g}, not 1")
    return values, weights / weights.sum() if len(values) else weights
