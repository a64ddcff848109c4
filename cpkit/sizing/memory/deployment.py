"""From a deployment and its limits to a rank's memory, and what another choice would change."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from cpkit.budget import WORKSPACE_MODEL_LENS, Budget
from cpkit.errors import ConfigError
from cpkit.layers import Layer
from cpkit.model import Model
from cpkit.sizing.deployment import Deployment
from cpkit.sizing.figures import Figure
from cpkit.sizing.memory.plan import Memory, MemorySettings, plan_memory
from cpkit.sizing.memory.weights import estimate_weights
from cpkit.sizing.rules.engines import broken_rules
from cpkit.sizing.weights import check_bits
from cpkit.topology import legal_dcp_sizes

DEFAULT_UTILIZATION = Figure(0.9, "assumed", "the engines' usual share, see --gpu-memory-utilization")
NVFP4_ROW_BYTES = 352
"""nvfp4_ds_mla row of the dsa family: 256 packed e2m1, 64 e4m3 rope, 32 e4m3 scales."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What decides memory beside the deployment. Raises ConfigError for values out of range.

    config: the model's published fields, for the estimate of weights. weights: bytes of one rank, None to estimate
    them. weight_bits: for the estimate, 16, 8 or 4; None: the config's. workspace_tokens: None for
    WORKSPACE_MODEL_LENS longest requests. budget: Budget's other fields where they are not its defaults.
    """

    config: dict[str, Any]
    max_model_len: int
    weights: Figure | None = None
    weight_bits: int | None = None
    utilization: Figure = DEFAULT_UTILIZATION
    workspace_tokens: int | None = None
    budget: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.max_model_len <= 1 << 40:
            raise ConfigError(f"max_model_len={self.max_model_len}: it is a whole number from 1 to 2^40")
        if not 0 < self.utilization.value <= 1:
            raise ConfigError(f"utilization {self.utilization.value:g}: a share of the memory is above 0, at most 1")
        check_bits(self.weight_bits)
        self.step_budget()

    def step_budget(self) -> Budget:
        """The limits of a step."""
        workspace = self.workspace_tokens
        if workspace is None:
            workspace = WORKSPACE_MODEL_LENS * self.max_model_len
        return Budget(workspace_tokens=workspace, **self.budget)


@dataclass(frozen=True, slots=True)
class Knob:
    """One other choice. memory: what it gives, or None. but: why it gives nothing, or cannot be had."""

    name: str
    setting: str
    memory: Memory | None
    but: str = ""


def memory_of(deployment: Deployment, limits: Limits) -> Memory:
    """The memory of a rank; needs a chip. Raises ConfigError where nothing fits, or there is no such world."""
    return plan_memory(memory_settings(deployment, limits))


def memory_settings(deployment: Deployment, limits: Limits) -> MemorySettings:
    """A deployment as memory sees it."""
    if deployment.chip is None:
        raise ConfigError("memory needs a chip: give --chip")
    topology = deployment.topology()
    model = cached_model(deployment)
    model.check(topology)
    model.check_merge(topology)
    weights = limits.weights
    if weights is None:
        weights = estimate_weights(limits.config, model, topology, limits.weight_bits)
    return MemorySettings(
        model=model,
        topology=topology,
        budget=limits.step_budget(),
        chip=deployment.chip,
        weights=weights,
        utilization=limits.utilization,
        max_model_len=limits.max_model_len,
        replicates_index=deployment.replicates_index,
        buffers_beside=deployment.engine == "sglang",
        merge="ag_rs" if deployment.reduction == "ag_rs" else "a2a",
        num_workspaces=2 if deployment.engine == "cpkit" else 1,
        draft_layers=deployment.draft_layers,
    )


def cached_model(deployment: Deployment) -> Model:
    """The model with the rows that its cache has."""
    model = with_cache_dtype(deployment.model, deployment.kv_cache_dtype)
    if not deployment.plain_fp8:
        return model
    rows = (replace(layer, key_bytes=layer.key_dim) if layer.kind == "dsa" else layer for layer in model.layers)
    return replace(model, layers=tuple(rows))


def with_cache_dtype(model: Model, dtype: str) -> Model:
    """The model with the rows of another cache: bf16 is 2 bytes a value, anything else the family's fp8 record."""

    def rows(layer: Layer) -> Layer:
        if dtype == "bf16":
            return replace(layer, key_bytes=2 * layer.key_dim, window_bytes=2 * layer.window_dim)
        if dtype == "nvfp4_ds_mla" and layer.kind == "dsa":  # linear layers keep no rows
            return replace(layer, key_bytes=NVFP4_ROW_BYTES)
        return layer

    return replace(model, layers=tuple(rows(layer) for layer in model.layers))


def knobs(deployment: Deployment, limits: Limits) -> Iterator[Knob]:
    """Other choices, one at a time; a choice that the engine refuses is shown with what it would give."""
    for dcp in _other_dcp(deployment):
        yield _other(deployment, limits, "dcp", f"{dcp}", {"dcp": dcp})
    if deployment.engine != "sglang":
        pcp = 2 * deployment.pcp
        for dcp in legal_dcp_sizes(deployment.tp, pcp):
            yield _other(deployment, limits, "pcp", f"{pcp} (dcp {dcp})", {"pcp": pcp, "dcp": dcp})
    if deployment.dcp > 1:
        yield _index_cache(deployment, limits)
        for interleave in sorted({1, deployment.key_ratio, deployment.block_size} - {deployment.interleave}):
            yield _other(deployment, limits, "interleave", f"{interleave}", {"interleave": interleave})
    settings = memory_settings(deployment, limits)
    yield _limit(deployment, limits, "workspace", workspace_tokens=math.ceil(settings.budget.workspace_tokens / 2))
    for name in ("logits_bytes", "max_num_batched_tokens", "max_num_seqs"):
        half = math.ceil(getattr(settings.budget, name) / 2)
        yield _limit(deployment, limits, name.replace("_", " "), budget={**limits.budget, name: half})


def _other_dcp(deployment: Deployment) -> list[int]:
    """Other powers of two among the legal sizes."""
    ranks = deployment.head_ranks
    pcp = 1 if deployment.engine == "sglang" else deployment.pcp
    return [dcp for dcp in legal_dcp_sizes(ranks, pcp) if dcp != deployment.dcp and dcp & (dcp - 1) == 0]


def _other(deployment: Deployment, limits: Limits, name: str, setting: str, changes: dict[str, Any]) -> Knob:
    other = replace(deployment, **changes)
    broken = ", ".join(rule.id for rule in broken_rules(other))
    refused = f"refused: {broken}" if broken else ""
    try:
        return Knob(name, setting, memory_of(other, limits), refused)
    except ConfigError as error:
        return Knob(name, setting, None, refused or str(error))


def _index_cache(deployment: Deployment, limits: Limits) -> Knob:
    """Indexer keys replicated instead of sharded over the DCP group, or the other way round."""
    settings = memory_settings(deployment, limits)
    other = replace(settings, replicates_index=not settings.replicates_index)
    setting = "replicated" if other.replicates_index else "sharded"
    why = f"not what {deployment.engine} does"
    try:
        return Knob("index cache", setting, plan_memory(other), why)
    except ConfigError as error:
        return Knob("index cache", setting, None, str(error))


def _limit(deployment: Deployment, limits: Limits, name: str, **changes: Any) -> Knob:
    try:
        return Knob(name, "half", memory_of(deployment, replace(limits, **changes)))
    except ConfigError as error:
        return Knob(name, "half", None, str(error))
