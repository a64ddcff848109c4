"""Layer kinds from the fields of a published config.json, family by family."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from cpkit.errors import ConfigError
from cpkit.layers import Index, Layer

FP8_INDEX_SCALE_BYTES = 4
"""An indexer key is e4m3 values and one fp32 scale."""
MLA_BYTES = {576: 656, 512: 656}
"""fp8_ds_mla row: 512 e4m3 + 4 fp32 scales + 64 bf16 rope; a model without rope keeps the same row."""
V4_BYTES = 584
"""448 e4m3 + 64 bf16 rope + 7 ue8m0 scales + 1 pad."""
V41_BYTES = 528
"""512 e4m3 + 16 ue8m0 scales."""
V4_KINDS = {0: "swa", 4: "c4a", 128: "c128a"}
V41_KINDS = {0: "swa", 1: "c1a", 2: "c2a"}


class _Config:
    """Fields of a config that must be there; errors name the model, the field and what it should be."""

    def __init__(self, facts: dict[str, Any], name: str) -> None:
        self.facts, self.name = facts, name

    def size(self, field: str, least: int = 1) -> int:
        value = self.facts.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 1 << 30:
            raise ConfigError(f"{self.name}: {field}={value!r} in the config: it is a whole number of at least {least}")
        return value

    def sizes(self, field: str) -> list[int]:
        value = self.facts.get(field)
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise ConfigError(f"{self.name}: {field}={value!r} in the config: it is a list of whole numbers")
        return value

    def indexer_types(self) -> dict[str, int] | None:
        """Layers of each indexer type, from a list of types or of [type, count] runs; None without either."""
        field = "indexer_types" if self.facts.get("indexer_types") is not None else "indexer_types_rle"
        runs = self.facts.get(field)
        if runs is None:
            return None
        counts: Counter[str] = Counter()
        for run in runs if isinstance(runs, list) else [None]:
            kind, count = run if isinstance(run, list) and len(run) == 2 else (run, 1)
            if not isinstance(kind, str) or not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ConfigError(f"{self.name}: {field} holds {run!r}: it lists layer types, or [type, count] runs")
            counts[kind] += count
        return dict(counts)

    def refuse_unless_1(self, field: str, reason: str) -> None:
        """Refuse a field that would make layers differ where they are taken to be alike."""
        if self.facts.get(field, 1) not in (None, 1):
            raise ConfigError(f"{self.name}: {field}={self.facts[field]!r} in the config: {reason}")

    def index(self, ratio: int) -> Index:
        pool = self.facts.get("index_kpool", 1)
        topk, dim = self.size("index_topk"), self.size("index_head_dim")
        if not isinstance(pool, int) or pool < 1 or topk % pool:
            raise ConfigError(f"{self.name}: index_kpool={pool!r} must be a divisor of index_topk={topk}")
        return Index(
            topk=topk // pool,
            num_heads=self.size("index_n_heads"),
            head_dim=dim,
            ratio=ratio * pool,
            key_bytes=dim + FP8_INDEX_SCALE_BYTES,
        )


def read_layers(facts: dict[str, Any], model_type: str, name: str) -> tuple[Layer, ...]:
    """The kinds of layers of a model; raises ConfigError for a family that cpkit does not know."""
    families: dict[str, Callable[[_Config], list[Layer]]] = {
        "deepseek_v32": _dsa_layers,
        "glm_moe_dsa": _dsa_layers,
        "glm5_next": _kpool_layers,
        "deepseek_v4": _v4_layers,
        "deepseek_v41": _v41_layers,
    }
    if model_type not in families:
        raise ConfigError(f"{name}: model_type={model_type!r} is none of the families known here: {sorted(families)}")
    return tuple(layer for layer in families[model_type](_Config(facts, name)) if layer.num_layers)


def _mla(config: _Config, num_layers: int, *, runs_index: bool) -> Layer:
    latent = config.size("kv_lora_rank")
    dim = latent + config.size("qk_rope_head_dim", least=0)
    if dim not in MLA_BYTES:
        raise ConfigError(f"{config.name}: a latent row of {dim} values; the known cache rows have {sorted(MLA_BYTES)}")
    return Layer(
        kind="dsa",
        num_layers=num_layers,
        compress_ratio=1,
        key_dim=dim,
        value_dim=latent,
        key_bytes=MLA_BYTES[dim],
        index=config.index(1),
        runs_index=runs_index,
    )


def _dsa_layers(config: _Config) -> list[Layer]:
    """V3.2 and GLM-5: every layer has its indexer, or "shared" ones use the last "full" layer's selection again."""
    total = config.size("num_hidden_layers")
    counts = config.indexer_types()
    if counts is None:
        config.refuse_unless_1("index_topk_freq", "its layers share selections; say which in indexer_types")
        counts = {"full": total}
    full, shared = counts.get("full", 0), counts.get("shared", 0)
    if full + shared != total or sum(counts.values()) != total:
        raise ConfigError(f"{config.name}: indexer_types names {counts}; it must name {total} layers, full or shared")
    return [_mla(config, full, runs_index=True), _mla(config, shared, runs_index=False)]


