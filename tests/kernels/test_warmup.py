"""What ranks launch in any step is compiled before the first: Triton's own keys (launched_keys.py), without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cpkit.errors import ConfigError
from cpkit.kernels.registry.sizes import KernelSizes
from cpkit.kernels.warmup import compile_keys, warm_up

ROOT = Path(__file__).parents[2]
WORLDS = {
    "one-rank": {
        "block_size": 64,
        "states": [[4, 64], [128, 2]],
        "kpool": 16,
        "swa_block_size": 64,
        "key_rows": [[576, 8]],
    },
    "dcp": {"block_size": 64, "dcp_size": 3, "interleave": 16, "states": [[4, 16]], "index_dim": 36},
    "pcp": {
        "block_size": 16,
        "pcp_size": 2,
        "interleave": 5,
        "states": [[2, 8]],
        "swa_block_size": 16,
        "draft_blocks": True,
        "index_dim": 128,
        "index_dtypes": ["bf16", "fp16", "fp32"],
        "pow2_scales": True,
        "index_heads": 32,
        "index_topk": 512,
        "query_tokens": 9,
    },
    "both": {
        "block_size": 64,
        "pcp_size": 2,
        "dcp_size": 4,
        "interleave": 16,
        "states": [[4, 64]],
        "index_dim": 128,
        "index_heads": 64,
        "query_tokens": 3,
        "on": "hopper",
    },
    "shards": {
        "block_size": 64,
        "pcp_size": 2,
        "dcp_size": 2,
        "interleave": 16,
        "states": [],
        "index_dim": 128,
        "index_heads": 32,
    },
    "many-lists": {
        "block_size": 64,
        "dcp_size": 9,
        "interleave": 64,
        "states": [],
        "index_dim": 128,
        "index_heads": 32,
        "query_tokens": 3,
        "on": "hopper",
    },
    "both-symmetric": {
        "block_size": 64,
        "pcp_size": 2,
        "dcp_size": 3,
        "interleave": 16,
        "states": [[4, 64]],
        "key_rows": [[656, 0], [576, 8]],
        "index_dim": 128,
        "index_heads": 64,
        "index_topk": 1024,
        "symmetric": True,
        "on": "nvidia",
    },
}


@pytest.fixture(scope="module")
def found():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.launched_keys", json.dumps(WORLDS)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("world", WORLDS)
def test_b33_every_rank_launches_what_was_compiled(found, world):
    assert not found[world]["missed"]
    assert not found[world]["never_launched"]
    assert found[world]["found_when_unlisted"]  # a cache that the deployment does not name would have been noticed
    assert found[world]["built"] == ("on" in WORLDS[world])  # topk.cu, on NVIDIA


def test_keys_are_distinct():
    deployment = KernelSizes(block_size=64, pcp_size=2, dcp_size=2, interleave=8, states=((4, 64), (8, 64)), kpool=4)
    names = [key.name for key in compile_keys(deployment)]
    assert len(names) == len(set(names))


def test_there_is_nothing_to_compile_on_a_cpu():
    with pytest.raises(ConfigError, match="warm_up on cpu"):
        warm_up(KernelSizes(block_size=64), torch.device("cpu"))
