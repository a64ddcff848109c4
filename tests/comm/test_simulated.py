"""Simulated ranks: what each operation means, counted in lists; independence of threads; ends that come at once."""

import threading
import time

import pytest
import torch

from cpkit.comm.simulated import run_ranks
from cpkit.errors import DesyncError
from cpkit.topology import GROUPS, Topology
from tests.comm.mixed import WORLDS, mixed
from tests.comm.plants import PLANTS, planted

ODD = WORLDS["tp2-pcp2-dcp4"]  # its DCP group is 0, 2, 1, 3


def rows_of(rank, count):
    """Rows that tell where they came from: 100 * rank + place."""
    return [100 * rank + place for place in range(count)]


@pytest.mark.parametrize("world", [*WORLDS.values(), Topology(), Topology(tp=3, pcp=3, dcp=9)], ids=str)
@pytest.mark.parametrize("part", [0, 1, 3])
def test_what_each_operation_means(world, part):
    def program(comm):
        results = {}
        for name in GROUPS:
            own = torch.tensor(rows_of(comm.rank, part), dtype=torch.int64)
            whole = torch.tensor(rows_of(comm.rank, part * comm.group(name).size), dtype=torch.int64)
            results[name] = [
                comm.all_gather(own, name, what="a").tolist(),
                comm.all_to_all(whole, name, what="b").tolist(),
                comm.reduce_scatter(whole, name, what="c").tolist(),
                comm.all_reduce(own, name, what="d").tolist(),
                comm.all_reduce(own, name, what="d", reduction="min").tolist(),
                comm.all_reduce(own, name, what="d", reduction="max").tolist(),
            ]
        return results

    for rank, results in enumerate(run_ranks(world, program)):
        for name in GROUPS:
            members = next(ranks for ranks in world.groups(name) if rank in ranks)
            place, size = members.index(rank), len(members)
            own = [rows_of(member, part) for member in members]
            mine = [rows_of(member, part * size)[place * part : (place + 1) * part] for member in members]
            assert results[name] == [
                [row for rows in own for row in rows],
                [row for rows in mine for row in rows],
                [sum(column) for column in zip(*mine, strict=True)],
                [sum(column) for column in zip(*own, strict=True)],
                [min(column) for column in zip(*own, strict=True)],
                [max(column) for column in zip(*own, strict=True)],
            ]


def test_ranks_know_their_place():
    seen = run_ranks(ODD, lambda comm: (comm.rank, comm.size, comm.topology, comm.group("dcp")))
    assert [(rank, size, topology) for rank, size, topology, _ in seen] == [(rank, 4, ODD) for rank in range(4)]
    assert all(group.ranks == (0, 2, 1, 3) and group.size == 4 for *_, group in seen)
    assert [group.place for *_, group in seen] == [0, 2, 1, 3]


def test_results_do_not_depend_on_the_order_of_threads():
    def in_turn(order):
        def program(comm):
            time.sleep(0.02 * order[comm.rank])
            return mixed(comm)

        return run_ranks(ODD, program)

    first, second = in_turn([0, 1, 2, 3]), in_turn([3, 1, 0, 2])
    for one, other in zip(first, second, strict=True):
        assert all(
            torch.equal(one[key].view(-1).view(torch.uint8), other[key].view(-1).view(torch.uint8)) for key in one
        )


@pytest.mark.parametrize("group", ["tp", "world"])  # groups of one rank, and of all
def test_a_buffer_may_be_reused_at_once(group):
    def program(comm):
        buffer = torch.zeros(4)
        sums = []
        for step in range(20):
            buffer.fill_(step)
            gathered = comm.all_gather(buffer, group, what="x")
            buffer.fill_(-1)
            sums.append(gathered.sum().item())
            gathered.fill_(-1)  # nor do results share memory
        return sums

    size = 4 if group == "world" else 1
    assert run_ranks(Topology(pcp=4), program) == [[4.0 * size * step for step in range(20)]] * 4


def test_256_ranks():
    world = Topology(tp=16, pcp=16, dcp=256)

    def program(comm):
        own = torch.tensor([comm.rank])
        for step in range(50):
            gathered = comm.all_gather(own, ("dcp", "tp", "pcp", "world")[step % 4], what="rank")
            assert gathered.tolist() == list(comm.group(("dcp", "tp", "pcp", "world")[step % 4]).ranks)
        return comm.rank

    start = time.process_time()
    assert run_ranks(world, program) == list(range(256))
    assert (
        time.process_time() - start < 30
    )  # 4 s when nothing else runs; waits that grow with ranks squared take minutes


def test_threads_and_settings_are_given_back():
    before = threading.active_count(), torch.get_num_threads(), threading.stack_size()
    assert run_ranks(ODD, lambda comm: torch.get_num_threads()) == [1, 1, 1, 1]
    assert (threading.active_count(), torch.get_num_threads(), threading.stack_size()) == before


def watched(program, world=ODD, timeout_s=30.0):
    """The error of a run, what each rank was told, and the seconds it took."""
    told = {}

    def run(comm):
        try:
            return program(comm)
        except DesyncError as error:
            told[comm.rank] = str(error)
            raise

    start = time.monotonic()
    with pytest.raises(Exception) as failure:  # noqa: PT011 - the caller looks at it
        run_ranks(world, run, timeout_s=timeout_s)
    return failure.value, told, time.monotonic() - start


def gather(comm, group, what):
    comm.all_gather(torch.zeros(4), group, what=what)


