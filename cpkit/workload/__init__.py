"""From a request trace to the batches of a serving engine: readers, paged KV blocks, prefix cache, scheduler."""

from cpkit.workload.request import Request, Trace
from cpkit.workload.traces import read_trace

__all__ = ["Request", "Trace", "read_trace"]
