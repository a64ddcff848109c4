"""When requests come: at their own time, and not before the request they depend on is answered."""

from collections import deque
from heapq import heapify, heappop, heappush

import numpy as np

from cpkit.arrays import FloatArray
from cpkit.workload.request import Trace


class Arrivals:
    """Requests on their way, and the queue of those that have come, first come, first served.

    ready_s: [num_requests] float64, when each request could start; NaN until that is known.
    waiting: req_ids that have come and do not run; a preempted one is put back in front by its owner.
    """

    def __init__(self, trace: Trace) -> None:
        self.waiting: deque[int] = deque()
        self.ready_s: FloatArray = np.full(len(trace.requests), np.nan)
        self._requests = trace.requests
        self._followers: dict[int, list[int]] = {}
        self._coming: list[tuple[float, int]] = []
        for request in trace.requests:
            if request.depends_on is None:
                self._coming.append((request.arrival_s, request.req_id))
            else:
                self._followers.setdefault(request.depends_on, []).append(request.req_id)
        heapify(self._coming)

    @property
    def next_s(self) -> float | None:
        """When the next request comes, None if none is on its way."""
        return self._coming[0][0] if self._coming else None

    def pop_ready(self, now: float) -> int | None:
        """The earliest request whose time has come, no longer on its way; None if there is none."""
        if not self._coming or self._coming[0][0] > now:
            return None
        ready, req = heappop(self._coming)
        self.ready_s[req] = ready
        return req

    def answered(self, req: int, at_s: float) -> None:
        """Send the requests that depend on req on their way: each comes when its think time is over."""
        for follower in self._followers.pop(req, ()):
            request = self._requests[follower]
            heappush(self._coming, (max(request.arrival_s, at_s + request.think_time_s), follower))