@pytest.mark.parametrize(
    "plant", [plant for plant in PLANTS if plant.__name__ != "skipped_collective"], ids=lambda p: p.__name__
)
def test_a_planted_fault_is_named_on_every_rank(plant):
    error, told, seconds = watched(lambda comm: planted(comm, plant))
    title, *lines = str(error).splitlines()
    assert PLANTS[plant] in title and "over world (ranks 0..3)" in title
    assert [line.split(":")[0] for line in lines] == ["  ranks 0, 1, 3", "  rank 2"]
    assert all("comm/plants.py:" in line for line in lines)
    assert told == dict.fromkeys(range(4), str(error))
    assert seconds < 10


def test_a_skipped_collective_shows_at_the_next():
    def program(comm):
        gather(comm, "dcp", "first")
        if comm.rank != 2:
            gather(comm, "dcp", "second")
        gather(comm, "dcp", "third")

    error, told, _ = watched(program)
    assert str(error).startswith(
        "ranks disagree about what in call 2 over dcp (ranks 0, 2, 1, 3)\n  ranks 0, 1, 3: all_gather of second,"
    )
    assert "\n  rank 2: all_gather of third," in str(error)
    assert told == dict.fromkeys(range(4), str(error))


@pytest.mark.parametrize("skipped", ["tp", "dcp"])
def test_ranks_that_wait_for_each_other_in_other_groups(skipped):
    def program(comm):
        gather(comm, "world", "first")
        for name in ("tp", "dcp", "world"):
            if not (comm.rank == 2 and name == skipped):
                gather(comm, name, f"over_{name}")

    error, told, seconds = watched(program)
    next_name = {"tp": "dcp", "dcp": "world"}[skipped]
    number = {"dcp": 1, "world": 2}[next_name]
    assert str(error).startswith("no rank can go on: each waits for one that is elsewhere")
    rank_2 = next(
        line for line in str(error).splitlines() if "rank 2:" in line or f"call {number} over {next_name}" in line
    )
    assert f"waiting in call {number} over {next_name}" in rank_2 and "comm/test_simulated.py:" in rank_2
    assert f"over {skipped} (ranks" in str(error)
    assert told == dict.fromkeys(range(4), str(error))
    assert seconds < 10


def test_the_same_ranks_under_another_name_are_another_group():
    error, _, _ = watched(lambda comm: gather(comm, "world" if comm.rank else "dcp", "x"))
    assert "rank 0: waiting in call 1 over dcp" in str(error) and "ranks 1..3: waiting in call 1 over world" in str(
        error
    )


@pytest.mark.parametrize("head_start", [False, True], ids=["leaves-last", "leaves-first"])
def test_a_rank_that_returns_early(head_start):
    def program(comm):
        gather(comm, "world", "first")
        if comm.rank == 2:
            time.sleep(0 if head_start else 0.1)
            return
        time.sleep(0.1 if head_start else 0)
        gather(comm, "dcp", "second")

    error, told, seconds = watched(program)
    title, *lines = str(error).splitlines()
    assert title.startswith("rank 2 returned while others wait")
    assert any(
        line.startswith("  rank 2: returned, last seen in call 1 over world: all_gather of first") for line in lines
    )
    assert told == dict.fromkeys((0, 1, 3), str(error))
    assert seconds < 10


def test_ranks_may_finish_at_different_times():
    def program(comm):
        if comm.rank >= 2:  # the other TP group
            gather(comm, "tp", "late")
            time.sleep(0.05)
            gather(comm, "tp", "later")
        return comm.rank

    assert run_ranks(ODD, program) == [0, 1, 2, 3]


def test_an_error_comes_first_and_releases_the_others():
    def program(comm):
        if comm.rank == 1:
            raise KeyError("planted")
        comm.barrier("world")

    error, told, seconds = watched(program)
    assert type(error) is KeyError and error.args == ("planted",)
    assert error.__notes__ == ["rank 1 raised KeyError: 'planted'\nthe other 3 ranks were released"]
    assert told == dict.fromkeys((0, 2, 3), "rank 1 raised KeyError: 'planted'")
    assert seconds < 10


def test_a_rank_that_exits_fails_the_run():
    def program(comm):
        if comm.rank == 1:
            raise SystemExit(0)
        comm.barrier("world")

    with pytest.raises(DesyncError, match=r"^rank 1 raised SystemExit: 0$"):
        run_ranks(Topology(tp=2), program)


def test_a_rank_that_never_comes():
    release = threading.Event()

    def program(comm):
        gather(comm, "world", "first")
        if comm.rank == 3:
            release.wait(30)
        gather(comm, "dcp", "second")

    error, told, seconds = watched(program, timeout_s=0.3)
    release.set()
    assert str(error).startswith(
        "no rank entered a collective for 0.3 s\n  rank 3: did not come, last seen in call 1 over world"
    )
    assert "\n  ranks 0..2: waiting in call 1 over dcp (ranks 0, 2, 1, 3): all_gather of second" in str(error)
    assert {told[rank] for rank in range(3)} == {str(error)}
    assert seconds < 10


def test_slow_ranks_are_waited_for_while_any_goes_on():
    def program(comm):
        if comm.rank < 2:
            for _ in range(8):
                time.sleep(0.1)
                gather(comm, "tp", "busy")
        gather(comm, "world", "together")

    assert run_ranks(ODD, program, timeout_s=0.6) == [None] * 4


def test_a_failed_run_goes_on_failing_for_a_rank_that_swallows_the_error():
    def program(comm):
        for _ in range(3):
            try:
                gather(comm, "world", "x" if comm.rank else "y")
            except DesyncError:
                continue
        return comm.rank

    with pytest.raises(DesyncError, match="disagree about what in call 1"):
        run_ranks(ODD, program)
