"""What a rank keeps of one layer from step to step: its caches, and the builders of its metadata."""

from dataclasses import dataclass, replace

import torch

from cpkit.builders.chip import BLACKWELL, Chip
from cpkit.builders.indexer import IndexerBuilder, IndexerConfig
from cpkit.builders.indexer_metadata import IndexerMetadata
from cpkit.builders.swa import SwaBuilder, SwaConfig
from cpkit.builders.swa_metadata import SwaMetadata
from cpkit.comm.base import Comm
from cpkit.comm.key_gather import KeyGather
from cpkit.errors import ConfigError
from cpkit.layers import Layer
from cpkit.settings import StepSettings
from cpkit.worker.caches import LayerCaches, make_caches
from cpkit.worker.places import Places
from cpkit.worker.score import check_indexer

PER_TOKEN = Chip("cuda", family=BLACKWELL)
"""The chip whose decode rows the program's kernels take: one query token each, of decodes of any length."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The paged pool of a run: block ids, the null block included, and the most entries of a block table."""

    num_blocks: int
    max_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class StepMetadata:
    """One step of one layer.

    indexer: None without a sharded cache; swa: None without a window. latent_slots: int64, where the keys of the
    sharded cache go; the indexer's own slots, unless it scores pools of them.
    """

    indexer: IndexerMetadata | None
    swa: SwaMetadata | None
    latent_slots: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """One layer on one rank.

    backend: of its kernels. gather: of its index keys, where prefill rows score those of all shards. indexer,
    swa: as in StepMetadata.
    """

    layer: Layer
    backend: str
    gather: KeyGather | None
    caches: LayerCaches
    indexer: IndexerBuilder | None
    swa: SwaBuilder | None

    def build(self, places: Places) -> StepMetadata:
        """Metadata of a step; under PCP the ranks gather the slots of compressed keys here."""
        swa = None if self.swa is None else self.swa.build(places.window_batch())
        if self.indexer is None:
            return StepMetadata(None, swa, None)
        batch = places.batch()
        indexer = self.indexer.build(batch)
        tokens = batch.slot_mapping if batch.gathered is None else batch.gathered.slot_mapping
        return StepMetadata(indexer, swa, indexer.slot_mapping if self.layer.pool == 1 else tokens)


def make_state(
    layer: Layer, settings: StepSettings, pool: Pool, comm: Comm, backend: str, gather: KeyGather | None
) -> LayerState:
    """Fresh caches and builders; raises ConfigError for a layer that the program, or the backend, cannot run."""
    topology, budget = settings.topology, settings.budget
    caches = make_caches(layer, topology, pool.num_blocks, comm.device, backend=backend)
    check_indexer(layer, caches.index_block, backend)
    if layer.pool > 1 and topology.pcp > 1 and topology.dcp > 1:
        raise ConfigError(
            f"pcp={topology.pcp} with dcp={topology.dcp} and an indexer that scores pools of {layer.pool} keys: prefill"
            " rows would attend gathered pools, and keys that fill none are not among them; use pcp 1 or dcp 1"
        )
    if topology.pcp > 1:  # builders count rows, and head_tail gives a rank two rows of a request
        budget = replace(budget, max_num_seqs=2 * budget.max_num_seqs)

    def gather_slots(own: torch.Tensor) -> torch.Tensor:
        return comm.all_gather(own.contiguous(), "pcp", what="slots")

    indexer = swa = None
    if layer.compress_ratio:
        config = IndexerConfig(
            budget=budget,
            chip=PER_TOKEN,
            shard=topology.shard_of(comm.rank),
            block_size=topology.block_size,
            max_blocks=pool.max_blocks,
            compress_ratio=layer.chunk_ratio,
        )
        indexer = IndexerBuilder(config, device=comm.device, gather_slots=gather_slots, backend=backend)
    if layer.window_size:
        swa = SwaBuilder(
            SwaConfig(
                budget=budget,
                chip=PER_TOKEN,
                window_size=layer.window_size,
                block_size=topology.block_size,
                num_blocks=pool.num_blocks * topology.dcp,
                max_model_len=pool.max_blocks * topology.virtual_block,
                compress_ratios=(layer.compress_ratio,),
                index_topk=layer.index.topk if layer.index else None,
            ),
            device=comm.device,
            backend=backend,
        )
    return LayerState(layer, backend, gather, caches, indexer, swa)
