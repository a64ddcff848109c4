"""Continuous batching: a trace becomes the batches that a serving engine would run, one a step.

One step:
    1. Requests whose time has come join the waiting queue, first come, first served.
    2. Running decodes take 1 + num_speculative_tokens tokens each, first admitted first, while the step has tokens.
       If their next tokens need more blocks than are free, the last admitted request is preempted: it gives its blocks
       back and waits at the front of the queue, to compute its prompt and its outputs again.
    3. Running prefills go on with as many tokens as the step has left.
    4. If nothing was preempted, waiting requests are admitted while the step has a seat, tokens, and free blocks for
       all that is to be computed before their next output. A prefill so never stalls half way; only decodes grow.

A decode keeps its own token and the drafts up to the first rejected one; the others are rolled back.

Steps of decodes alone, while nobody waits or nobody who waits fits, differ in their contexts only. A replay that asks
for timings alone may take up to decode_stride of them as one, whose batch has that many tokens of each request: never
past the end of a request, and not past an arrival that fits, as far as the step before lets it foresee.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cpkit.arrays import Int32Array, IntArray, ceil_div, seal
from cpkit.batch import Batch
from cpkit.budget import ACCEPTANCE_RATE, Budget
from cpkit.errors import ConfigError
from cpkit.topology import Topology
from cpkit.workload.arrivals import Arrivals
from cpkit.workload.clock import Clock, StepClock
from cpkit.workload.prefix_cache import PrefixCache, block_keys
from cpkit.workload.request import Request, Trace
from cpkit.workload.running import Running
from cpkit.workload.stats import ReplayStats, Tally


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """A step as it ran: its batch, when it began and how long it took, and how full the engine was.

    The batch's req_ids are the trace's. Its prompt_lens count what is computed before the next output token, so for a
    request that comes back from a preemption they count its outputs so far as well: until then it is a prefill.
    """

    index: int
    time_s: float
    duration_s: float
    batch: Batch
    num_waiting: int
    num_held_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Seats [n] that compute in this step and how many tokens each, query_lens [n] int64 >= 1."""

    seats: IntArray
    query_lens: IntArray


