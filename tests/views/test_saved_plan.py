"""Plans in files: what comes back is what was planned, and a damaged or changed file is refused."""

import numpy as np
import pytest

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.errors import InputError, PlanError
from cpkit.model import load_model
from cpkit.step import plan_step
from cpkit.topology import Topology
from cpkit.views.saved_plan import load_plan, save_plan


def make_plan(**options):
    model = load_model("deepseek-v4-flash")
    topology = Topology(tp=2, pcp=2, dcp=4, interleave=128, block_size=256)
    batch = Batch.from_lens([300, 900, 2000], [1, 0, 1999], block_tables=[[1], [2], [3, 4]])
    return plan_step(batch, topology, model, default_budget(model), **options)


@pytest.mark.parametrize("partition", ["head_tail", "round_robin"])
@pytest.mark.parametrize("rank", [None, 2])
def test_round_trip(tmp_path, partition, rank):
    plan = make_plan(partition=partition, rank=rank)
    save_plan(plan, tmp_path / "plan.npz")
    saved = load_plan(tmp_path / "plan.npz")
    assert saved.header["digests"] == plan.digests()
    assert saved.batch.to_json() == plan.batch.to_json()
    assert saved.ranks == tuple(rank.rank for rank in plan.ranks)
    for i, rank_plan in enumerate(plan.ranks):
        rows = saved.rows(rank_plan.rank)
        assert (rows.positions() == rank_plan.rows.positions()).all() and (rows.reqs() == rank_plan.rows.reqs()).all()
        assert rows.num_decodes == rank_plan.rows.num_decodes
        assert saved.arrays["stored_keys_4"][i].tolist() == plan.shards[4].local_lens(rank_plan.dcp_rank).tolist()
    assert saved.arrays["new_keys_128"].sum() * (4 if rank is not None else 1) >= 1999 // 128


def test_equal_plans_give_equal_files(tmp_path):
    for name in ("a", "b"):
        save_plan(make_plan(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_rank_that_was_not_saved(tmp_path):
    save_plan(make_plan(rank=2), tmp_path / "plan.npz")
    with pytest.raises(PlanError, match=r"rank 0 is not in this file, which holds \[2\]"):
        load_plan(tmp_path / "plan.npz").rows(0)


def rewrite(path, **changes):
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **{name: array for name, array in (arrays | changes).items() if array is not None})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"seq_lens": np.array([301, 900, 2000])}, "seq_lens differs from what was planned", id="changed"),
        pytest.param({"block_tables": None}, "block_tables differs from what was planned", id="tables-removed"),
        pytest.param({"query_lens": np.array([1.0, 0, 1999])}, "float64", id="floats"),
        pytest.param({"header": None}, "not a saved plan", id="no-header"),
        pytest.param({"header": np.frombuffer(b'{"format": "x"}', np.uint8)}, "format 'x'", id="other-format"),
        pytest.param({"header": np.frombuffer(b"[]", np.uint8)}, "not a saved plan", id="other-json"),
    ],
)
def test_changed_files_are_refused(tmp_path, changes, reason):
    path = tmp_path / "plan.npz"
    save_plan(make_plan(), path)
    rewrite(path, **changes)
    with pytest.raises(InputError, match=reason) as refusal:
        load_plan(path)
    assert str(path) in str(refusal.value)


def test_no_plan_at_all(tmp_path):
    path = tmp_path / "plan.npz"
    save_plan(make_plan(), path)
    for content in (b"", b"{}", path.read_bytes()[:-40]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="not a saved plan"):
            load_plan(path)
    with pytest.raises(InputError, match="No such file"):
        load_plan(tmp_path / "missing.npz")


def test_a_flipped_byte_is_refused_or_does_no_harm(tmp_path):
    path = tmp_path / "plan.npz"
    save_plan(make_plan(), path)
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 1 + len(whole) // 300):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            load_plan(path)
        except InputError:
            refused += 1
    assert refused > 200


def test_pickled_objects_are_not_run(tmp_path):
    path = tmp_path / "plan.npz"
    save_plan(make_plan(), path)
    rewrite(path, req_ids=np.array([Topology(), 1, 2], object))
    with pytest.raises(InputError, match="not a saved plan"):
        load_plan(path)
