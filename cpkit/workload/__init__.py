"""From a request trace to the batches of a serving engine: readers, paged KV blocks, prefix cache, scheduler."""

from cpkit.workload.blocks import BlockAllocator
from cpkit.workload.clock import Clock, StepClock
from cpkit.workload.prefix_cache import PrefixCache
from cpkit.workload.request import Request, Trace
from cpkit.workload.scheduler import ScheduledStep, Scheduler
from cpkit.workload.stats import ReplayStats
from cpkit.workload.traces import read_trace

__all__ = [
    "BlockAllocator",
    "Clock",
    "PrefixCache",
    "ReplayStats",
    "Request",
    "ScheduledStep",
    "Scheduler",
    "StepClock",
    "Trace",
    "read_trace",
]
