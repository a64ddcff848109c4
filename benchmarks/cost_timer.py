"""The timer of cost_measure.py on a device: random operands of the planned shapes, and the kernels that they go to."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cost_measure import HEADS, PAGE, TOPK, Ms
from cpkit.kernels.mqa_logits import mqa_logits
from cpkit.kernels.paged_mqa_logits import paged_mqa_logits
from cpkit.kernels.table_keys import KeyTable, table_keys
from cpkit.kernels.tile_schedule import tile_schedule
from cpkit.kernels.topk import topk

Works = dict[str, Callable[[], Any]]

SHORT_MS, COPIES = 0.3, 20
"""Work below so many milliseconds is timed COPIES times in a row: a graph of one launch shows the replay itself."""


def graph_ms(works: Works) -> Ms:
    """Medians of CUDA-graph replays, in turn."""
    from benchmarks.timing import time_together

    ms = time_together(works)
    short = {name: work for name, work in works.items() if ms[name] < SHORT_MS}
    return {**ms, **(time_together(short, COPIES) if short else {})}


class DeviceTimer:
    """backend: of the kernels, triton or torch. time: milliseconds of each of several works."""

    def __init__(self, device: str = "cuda", backend: str = "triton", time: Callable[[Works], Ms] = graph_ms) -> None:
        self._device, self._backend, self._time = device, backend, time

    def prefill(self, parts: list[tuple[int, int]], num_keys: int, run: int) -> Ms:
        """Each part sees keys of its own, laid one after another in the workspace."""
        start, end, first = [], [], 0
        for position, count in parts:
            start.append(torch.full((count,), first, dtype=torch.int32, device=self._device))
            end.append(first + position + 1 + torch.arange(count, dtype=torch.int32, device=self._device))
            first += position + count
        assert first == num_keys, (parts, num_keys)
        key_start, key_end = torch.cat(start), torch.cat(end)
        tokens, backend = len(key_end), self._backend
        q, weights = self._queries(tokens)
        k, scale = self._fp8(num_keys, 128), torch.rand(num_keys, device=self._device) + 0.5
        bounds = [(first, min(first + run, tokens)) for first in range(0, tokens, run)]
        logits = torch.empty(min(run, tokens), num_keys, device=self._device)
        chosen = torch.empty(tokens, TOPK, dtype=torch.int32, device=self._device)
        cache, tables = self._pages([num_keys])
        whole = torch.tensor([0, num_keys], dtype=torch.int32, device=self._device)
        table = KeyTable(whole, tables, whole[1:], num_keys, PAGE)

        def keys() -> None:
            table_keys(cache, table, 128, backend=backend)

        def score() -> None:
            for a, b in bounds:
                mqa_logits(
                    q[a:b], (k, scale), weights[a:b], key_start[a:b], key_end[a:b], out=logits[: b - a], backend=backend
                )

        def select() -> None:
            for a, b in bounds:
                topk(logits[: b - a], key_start[a:b], key_end[a:b], TOPK, out=chosen[a:b], backend=backend)

        score()  # top-k reads the scores of the last run
        return self._time({"keys": keys, "logits": score, "topk": select})

    def decode(self, lens: list[int], tokens: int) -> Ms:
        """Pages lie in the cache in random order; the tiles' schedule is made beforehand, as engines do once a step."""
        rows, most, backend = len(lens), PAGE * -(-max(lens) // PAGE), self._backend
        q, weights = self._queries(rows * tokens)
        cache, tables = self._pages(lens)
        before = torch.arange(tokens - 1, -1, -1, dtype=torch.int32, device=self._device)
        ends = torch.tensor(lens, dtype=torch.int32, device=self._device)[:, None] - before
        schedule = torch.empty(self._workers() + 1, 2, dtype=torch.int32, device=self._device)
        tile_schedule(ends.amax(1), tile=PAGE, out=schedule, backend=backend)
        logits = torch.empty(rows * tokens, most, device=self._device)
        key_end = ends.flatten()
        key_start = torch.zeros_like(key_end)
        chosen = torch.empty(rows * tokens, TOPK, dtype=torch.int32, device=self._device)
        scored = {"weights": weights, "seq_lens": ends, "block_tables": tables, "schedule": schedule, "max_keys": most}

        def score() -> None:
            paged_mqa_logits(q.view(rows, tokens, HEADS, 128), cache, **scored, out=logits, backend=backend)

        def select() -> None:
            topk(logits, key_start, key_end, TOPK, out=chosen, backend=backend)

        score()
        return self._time({"logits": score, "topk": select})

    def _queries(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, HEADS, 128] fp8 and their weights."""
        return self._fp8(tokens, HEADS, 128), torch.randn(tokens, HEADS, device=self._device)

    def _fp8(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device).to(torch.float8_e4m3fn)

    def _pages(self, lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """An indexer cache that holds so many keys of each request, and its block tables."""
        pages = [-(-keys // PAGE) for keys in lens]
        order = torch.randperm(sum(pages), device=self._device).int()
        tables = torch.zeros(len(lens), max(pages), dtype=torch.int32, device=self._device)
        for row, part in enumerate(order.split(pages)):
            tables[row, : len(part)] = part
        keys = self._fp8(sum(pages), PAGE * 128).view(torch.uint8)
        scales = torch.rand(sum(pages), PAGE, device=self._device).add_(0.5).view(torch.uint8)
        return torch.cat([keys, scales], dim=1), tables

    def _workers(self) -> int:
        """Workers of a decode kernel: one a multiprocessor."""
        return torch.cuda.get_device_properties(0).multi_processor_count if self._device == "cuda" else 4