def _kpool_layers(config: _Config) -> list[Layer]:
    """GLM-5.3-Flash: every fourth layer attends, the others are linear, and each of the former runs its indexer."""
    total = config.size("num_hidden_layers")
    config.size("index_kpool")  # elsewhere a model without one has no pools; here it must be stated
    config.refuse_unless_1("index_topk_freq", "shared selections are not known in this family")
    attends = total // 4
    kinds = config.facts.get("layer_types")
    if isinstance(kinds, list) and len(kinds) - kinds.count("linear_attention") != attends:
        raise ConfigError(
            f"{config.name}: layer_types names {len(kinds)} layers, {kinds.count('linear_attention')} of them "
            f"linear_attention; this family attends in every fourth of its {total} layers"
        )
    return [_mla(config, attends, runs_index=True), Layer(kind="linear", num_layers=total - attends)]


def _v4_layers(config: _Config) -> list[Layer]:
    """V4: the ratio of each layer decides its kind; every layer has a sliding window."""
    ratios = _backbone_ratios(config, V4_KINDS)
    return [
        _compressed(config, kind, count, ratio, index=config.index(4) if ratio == 4 else None, row_bytes=V4_BYTES)
        for ratio, kind in V4_KINDS.items()
        if (count := ratios.count(ratio))
    ]


def _v41_layers(config: _Config) -> list[Layer]:
    """V4.1: keys live on source layers, selections are made on index layers, the others read the last one's."""
    ratios = _backbone_ratios(config, V41_KINDS)
    key_sources, index_sources = set(config.sizes("kv_source_layer_ids")), set(config.sizes("index_source_layer_ids"))
    kinds = Counter((ratio, i in key_sources, i in index_sources) if ratio else (0, True, False)
                    for i, ratio in enumerate(ratios))  # fmt: skip
    return [
        _compressed(
            config,
            V41_KINDS[ratio],
            count,
            ratio,
            index=config.index(ratio) if ratio else None,
            row_bytes=V41_BYTES,
            owns_keys=owns_keys,
            runs_index=runs_index,
        )
        for (ratio, owns_keys, runs_index), count in sorted(kinds.items())
    ]


def _backbone_ratios(config: _Config, kinds: dict[int, str]) -> list[int]:
    """compress_ratios of the backbone; entries behind them belong to draft layers."""
    ratios, total = config.sizes("compress_ratios"), config.size("num_hidden_layers")
    if len(ratios) < total or not set(ratios) <= kinds.keys():
        raise ConfigError(
            f"{config.name}: compress_ratios has {len(ratios)} entries with values {sorted(set(ratios))}; "
            f"it needs {total}, each one of {sorted(kinds)}"
        )
    return ratios[:total]


def _compressed(
    config: _Config,
    kind: str,
    num_layers: int,
    ratio: int,
    *,
    index: Index | None,
    row_bytes: int,
    owns_keys: bool = True,
    runs_index: bool | None = None,
) -> Layer:
    dim = config.size("head_dim")
    return Layer(
        kind=kind,
        num_layers=num_layers,
        compress_ratio=ratio,
        key_dim=dim if ratio else 0,
        value_dim=dim if ratio else 0,
        key_bytes=row_bytes if ratio else 0,
        owns_keys=owns_keys,
        index=index,
        runs_index=index is not None if runs_index is None else runs_index,
        window_size=config.size("sliding_window"),
        window_dim=dim,
        window_bytes=row_bytes,
    )
