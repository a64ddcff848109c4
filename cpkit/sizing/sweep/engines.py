"""A candidate as an engine has it: which partitions and interleaves it knows, how it counts sizes, its flags.

SGLang's tp is the replica, which prefill CP is cut out of, and its DCP deals slots out one by one.

    tp 4, pcp 2, dcp 8    vllm    -tp 4 -pcp 2 -dcp 8
                          sglang  --tp-size 8 --enable-prefill-cp --cp-strategy interleave --attn-cp-size 2 --dcp-size 8
"""

import json
import shlex
from typing import Any

from cpkit.errors import ConfigError
from cpkit.planner.partition import STRATEGIES
from cpkit.sizing.sweep.candidate import Candidate
from cpkit.sizing.sweep.replay import SweepSetting

PARTITIONS = {
    "cpkit": {"head_tail": "", **dict.fromkeys(STRATEGIES, "")},
    "vllm": {"head_tail": "dual chunk swap"},
    "sglang": {"round_robin": "interleave", "head_tail": "zigzag"},
}
"""How an engine can split prompts over PCP ranks: the planner's name and the engine's own, the usual one first."""


def usual_partition(engine: str) -> str:
    """What an engine's PCP ranks do where nothing is said, by the planner's name."""
    return next(iter(PARTITIONS[engine]))


def usual_interleave(engine: str, block_size: int) -> int:
    """Tokens: a block, where an engine has the choice."""
    return 1 if engine == "sglang" else block_size


def check_engine(candidate: Candidate, engine: str) -> None:
    """Refuse a partition or an interleave that an engine does not have; raises ConfigError."""
    known = PARTITIONS[engine]
    if candidate.pcp > 1 and candidate.partition not in known:
        names = " or ".join(f"{name.replace('_', '-')} ({own})" for name, own in known.items())
        raise ConfigError(
            f"{engine} has no partition {candidate.partition.replace('_', '-')}: it splits prompts {names}"
        )
    if engine == "sglang" and candidate.dcp > 1 and candidate.interleave > 1:
        raise ConfigError(
            f"sglang has no interleave {candidate.interleave}: it deals slots out to DCP ranks one by one"
        )


def engine_sizes(candidate: Candidate, engine: str) -> dict[str, Any]:
    """A candidate's sizes as an engine counts them; its partition is one of the engine's."""
    given: dict[str, Any] = {"tp": candidate.tp, "pcp": candidate.pcp, "dcp": candidate.dcp}
    given["block_size"] = candidate.block_size
    if engine != "sglang":
        return given | ({"interleave": candidate.interleave} if candidate.dcp > 1 else {})
    given["tp"] *= candidate.pcp
    if candidate.pcp > 1:
        given |= {"prefill_cp": True, "cp_strategy": PARTITIONS[engine][candidate.partition]}
    return given


def engine_flags(candidate: Candidate, setting: SweepSetting) -> str:
    """A candidate and the limits it was replayed with as flags of its engine, ready to paste; cpkit's are those of
    `cpkit plan` and `simulate`.
    """
    engine, merge, drafts = setting.engine, setting.merge, setting.budget.num_speculative_tokens
    flags: list[tuple[str, int | str]] = []
    if engine == "sglang":
        flags.append(("--tp-size", candidate.tp * candidate.pcp))
        if candidate.pcp > 1:
            strategy = PARTITIONS[engine][candidate.partition]
            flags += [("--enable-prefill-cp", ""), ("--cp-strategy", strategy), ("--attn-cp-size", candidate.pcp)]
        if candidate.dcp > 1:
            flags += [("--dcp-size", candidate.dcp), ("--dcp-comm-backend", merge)]
        flags += [
            ("--page-size", candidate.block_size),
            ("--chunked-prefill-size", candidate.max_num_batched_tokens),
            ("--max-running-requests", setting.budget.max_num_seqs),
            ("--context-length", setting.max_model_len),
        ]
        if drafts:  # what it verifies is the token itself too
            flags += [("--speculative-algorithm", "NEXTN"), ("--speculative-num-steps", drafts)]
            flags += [("--speculative-eagle-topk", 1), ("--speculative-num-draft-tokens", 1 + drafts)]
    else:
        flags += [("-tp", candidate.tp), ("-pcp", candidate.pcp), ("-dcp", candidate.dcp)]
        if candidate.dcp > 1:
            flags += [("--cp-kv-cache-interleave-size", candidate.interleave), ("--dcp-comm-backend", merge)]
        if candidate.pcp > 1 and candidate.partition != usual_partition(engine):
            flags.append(("--partition", candidate.partition.replace("_", "-")))
        flags += [
            ("--block-size", candidate.block_size),
            ("--max-num-batched-tokens", candidate.max_num_batched_tokens),
            ("--max-num-seqs", setting.budget.max_num_seqs),
            ("--max-model-len", setting.max_model_len),
        ]
        if drafts and engine == "vllm":
            config = json.dumps({"method": "mtp", "num_speculative_tokens": drafts}, separators=(",", ":"))
            flags.append(("--speculative-config", shlex.quote(config)))
        elif drafts:
            flags.append(("--num-speculative-tokens", drafts))
    return " ".join(f"{name} {value}".rstrip() for name, value in flags)
