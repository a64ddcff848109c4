"""Requests come in order of time, and followers only after an answer."""

from cpkit.workload import Request, Trace
from cpkit.workload.arrivals import Arrivals


def test_requests_come_once_in_order_of_their_time():
    requests = [
        Request(0, 3.0, 1, 1),
        Request(1, 1.0, 1, 1),
        Request(2, 0.0, 1, 1, depends_on=0, think_time_s=2.0),
        Request(3, 9.0, 1, 1, depends_on=0, think_time_s=2.0),
        Request(4, 1.0, 1, 1),
    ]
    arrivals = Arrivals(Trace("made", "made", tuple(requests)))
    assert arrivals.pop_ready(0.5) is None
    assert arrivals.next_s == 1.0
    assert [arrivals.pop_ready(3.0) for _ in range(4)] == [1, 4, 0, None]
    assert arrivals.next_s is None
    arrivals.answered(0, 5.0)
    arrivals.answered(0, 6.0)  # an answer is given once
    assert [arrivals.pop_ready(100.0) for _ in range(3)] == [2, 3, None]
    assert arrivals.ready_s.tolist() == [3.0, 1.0, 7.0, 9.0, 1.0]
