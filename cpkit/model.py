"""Models as attention and context parallelism see them: kinds of layers, and the bytes of their caches.

kind     keys of the sharded cache        what a query token attends
dsa      one a token (V3.2, GLM)          the top-k its indexer picks (GLM-5.3-Flash: picks pools of 16 tokens)
c1a c2a  one a token, one per 2 (V4.1)    top-k of them, and a sliding window
c4a      one per 4 tokens (V4)            top-k of them, and a sliding window
c128a    one per 128 tokens (V4)          all of them, and a sliding window
swa      none                             a sliding window
linear   none                             a recurrent state, no per-token keys
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cpkit.errors import ConfigError, InputError
from cpkit.hf_config import read_layers
from cpkit.layers import Layer
from cpkit.topology import Topology, gathered_heads

MODELS = (
    "deepseek-v3.2",
    "deepseek-v4-flash",
    "deepseek-v4-pro",
    "deepseek-v4.1-flash",
    "glm-5",
    "glm-5.2",
    "glm-5.3",
    "glm-5.3-flash",
)


@dataclass(frozen=True)
class Model:
    """Facts of a model that planning needs.

    hidden_size: values of a hidden row; num_heads: attention heads over all TP ranks; max_model_len: tokens.
    layers: the kinds of attention layers, each with how many of them the model has.
    """

    name: str
    model_type: str
    hidden_size: int
    num_heads: int
    max_model_len: int
    layers: tuple[Layer, ...]

    @property
    def num_layers(self) -> int:
        """Layers of all kinds together."""
        return sum(layer.num_layers for layer in self.layers)

    @cached_property
    def ratios(self) -> tuple[int, ...]:
        """Tokens per key of the caches whose keys are gathered and scored: one chunk plan for each."""
        return tuple(sorted({layer.chunk_ratio for layer in self.layers if layer.compress_ratio}))

    @cached_property
    def pool_ratios(self) -> frozenset[int]:
        """Tokens per key where an indexer scores pools of a cache's keys."""
        return frozenset(
            layer.index.ratio for layer in self.layers if layer.index and layer.index.ratio > layer.compress_ratio
        )

    @cached_property
    def slot_ratios(self) -> tuple[int, ...]:
        """Tokens per key of every paged cache that is sharded under DCP."""
        ratios = {layer.compress_ratio for layer in self.layers} | {
            layer.index.ratio for layer in self.layers if layer.index
        }
        return tuple(sorted(ratios - {0}))

    def kv_bytes(self) -> float:
        """Bytes a token of context takes over all layers and both caches, unsharded (windows and tails excluded)."""
        return sum(layer.num_layers * layer.bytes_per_token() for layer in self.layers)

    def check(self, topology: Topology) -> None:
        """Refuse a world that this model cannot run in, whatever the batch; raises ConfigError."""
        if self.num_heads % topology.tp:
            raise ConfigError(f"{self.name} has {self.num_heads} heads: tp={topology.tp} must divide them")
        ratio = math.lcm(*self.slot_ratios) if self.slot_ratios else 1
        if topology.block_size % ratio:
            raise ConfigError(
                f"block_size={topology.block_size} is not a multiple of {ratio}, the tokens that one key of "
                f"{self.name} stands for: a block would end inside a state; use block_size {ratio} or {2 * ratio}"
            )
        if topology.dcp > 1 and topology.interleave % ratio:
            fit = [i for i in range(ratio, topology.block_size + 1, ratio) if topology.block_size % i == 0]
            raise ConfigError(
                f"interleave={topology.interleave} is not a multiple of {ratio}, the tokens that one key of "
                f"{self.name} stands for: a state would span two DCP ranks; with block_size={topology.block_size} "
                f"use interleave {' or '.join(map(str, fit))}"
            )

    def check_merge(self, topology: Topology) -> None:
        """Refuse a world in which the heads of partial outputs do not divide over the ranks; raises ConfigError."""
        if topology.dcp == 1 or not self.slot_ratios:
            return
        own = self.num_heads // topology.tp
        heads = gathered_heads(own, tp=topology.tp, pcp=topology.pcp, dcp=topology.dcp)
        if heads % topology.dcp:
            raise ConfigError(
                f"{self.name}: {heads} heads cannot be scattered over dcp={topology.dcp} when partial outputs are "
                f"merged; dcp must divide them (a step of prefills alone with pcp > 1 merges nothing and is fine)"
            )


def load_model(name_or_path: str | Path) -> Model:
    """A shipped model by name (one of MODELS), or any config.json of these families; ConfigError or InputError."""
    return model_from_config(*load_config(name_or_path))


def load_config(name_or_path: str | Path) -> tuple[dict[str, Any], str]:
    """The config, or fact file, of a model, and the model's name; raises ConfigError or InputError."""
    from importlib import resources  # slow to import, and `cpkit --help` loads no model

    name = str(name_or_path)
    if name in MODELS:
        text = (resources.files("cpkit") / "data" / "models" / f"{name}.json").read_text(encoding="utf-8")
        return json.loads(text), name
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"unknown model {name!r}: use one of {', '.join(MODELS)}, or the path of a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a readable model config: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: a model config is a JSON object")
    return config, path.parent.name or name


def published_fields(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields of a published config.json, or of a fact file that holds them under "config"; of its text model.

    What weights are stored in may be said once, for the whole model, beside its text model.
    """
    whole = _section(config, "config", name)
    stored = {field: whole[field] for field in ("quantization_config", "torch_dtype", "dtype") if field in whole}
    return stored | _section(whole, "text_config", name)


def model_from_config(config: dict[str, Any], name: str) -> Model:
    """A Model from the fields of a published config.json, or of a fact file that holds them under "config".

    Raises ConfigError naming the field.
    """
    facts = published_fields(config, name)
    config = _section(config, "config", name)
    sizes = {}
    for field in ("hidden_size", "num_attention_heads", "max_position_embeddings"):
        value = facts.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 30:
            raise ConfigError(f"{name}: {field}={value!r} in the config: it is a whole number of at least 1")
        sizes[field] = value
    model_type = str(config.get("model_type"))
    return Model(
        name=name,
        model_type=model_type,
        hidden_size=sizes["hidden_size"],
        num_heads=sizes["num_attention_heads"],
        max_model_len=sizes["max_position_embeddings"],
        layers=read_layers(facts, model_type, name),
    )


def _section(config: dict[str, Any], field: str, name: str) -> dict[str, Any]:
    """The fields below `field`, or those of the config itself where it has none."""
    inner = config.get(field)
    if inner is None:
        return config
    if not isinstance(inner, dict):
        raise ConfigError(f"{name}: {field}={inner!r} in the config: it is an object of fields")
    return inner
