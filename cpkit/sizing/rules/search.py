"""The nearest settings that no rule refuses.

Best first from the deployment that was asked for. What a rule refuses can be allowed only by changing one of the
settings that the rule names, so that a refused deployment is followed by changes of one broken rule's settings, each
setting changed at most once.

    vllm deepseek-v3.2 tp=8 dcp=8    broken: vllm-flashmla-padding    knobs: dcp, tp, pcp, attention_backend
        dcp 8 -> 4                   distance 1                       same GPUs
        tp 8 -> 16                   distance 1                       2 x the GPUs
"""

import heapq
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

from cpkit.sizing.deployment import Deployment
from cpkit.sizing.rules.backends import backend_names
from cpkit.sizing.rules.engines import broken_rules

SIZES = ("tp", "pcp", "dcp", "pp", "dp", "attn_dp", "moe_dp")
STEPS = {
    "interleave": 0.5,
    "block_size": 0.5,
    "merge": 0.5,
    "cp_strategy": 0.5,
    "prefill_cp": 0.5,
    "eagle_topk": 0.5,
    "attention_backend": 1.0,
    "kv_cache_dtype": 1.0,
    "graphs": 1.0,
    "moe_a2a": 1.0,
    "prefix_caching": 1.0,
    "replay_window": 1.0,
    "draft_modules": 1.0,
    "kv_role": 2.0,
    "kv_saving": 2.0,
    "features": 2.0,
    "speculation": 2.0,
    "disaggregation": 3.0,
    "kv_transfer": 3.0,
}
"""What another value of a setting counts; a size counts its doublings, features count each that is given up."""

MAX_STATES = 4000
"""Deployments looked at before the search gives up."""


@dataclass(frozen=True, slots=True)
class Near:
    """A deployment that no rule refuses. changes: (setting, asked for, here); distance: the sum of what they count."""

    deployment: Deployment
    changes: tuple[tuple[str, Any, Any], ...]
    distance: float


def nearest(deployment: Deployment, count: int = 5) -> tuple[Near, ...]:
    """Up to `count` legal deployments, nearest first, those with as many GPUs before others of the same distance.

    An answer is left out that changes what a nearer one does and more, or another value where any will do. Empty where
    the MAX_STATES nearest hold none.
    """
    order = itertools.count()
    heap: list[tuple[float, float, int, dict[str, Any]]] = [(0.0, 0.0, next(order), {})]
    seen: set[frozenset[tuple[str, Any]]] = set()
    found: list[Near] = []
    for _ in range(MAX_STATES):
        if not heap or len(found) == count:
            break
        distance, _, _, changes = heapq.heappop(heap)
        here = replace(deployment, **changes)
        broken = broken_rules(here)
        if not broken:
            near = Near(
                here, tuple((name, getattr(deployment, name), value) for name, value in changes.items()), distance
            )
            if not any(_kind(other) <= _kind(near) for other in found):
                found.append(near)
            continue
        for name in min(((set(rule.knobs) - changes.keys()) for rule in broken), key=len):
            for value in _choices(deployment, name):
                more = {**changes, name: value}
                if value == getattr(deployment, name) or frozenset(more.items()) in seen:
                    continue
                seen.add(frozenset(more.items()))
                gpus = abs(math.log2(replace(deployment, **more).num_gpus / deployment.num_gpus))
                heapq.heappush(heap, (distance + _step(deployment, name, value), gpus, next(order), more))
    return tuple(found)


def _kind(near: Near) -> set[tuple[str, Any]]:
    """What an answer changes: sizes to which value, of other settings only that they change."""
    return {(name, value if name in SIZES else None) for name, _, value in near.changes}


def _step(deployment: Deployment, name: str, value: Any) -> float:
    if name in SIZES:
        return abs(math.log2(value / getattr(deployment, name)))
    if name == "features":
        return STEPS[name] * len(deployment.features - value)
    return STEPS[name]


def _choices(deployment: Deployment, name: str) -> tuple[Any, ...]:
    """Values that a setting may have, the one asked for among them or not."""
    d = deployment
    if name in SIZES:
        own = getattr(d, name)
        sizes = {1 << i for i in range(9)} | {size for size in range(1, own) if own % size == 0}
        return tuple(sorted(size for size in sizes if size <= max(8 * own, 16)))
    if name == "features":
        return tuple(
            frozenset(kept) for n in range(len(d.features)) for kept in itertools.combinations(sorted(d.features), n)
        )
    choices: dict[str, tuple[Any, ...]] = {
        "interleave": tuple(sorted({1, d.key_ratio, 64, d.block_size})),
        "block_size": (64, 128, 256, *((64 * d.key_ratio,) if d.pools else ())),
        "merge": (None, "ag_rs", "a2a"),
        "cp_strategy": ("interleave", "zigzag", None),
        "prefill_cp": (False,),
        "eagle_topk": (1,),
        "attention_backend": tuple(backend_names(d.engine)),
        "kv_cache_dtype": ("fp8_ds_mla",) if d.engine == "vllm" else ("fp8_e4m3",),
        "graphs": (None, "none", "piecewise", "full_decode_only"),
        "moe_a2a": ("none", "deepep"),
        "prefix_caching": (False,),
        "replay_window": (2 * d.pcp,),
        "draft_modules": (1,),
        "kv_role": ("producer",),
        "kv_saving": (None,),
        "speculation": (None, "mtp"),
        "disaggregation": (None, "prefill"),
        "kv_transfer": (None, "mooncake"),
    }
    return choices[name]
