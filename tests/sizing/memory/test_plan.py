"""Memory: bytes counted layer by layer from the published fields, blocks dealt out one by one."""

import json
from pathlib import Path

import pytest

import cpkit
from cpkit.budget import Budget
from cpkit.errors import ConfigError
from cpkit.model import MODELS, load_model
from cpkit.sizing.chips import chip
from cpkit.sizing.figures import Figure
from cpkit.sizing.memory.plan import MemorySettings, cache_rows, plan_memory, window_tokens
from cpkit.topology import Topology

DATA = Path(cpkit.__file__).parent / "data" / "models"


def settings(name="deepseek-v3.2", *, weights_gb=70.0, replicates_index=False, workspace=40_000, logits_mb=64, **sizes):
    model = load_model(name)
    return MemorySettings(
        model=model,
        topology=Topology(**{"tp": 8, **sizes}),
        budget=Budget(
            workspace_tokens=workspace, logits_bytes=logits_mb << 20, max_num_batched_tokens=1024, max_num_seqs=16
        ),
        chip=chip("h200"),
        weights=Figure(weights_gb * 1e9, "given", "test"),
        utilization=Figure(0.9, "given", "test"),
        max_model_len=32_768,
        replicates_index=replicates_index,
    )


def layer_rows(name):
    """(bytes a token of keys, bytes a token of indexer keys) of every layer of a model, from its fact file."""
    facts = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    config = facts["config"]
    rows = []
    for i in range(config["num_hidden_layers"]):
        if facts["family"] == "dsa":
            kinds = config.get("indexer_types", ["full"] * config["num_hidden_layers"])
            rows.append((656, 132 if kinds[i] == "full" else 0))
        elif facts["family"] == "dsa_kpool":
            rows.append((656, 132 / 16) if i % 4 == 3 else (0, 0))
        elif facts["family"] == "compressed_kv":
            ratio = config["compress_ratios"][i]
            rows.append((584 / ratio if ratio else 0, 132 / 4 if ratio == 4 else 0))
        else:
            ratio, owns = config["compress_ratios"][i], i in config["kv_source_layer_ids"]
            rows.append((528 / ratio, 132 / ratio) if owns else (0, 0))
    return rows


@pytest.mark.parametrize("replicated", [pytest.param(False, id="sharded"), pytest.param(True, id="replicated")])
@pytest.mark.parametrize("dcp", [1, 2, 8])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_a_token(name, dcp, replicated):
    rows = layer_rows(name)
    keys, index = sum(row[0] for row in rows) / dcp, sum(row[1] for row in rows) / (1 if replicated else dcp)
    topology = Topology(tp=8, dcp=dcp, block_size=128, interleave=128)
    found = cache_rows(load_model(name), topology, replicates_index=replicated)
    assert sum(row.keys for row in found) == pytest.approx(keys)
    assert sum(row.index for row in found) == pytest.approx(index)


def test_stages_share_the_layers():
    one = cache_rows(load_model("deepseek-v3.2"), Topology(tp=8), replicates_index=False)
    four = cache_rows(load_model("deepseek-v3.2"), Topology(tp=8, pp=4), replicates_index=False)
    assert one[0].per_token == pytest.approx(61 * 788) and four[0].per_token == pytest.approx(16 * 788)


@pytest.mark.parametrize(
    ("window_size", "block_size"),
    [
        pytest.param(0, 64, id="none"),
        pytest.param(1, 64, id="one-token"),
        pytest.param(64, 64, id="a-block"),
        pytest.param(65, 64, id="a-block-and-one"),
        pytest.param(128, 64, id="two-blocks"),
        pytest.param(5, 7, id="odd"),
    ],
)
def test_window_blocks_at_worst(window_size, block_size):
    worst = max(
        (len({(end - back) // block_size for back in range(window_size)}) for end in range(1000, 1000 + block_size)),
        default=0,
    )
    assert window_tokens(window_size, block_size) == worst * block_size


@pytest.mark.parametrize("name", ["deepseek-v3.2", "deepseek-v4-flash"])
@pytest.mark.parametrize("dcp", [1, 8])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 1024, 1025, 30_000])
def test_requests_by_dealing_blocks_out(name, dcp, length):
    memory = plan_memory(settings(name, weights_gb=118, dcp=dcp, block_size=128, interleave=128))
    layers = load_model(name).layers
    block = sum(
        128 * (layer.num_layers * (layer.key_bytes / layer.compress_ratio if layer.compress_ratio else 0))
        + 128 * (layer.num_layers * (layer.index.key_bytes / layer.index.ratio if layer.index else 0))
        for layer in layers
    )
    windows = sum(layer.num_layers * 2 * 128 * layer.window_bytes for layer in layers if layer.window_size)
    free, count = memory.room - block, 0  # the null block
    while True:
        need, tokens = windows, 0
        while tokens < length:
            need, tokens = need + block, tokens + 128 * dcp
        if need > free + 1e-6:
            break
        free, count = free - need, count + 1
    assert memory.requests(length) == count


def test_room_is_what_is_left():
    memory = plan_memory(settings(dcp=8))
    parts = 70e9 + sum(buffer.bytes for buffer in memory.buffers) + memory.room
    assert parts == pytest.approx(141e9 * 0.9)
    assert memory.num_blocks * memory.block_bytes <= memory.room < (memory.num_blocks + 1) * memory.block_bytes
    assert memory.tokens == (memory.num_blocks - 1) * 512
    assert memory.tokens_per_rank * 8 == memory.tokens


def test_buffers_of_a_step():
    """V3.2, tp = dcp = 8, 1,024 tokens a step of 16 requests, 32,768 tokens each: sizes by hand."""
    buffers = {buffer.name: buffer.bytes for buffer in plan_memory(settings(dcp=8)).buffers}
    assert buffers == {
        "index workspace": 40_000 * 132,
        "prefill logits": 64 << 20,
        "decode logits": 16 * 4096 * 4,
        "query_heads": 9 * (1024 * 16 * 576 * 2),
        "candidates": 9 * (512 * 2048 * 12),  # 64 MiB of logits hold 512 rows of 32,768
        "lse": 9 * (1024 * 128 * 4),
        "outputs": (1024 * 128 * 512 * 4) * 9 // 8,
    }


def test_no_rank_holds_candidates_where_index_keys_are_replicated():
    buffers = {buffer.name: buffer.bytes for buffer in plan_memory(settings(dcp=8, replicates_index=True)).buffers}
    assert "candidates" not in buffers and buffers["decode logits"] == 16 * 32_768 * 4


def test_each_decode_is_scored_on_one_pcp_rank():
    buffers = {buffer.name: buffer.bytes for buffer in plan_memory(settings(tp=4, pcp=2)).buffers}
    assert buffers["decode logits"] == 8 * 32_768 * 4
    assert buffers["hidden_rows"] == 3 * 512 * 7168 * 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"weights_gb": 126.88}, "no room for KV on h200: 118.2 GiB usable less 118.2 GiB", id="no-room"),
        pytest.param({"workspace": 10**9}, "GiB of buffers a rank; use more ranks, a smaller workspace", id="buffers"),
    ],
)
def test_no_room_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        plan_memory(settings(**changes))


def test_a_request_has_tokens():
    with pytest.raises(ConfigError, match="request length 0: it is at least 1 token"):
        plan_memory(settings()).requests(0)
