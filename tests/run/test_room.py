"""The KV pool that a run may ask for, against caches that are really made."""

import numpy as np
import pytest
import torch

from cpkit.batch import Batch
from cpkit.errors import InputError
from cpkit.run.room import MOST_GPU_BYTES, block_bytes, check_room, rank_room
from cpkit.run.steps import batch_steps, prompt_steps, trace_steps
from cpkit.worker.caches import make_caches
from cpkit.workload.request import Request, Trace
from tests.worker.worlds import Case

SETTINGS = Case("dsa", 1, {"tp": 2, "dcp": 2}).settings
BLOCK = SETTINGS.topology.virtual_block
EACH = block_bytes(SETTINGS.model, SETTINGS.topology)


@pytest.mark.parametrize("dcp", [1, 2])
@pytest.mark.parametrize(("kind", "interleave"), [("dsa", 1), ("c4a", 4), ("c128a", 128), ("swa", 1)])
def test_bytes_of_a_block_are_those_of_caches(kind, interleave, dcp):
    settings = Case(kind, interleave, {"tp": 2, "dcp": dcp}).settings
    held = 0
    for layer in settings.model.layers:
        caches = make_caches(layer, settings.topology, 3, torch.device("cpu"), backend="torch")
        held += sum(one.nbytes for one in (caches.latent, caches.index, caches.window) if one is not None)
    assert 3 * block_bytes(settings.model, settings.topology) == held


@pytest.mark.parametrize(("room", "fits"), [(3 * EACH, True), (3 * EACH - 1, False), (0, False)])
def test_a_pool_fits_to_the_last_byte(room, fits):
    if fits:
        check_room("x", 3, room, SETTINGS.model, SETTINGS.topology)
        return
    with pytest.raises(InputError, match=rf"^x: a pool of 3 KV blocks .* there is room for {room // EACH} blocks"):
        check_room("x", 3, room, SETTINGS.model, SETTINGS.topology)


def test_ranks_of_one_process_share_its_memory():
    alone = rank_room("cpu", 1)
    assert alone > 1 << 28 and rank_room("cpu", 4) == alone // 4
    assert rank_room("cuda", 4) == MOST_GPU_BYTES


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        pytest.param(
            lambda **room: batch_steps(Batch.from_lens([9 * BLOCK], [1]), SETTINGS, "x", **room), 10, id="new"
        ),
        pytest.param(
            lambda **room: batch_steps(Batch.from_lens([1], [1], block_tables=[[9]]), SETTINGS, "x", **room),
            10,
            id="highest-block-id",
        ),
        pytest.param(lambda **room: prompt_steps([8 * BLOCK], BLOCK - 1, SETTINGS, 0, **room), 10, id="prompts"),
        pytest.param(
            lambda **room: trace_steps(
                Trace("x", "test", (Request(0, 0.0, 8 * BLOCK, 1),)),
                SETTINGS,
                num_blocks=10,
                max_steps=1,
                seed=0,
                **room,
            ),
            10,
            id="trace",
        ),
    ],
)
def test_every_kind_of_steps_asks_for_room(make, blocks):
    assert make(room=blocks * EACH).pool.num_blocks == blocks
    with pytest.raises(InputError, match=f"a pool of {blocks} KV blocks"):
        make(room=blocks * EACH - 1)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: batch_steps(Batch.from_lens([1 << 40], [1]), SETTINGS, "x"), id="longest-context"),
        pytest.param(
            lambda: batch_steps(Batch.from_lens([1], [1], block_tables=[[np.iinfo(np.int32).max]]), SETTINGS, "x"),
            id="largest-block-id",
        ),
        pytest.param(lambda: prompt_steps([99_999_999_999], 4, SETTINGS, 0), id="longest-prompt"),
        pytest.param(lambda: prompt_steps([1], 99_999_999_999, SETTINGS, 0), id="most-decodes"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_grows_with_them(make):
    with pytest.raises(InputError, match="shorter sequences or fewer of them, or name blocks by small ids"):
        make()