class Scheduler:
    """Iterate over it for the steps; `stats` tells what they came to. The same arguments give the same steps.

    num_kv_blocks: block ids of the pool, the null block included; each spans topology.virtual_block tokens.
    max_model_len: longest prompt and output together, in tokens.
    acceptance_rate: chance that a draft token is kept, given that those before it were.
    decode_stride: most steps of decodes alone that are taken as one; the clock must count them, and drafts allow 1.
    Raises ConfigError. A request that can never fit is refused and counted; those that depend on it go on as if it had
    been answered at once.
    """

    def __init__(
        self,
        trace: Trace,
        topology: Topology,
        budget: Budget,
        *,
        num_kv_blocks: int,
        max_model_len: int,
        acceptance_rate: float = ACCEPTANCE_RATE,
        clock: Clock | None = None,
        decode_stride: int = 1,
        seed: int = 0,
    ) -> None:
        if max_model_len < 1:
            raise ConfigError(f"max_model_len={max_model_len}: it is at least 1 token")
        if not 0 <= acceptance_rate <= 1:
            raise ConfigError(f"acceptance_rate={acceptance_rate}: a chance is between 0 and 1")
        if decode_stride < 1 or (decode_stride > 1 and budget.num_speculative_tokens):
            raise ConfigError(f"decode_stride={decode_stride}: at least 1, and 1 where decodes verify drafts")
        self._decode_stride, self._decode_s = decode_stride, np.inf
        self._is_full = False  # the first that waits has found no seat or too few blocks, and none have been freed
        self._requests = trace.requests
        self._budget = budget
        self._max_model_len = max_model_len
        self._virtual_block = topology.virtual_block
        self._acceptance_rate = acceptance_rate
        self._clock: Clock = clock or StepClock()
        self._rng = np.random.default_rng(seed)
        self._now = 0.0
        self._cache = PrefixCache(num_kv_blocks, self._virtual_block)
        self._blocks = self._cache.allocator
        self._arrivals = Arrivals(trace)
        num_requests = len(trace.requests)
        output_len = np.array([request.output_len for request in trace.requests], np.int64)
        self._tally = Tally(output_len)
        self._num_emitted: IntArray = np.zeros(num_requests, np.int64)  # outputs given before the last preemption
        self._was_preempted = np.zeros(num_requests, np.bool_)
        self._keys: dict[int, list[int]] = {}  # of requests that were looked up and have not finished
        longest = max((self._most_tokens(request) for request in trace.requests), default=1)
        max_blocks = min(ceil_div(longest, self._virtual_block), num_kv_blocks - 1)
        self._running = Running(min(budget.max_num_seqs, max(num_requests, 1)), max_blocks, self._virtual_block)

    @property
    def stats(self) -> ReplayStats:
        """Counts of the steps so far; of the whole replay once the iteration has ended."""
        return self._tally.stats(self._arrivals.ready_s, self._now)

    def check(self) -> None:
        """The pool is sound and each running request holds the blocks of its tokens; AssertionError otherwise."""
        self._cache.check()
        running = self._running
        order = running.order
        assert (running.num_blocks[order] * self._virtual_block >= running.num_computed[order]).all()
        refs = np.zeros(self._blocks.num_blocks, np.int64)
        for seat in order.tolist():
            np.add.at(refs, running.blocks_of(seat), 1)
        assert (refs == self._blocks.refs).all(), "holds on blocks differ from the block tables"

    def __iter__(self) -> Iterator[ScheduledStep]:
        """The steps from here on, each applied before it is given out: its effects are in stats."""
        while self._welcome():
            yield self._run_step()

    # ---- requests come -------------------------------------------------------------------------------------------

    def _welcome(self) -> bool:
        """Queue the requests whose time has come, waiting for one if nothing else is to do; False: all is done."""
        while True:
            while (req := self._arrivals.pop_ready(self._now)) is not None:
                reason = self._reason_to_refuse(self._requests[req])
                if reason is None:
                    self._arrivals.waiting.append(req)
                else:
                    self._tally.refused[reason] += 1
                    self._arrivals.answered(req, float(self._arrivals.ready_s[req]))
            if self._arrivals.waiting or self._running.order.size:
                return True
            if self._arrivals.next_s is None:
                return False
            self._now = self._arrivals.next_s

    def _reason_to_refuse(self, request: Request) -> str | None:
        if request.prompt_len == 0:
            return "the prompt is empty"
        if request.prompt_len + request.output_len > self._max_model_len:
            return f"prompt and output exceed max_model_len={self._max_model_len}"
        if ceil_div(self._most_tokens(request), self._virtual_block) >= self._blocks.num_blocks:
            return f"its KV exceeds num_kv_blocks={self._blocks.num_blocks} of {self._virtual_block} tokens"
        return None

    def _most_tokens(self, request: Request) -> int:
        """Most tokens whose KV the request holds at once: nobody reads the last output's, but drafts may follow it."""
        if request.output_len <= 1:
            return request.prompt_len
        return min(
            request.prompt_len + request.output_len - 1 + self._budget.num_speculative_tokens, self._max_model_len
        )

    # ---- one step ------------------------------------------------------------------------------------------------

    def _run_step(self) -> ScheduledStep:
        num_preemptions = self._tally.num_preemptions
        decodes = self._take_decodes()
        tokens_left = self._budget.max_num_batched_tokens - int(decodes.query_lens.sum())
        prefills = self._continue_prefills(tokens_left)
        if self._tally.num_preemptions == num_preemptions:
            tokens_left -= sum(query for _, query in prefills)
            prefills += self._admit(tokens_left)
        rows = np.array(prefills, np.int64).reshape(-1, 2)
        step = self._make_step(decodes, _Rows(rows[:, 0], rows[:, 1]))
        self._now += step.duration_s
        self._finish_decodes(decodes)
        self._finish_prefills(prefills)
        return step

    def _take_decodes(self) -> _Rows:
        """Decodes of the step, with the blocks of their next tokens; preempts until those are to be had."""
        running = self._running
        while True:
            order = running.order
            ready = order[running.num_computed[order] >= running.prefill_len[order]]
            computed = running.num_computed[ready]
            query = np.minimum(self._budget.decode_threshold, self._max_model_len - computed)
            if (stride := self._stride(ready)) > 1:
                query = np.full(len(ready), stride)
            if self._budget.decode_threshold * len(ready) > self._budget.max_num_batched_tokens:
                query = np.minimum(query, self._budget.max_num_batched_tokens - (np.cumsum(query) - query))
                taken = query > 0
                ready, query, computed = ready[taken], query[taken], computed[taken]
            missing = running.missing_blocks(ready, computed + query)
            num_missing = int(missing.sum())
            if num_missing <= self._blocks.num_free:
                break
            self._preempt(int(order[-1]))
        if num_missing:
            running.append_blocks(ready, missing, self._blocks.allocate(num_missing))
        return _Rows(ready, query)

    def _stride(self, ready: IntArray) -> int:
        """Steps that can be taken as one, when `ready` are the decodes of the first of them; 1: no more than that."""
        running, arrivals = self._running, self._arrivals
        alone = 0 < len(ready) == len(running.order) and (self._is_full or not arrivals.waiting)
        if self._decode_stride == 1 or not alone or len(ready) > self._budget.max_num_batched_tokens:
            return 1
        most = min(self._decode_stride, int(running.output_left[ready].min()))
        most = min(most, int((self._max_model_len - running.num_computed[ready]).min()))
        if arrivals.next_s is not None and not self._is_full:
            most = min(most, 1 + int((arrivals.next_s - self._now) / self._decode_s))
        blocks = running.missing_blocks(ready, running.num_computed[ready] + most)
        return most if int(blocks.sum()) <= self._blocks.num_free else 1

    def _continue_prefills(self, tokens_left: int) -> list[tuple[int, int]]:
        """(seat, query_len) of the running prefills that get tokens, first admitted first."""
        running = self._running
        order = running.order
        rows = []
        for seat in order[running.num_computed[order] < running.prefill_len[order]].tolist():
            query = min(tokens_left, int(running.prefill_len[seat] - running.num_computed[seat]))
            if query == 0:
                break
            rows.append((seat, query))
            tokens_left -= query
        return rows

    def _admit(self, tokens_left: int) -> list[tuple[int, int]]:
        """(seat, query_len) of waiting requests that start in this step."""
        waiting, running = self._arrivals.waiting, self._running
        rows = []
        self._is_full = bool(waiting) and not running.has_room
        while waiting and tokens_left > 0 and running.has_room:
            req = waiting[0]
            prefill_len = self._requests[req].prompt_len + int(self._num_emitted[req])
            if req not in self._keys:
                self._keys[req] = block_keys(self._requests[req], self._virtual_block)
            hit = self._cache.find(self._keys[req], prefill_len)
            num_fresh = ceil_div(prefill_len, self._virtual_block) - len(hit)
            if num_fresh + self._blocks.num_idle(hit) > self._blocks.num_free:
                self._is_full = True
                break
            waiting.popleft()
            self._blocks.share(hit)
            blocks = np.concatenate([np.array(hit, np.int32), self._blocks.allocate(num_fresh)])
            seat = self._start(req, prefill_len, blocks, len(hit) * self._virtual_block)
            query = min(tokens_left, prefill_len - int(running.num_computed[seat]))
            rows.append((seat, query))
            tokens_left -= query
        return rows

    def _start(self, req: int, prefill_len: int, blocks: Int32Array, hit_tokens: int) -> int:
        """Give an admitted request a seat that holds its blocks; returns the seat."""
        request, tally, num_emitted = self._requests[req], self._tally, int(self._num_emitted[req])
        seat = self._running.add(req, prefill_len, request.output_len - num_emitted)
        self._running.append_blocks(np.array([seat]), np.array([len(blocks)]), blocks)
        self._running.num_computed[seat] = hit_tokens
        if self._was_preempted[req]:
            tally.resumed_hit_tokens += hit_tokens
        else:
            tally.admitted_s[req] = self._now
            tally.prompt_tokens += request.prompt_len
            tally.needed_tokens += request.prompt_len + max(request.output_len - 1, 0)
            tally.prefix_hit_tokens += hit_tokens
        return seat

    def _preempt(self, seat: int) -> None:
        """Take a request off the engine: its blocks are free, and it waits in front of the queue to start again."""
        req = int(self._running.req[seat])
        self._num_emitted[req] = self._requests[req].output_len - self._running.output_left[seat]
        self._was_preempted[req] = True
        self._tally.dropped_tokens += int(self._running.num_computed[seat])
        self._tally.num_preemptions += 1
        self._release(np.array([seat]))
        self._arrivals.waiting.appendleft(req)

    def _release(self, leaving: IntArray) -> None:
        self._is_full = False
        for seat in leaving.tolist():
            self._blocks.free(self._running.blocks_of(seat))
        self._running.remove(leaving)

    def _make_step(self, decodes: _Rows, prefills: _Rows) -> ScheduledStep:
        running, tally = self._running, self._tally
        rows = np.concatenate([decodes.seats, prefills.seats])
        query_lens = np.concatenate([decodes.query_lens, prefills.query_lens])
        assert len(rows), "a step without a request: the engine is stuck"
        width = int(running.num_blocks[rows].max())
        arrays = (
            running.num_computed[rows] + query_lens,
            query_lens,
            running.prefill_len[rows],
            running.tables[rows, :width],
            running.req[rows],
        )
        batch = Batch(*map(seal, arrays))  # sealed, so that Batch need not copy the tables once more
        duration_s = self._clock.step_seconds(batch)
        if not 0 <= duration_s < np.inf:
            raise ConfigError(f"the clock gives a step {duration_s} s: a duration is finite and not negative")
        step = ScheduledStep(
            index=tally.num_steps,
            time_s=self._now,
            duration_s=duration_s,
            batch=batch,
            num_waiting=len(self._arrivals.waiting),
            num_held_blocks=self._blocks.num_held,
        )
        if not len(prefills.seats):
            self._decode_s = max(duration_s / int(query_lens.max()), 1e-6)
        tally.num_steps += 1
        tally.num_tokens += batch.num_tokens
        tally.peak_blocks = max(tally.peak_blocks, step.num_held_blocks)
        return step

    # ---- what the step gave --------------------------------------------------------------------------------------

    def _finish_decodes(self, decodes: _Rows) -> None:
        """Keep each decode's own token and the drafts before the first rejected one, up to its last output."""
        running = self._running
        rows, kept = decodes.seats, np.minimum(decodes.query_lens, running.output_left[decodes.seats])
        num_drafts = min(self._budget.num_speculative_tokens, self._budget.max_num_batched_tokens - 1)
        if num_drafts and len(rows):
            accepted = self._rng.random((len(rows), num_drafts)) < self._acceptance_rate
            kept = np.minimum(kept, 1 + np.cumprod(accepted, axis=1).sum(axis=1))
        running.num_computed[rows] += kept
        running.output_left[rows] -= kept
        self._tally.output_tokens += int(kept.sum())
        self._tally.rejected_tokens += int((decodes.query_lens - kept).sum())
        self._finish_requests(rows[running.output_left[rows] == 0])

    def _finish_prefills(self, prefills: list[tuple[int, int]]) -> None:
        """Keep whole prompt blocks for others to find; a prefill that is through gives its next output token."""
        running = self._running
        done = []
        for seat, query in prefills:
            req = int(running.req[seat])
            keys = self._keys[req]
            before = int(running.num_computed[seat])
            after = running.num_computed[seat] = before + query
            whole = slice(before // self._virtual_block, min(after // self._virtual_block, len(keys)))
            self._cache.keep(keys[whole], running.tables[seat, whole])
            if after < running.prefill_len[seat]:
                continue
            if running.output_left[seat]:
                running.output_left[seat] -= 1
                self._tally.output_tokens += 1
                if np.isnan(self._tally.first_token_s[req]):
                    self._tally.first_token_s[req] = self._now
            if running.output_left[seat] == 0:
                done.append(seat)
        self._finish_requests(np.array(done, np.int64))

    def _finish_requests(self, leaving: IntArray) -> None:
        if not len(leaving):
            return
        for req in self._running.req[leaving].tolist():
            self._tally.finish_s[req] = self._now
            self._keys.pop(req)
            self._arrivals.answered(req, self._now)
        self._release(leaving)
