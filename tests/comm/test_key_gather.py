"""The key gather over simulated ranks: every key in its place, counted as the plan counts it, and what is refused."""

import pytest

from cpkit.cli import run
from cpkit.comm.key_gather import GATHERS, in_turn, make_key_gather
from cpkit.comm.simulated import run_ranks
from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.key_shards import KeyShards
from cpkit.topology import Topology
from tests.comm.key_shards import DIM, STEPS, check_keys, workspace

OPTIONS = {"dim": DIM, "max_keys": 400, "backend": "torch", "timeout_s": 1}


@pytest.mark.parametrize(
    "world",
    [
        pytest.param({"pcp": 2, "dcp": 2}, id="two-ranks"),
        pytest.param({"pcp": 3, "dcp": 3}, id="odd-ranks"),
        pytest.param({"tp": 2, "pcp": 2, "dcp": 4}, id="ranks-in-another-order"),
    ],
)
@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_every_key_finds_its_place(world, interleave):
    def program(comm):
        gather = make_key_gather(comm, "collective", **OPTIONS)
        for step, chunks in enumerate(STEPS):
            made = [workspace(comm, lens, interleave, step) for lens in chunks]
            found = in_turn(gather, [(cache, table) for cache, table, _ in made], interleave=interleave)
            for lens, (_, _, extents), keys in zip(chunks, made, found, strict=True):
                check_keys(keys, lens, extents, (world, lens))
            gather.check()
            sent = [(entry.op, entry.group, entry.what, entry.dtype, entry.bytes) for entry in comm.ledger.take()]
            sizes = [table.num_keys * (DIM + 4) for _, table, _ in made if table.num_keys]
            assert sent == [("all_gather", "dcp", "index_keys", "uint8", size) for size in sizes]

    run_ranks(Topology(**world), program)


@pytest.mark.parametrize(
    ("lens", "aligned"), [pytest.param([70, 0, 5], True, id="aligned"), pytest.param([30, 3], False, id="few-keys")]
)
def test_the_kernels_take_shards_as_they_come_if_these_are_aligned(lens, aligned):
    def program(comm):
        gather = make_key_gather(comm, "collective", **OPTIONS | {"backend": "triton"})
        cache, table, extents = workspace(comm, lens, 1, 0)
        keys = gather.start(cache, table, interleave=1).wait()
        assert isinstance(keys, KeyShards) == aligned
        check_keys(keys, lens, extents, lens)
        assert [entry.bytes for entry in comm.ledger.take()] == [table.num_keys * (DIM + 4)]

    run_ranks(Topology(pcp=3, dcp=3), program)


def test_the_command_line_names_the_same_gathers():
    assert run.GATHERS == GATHERS


def test_gathers_that_cannot_be():
    def program(comm):
        with pytest.raises(ConfigError, match="use one of collective, symmetric"):
            make_key_gather(comm, "nvlink", **OPTIONS)
        with pytest.raises(ConfigError, match=r"ranks read each other's GPU memory, .* use gather collective"):
            make_key_gather(comm, "symmetric", **OPTIONS)

    run_ranks(Topology(pcp=2, dcp=2), program)


def test_no_workspaces_are_no_gathers():
    def program(comm):
        gather = make_key_gather(comm, "collective", **OPTIONS)
        assert list(in_turn(gather, [], interleave=1)) == [] and comm.ledger.take() == ()

    run_ranks(Topology(pcp=2, dcp=2), program)


def test_there_are_two_workspaces_however_many_are_gathered():
    """Gather 2 fills the memory of gather 0, and so on; one that does not fit the budget is refused."""

    def program(comm):
        gather = make_key_gather(comm, "collective", **OPTIONS)
        lens = [[9], [5, 4], [2], [7], [1]]
        made = [workspace(comm, each, 1, step) for step, each in enumerate(lens)]
        seen = []
        for each, (_, _, extents), keys in zip(
            lens, made, in_turn(gather, [(cache, table) for cache, table, _ in made], interleave=1), strict=True
        ):
            check_keys(keys, each, extents, each)
            seen.append(tuple(part.data_ptr() for part in keys))
        assert seen == [seen[0], seen[1], seen[0], seen[1], seen[0]] and seen[0] != seen[1]
        small = make_key_gather(comm, "collective", **OPTIONS | {"max_keys": made[0][1].num_keys - 1})
        with pytest.raises(PlanError, match="size them by the budget"):
            small.start(*made[0][:2], interleave=1)

    run_ranks(Topology(pcp=2, dcp=2), program)
