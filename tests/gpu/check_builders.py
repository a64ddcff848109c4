"""The builders on a GPU: same values as on the CPU, no waiting on the decode path, graphs that follow new inputs.

python tests/gpu/check_builders.py        needs CUDA; exits 0 and prints what was compared
"""

import dataclasses
import itertools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from cpkit.budget import Budget
from cpkit.builders.chip import Chip, chip_of
from cpkit.builders.common import GatheredSlots, RankBatch, rank_batch
from cpkit.builders.indexer import IndexerBuilder, IndexerConfig
from cpkit.builders.kpool import KpoolBuilder, KpoolConfig
from cpkit.builders.swa import SwaBuilder, SwaConfig
from cpkit.topology import Shard

BLOCK, WIDTH, ROWS, TOKENS = 16, 80, 24, 256
CHIPS = {family: Chip("cuda", family=family, num_workers=132) for family in (80, 90, 100)}


def tensors_of(value: object) -> dict[str, torch.Tensor]:
    """Every tensor of a result, by its place in it."""
    if isinstance(value, torch.Tensor):
        return {"": value}
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, tuple):
        pairs = list(enumerate(value))
    elif dataclasses.is_dataclass(value):
        pairs = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        pairs = []
    return {f"{name}.{rest}": found for name, part in pairs for rest, found in tensors_of(part).items()}


def random_batch(
    rng: random.Random, device: str, drafts: int, *, pcp_size: int = 1, decodes_only: bool = False
) -> RankBatch:
    """Decodes of up to 1 + drafts tokens, then prefills, some padding, some tokens without a slot."""
    query_lens = [rng.choice([1 + drafts, rng.randint(0, 1 + drafts)]) for _ in range(rng.randint(1, 8))]
    if not decodes_only:
        query_lens += [rng.randint(0, 40) for _ in range(rng.randint(0, 4))]
    seq_lens = [new + rng.randint(0, 500) for new in query_lens]
    total, padding = sum(query_lens), rng.randint(0, 5)
    slots = [rng.choice([-1, rng.randint(0, 9999), 3, 4]) for _ in range(total)] + [-1] * padding
    positions = [pos for new, n in zip(query_lens, seq_lens, strict=True) for pos in range(n - new, n)]
    batch = rank_batch(
        query_lens,
        seq_lens,
        np.array([[rng.randint(1, 999) for _ in range(WIDTH)] for _ in query_lens]),
        slots,
        is_prefilling=[new > 1 + drafts for new in query_lens],
        positions=positions + [0] * padding,
        device=device,
    )
    if pcp_size == 1:
        return batch
    writes = torch.tensor([True] * total + [False] * padding, device=device)
    gathered = GatheredSlots(torch.tensor(slots * pcp_size, device=device), writes)
    return dataclasses.replace(batch, gathered=gathered)


def budget(drafts: int) -> Budget:
    return Budget(
        workspace_tokens=1200,
        logits_bytes=40_000,
        max_num_batched_tokens=TOKENS,
        max_num_seqs=ROWS,
        num_speculative_tokens=drafts,
    )


def indexer(
    device: str, chip: Chip, drafts: int, shard: Shard, ratio: int, *, adaptive: bool = False
) -> IndexerBuilder:
    entry = BLOCK // max(ratio // 2, 1)
    config = IndexerConfig(budget(drafts), chip, shard, BLOCK, WIDTH, ratio, kernel_block_size=entry, adaptive=adaptive)
    # all PCP ranks send what this one sends
    return IndexerBuilder(config, device=device, gather_slots=lambda own: own.repeat(shard.pcp_size))


def windows(device: str, drafts: int) -> SwaBuilder:
    config = SwaConfig(budget(drafts), CHIPS[90], 100, BLOCK, 1000, 5000, (1, 4, 128), index_topk=64, draft_blocks=True)
    return SwaBuilder(config, device=device)


def same(where: str, cpu: object, gpu: object) -> int:
    """Compare every tensor of two results; returns how many there are."""
    want, got = tensors_of(cpu), tensors_of(gpu)
    assert want.keys() == got.keys(), f"{where}: {want.keys() ^ got.keys()}"
    for name, tensor in want.items():
        assert got[name].device.type == "cuda", f"{where}: {name} is on {got[name].device}"
        if not torch.equal(tensor, got[name].cpu()):
            raise AssertionError(f"{where}: {name} is\n{got[name].cpu()}\nand on the CPU\n{tensor}")
    return len(want)


def check_values() -> str:
    """Many seeded builds of all three builders, on both devices."""
    compared = builds = 0
    worlds = [(1, 1), (1, 4), (2, 1), (2, 2)]
    for seed, (pcp, dcp), family, ratio in itertools.product(range(6), worlds, CHIPS, (1, 4)):
        drafts = seed % 4
        shard = Shard(pcp, 0, dcp, dcp - 1, 4)
        batches = [random_batch(random.Random(seed), device, drafts, pcp_size=pcp) for device in ("cpu", "cuda")]
        results = [
            indexer(device, CHIPS[family], drafts, shard, ratio).build(batch)
            for device, batch in zip(("cpu", "cuda"), batches, strict=True)
        ]
        where = f"indexer seed={seed} pcp={pcp} dcp={dcp} family={family} ratio={ratio}"
        compared += same(where, *results)
        builds += 1
    for seed in range(60):
        drafts, causal = seed % 4, seed % 3 > 0
        results = []
        for device in ("cpu", "cuda"):
            batch = random_batch(random.Random(seed), device, drafts, decodes_only=not causal)
            results.append(
                (
                    windows(device, drafts).build(dataclasses.replace(batch, causal=causal)),
                    KpoolBuilder(KpoolConfig(budget(drafts), 16), device=device).build(batch),
                )
            )
        compared += same(f"window, kpool seed={seed}", *results)
        builds += 2
    return f"{builds} builds, {compared} tensors equal on CPU and GPU"


def decode_batch(device: str, seed: int, drafts: int, *, ragged: bool) -> RankBatch:
    """Eight decodes with room for a graph: equal host facts for every seed, other lengths and blocks on the device."""
    rng = random.Random(seed)
    device_lens = [rng.randint(1, 1 + drafts) if ragged else 1 + drafts for _ in range(8)]
    seq_lens = [new + rng.randint(0, 500) for new in device_lens]
    size = 8 * (1 + drafts)
    slots = [rng.randint(0, 9999) for _ in range(sum(device_lens))]
    exact = rank_batch(
        device_lens,
        seq_lens,
        np.array([[rng.randint(1, 999) for _ in range(WIDTH)] for _ in range(8)]),
        slots + [-1] * (size - len(slots)),
        positions=[0] * size,
        device=device,
    )
    host = np.arange(9, dtype=np.int64) * (1 + drafts)
    return dataclasses.replace(exact, host_query_start_loc=host, max_seq_lens=np.full(8, 600))


def decode_builds(device: str, drafts: int, chip: Chip, *, adaptive: bool) -> list:
    """Builders of a decode step: plain, sharded, compressed, windows, tails."""
    shards = [(Shard(), 1), (Shard(dcp_size=4, dcp_rank=1, interleave=4), 1), (Shard(dcp_size=2, interleave=8), 4)]
    made = [indexer(device, chip, drafts, shard, ratio, adaptive=adaptive) for shard, ratio in shards]
    return [*made, windows(device, drafts), KpoolBuilder(KpoolConfig(budget(drafts), 16), device=device)]


def check_no_waiting() -> str:
    """Decode builds and draft updates never wait for the device."""
    builds = 0
    for family, drafts in itertools.product(CHIPS, (0, 1, 3)):
        batch = decode_batch("cuda", 1, drafts, ragged=False)
        for one in decode_builds("cuda", drafts, CHIPS[family], adaptive=False):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                built = one.build(batch)
                if not isinstance(one, KpoolBuilder):
                    one.update_drafts(built, batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            builds += 1
    return f"{builds} decode builds without a synchronisation"


def copy_inputs(into: RankBatch, step: RankBatch) -> None:
    for field in ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "positions"):
        getattr(into, field).copy_(getattr(step, field))


def check_graphs() -> str:
    """A captured build replayed with other inputs gives what a fresh build of them gives."""
    replays = 0
    for family, drafts, ragged in itertools.product(CHIPS, (0, 1, 3), (False, True)):
        if ragged and (drafts == 0 or family == 90):
            continue
        static = decode_batch("cuda", 0, drafts, ragged=ragged)
        for place, one in enumerate(decode_builds("cuda", drafts, CHIPS[family], adaptive=ragged)):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                one.build(static)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                built = one.build(static)
            for seed in (11, 12):
                step = decode_batch("cuda", seed, drafts, ragged=ragged)
                copy_inputs(static, step)
                graph.replay()
                torch.cuda.synchronize()
                fresh = decode_builds("cpu", drafts, CHIPS[family], adaptive=ragged)[place]
                where = f"replay builder={place} family={family} drafts={drafts} ragged={ragged} seed={seed}"
                same(where, fresh.build(decode_batch("cpu", seed, drafts, ragged=ragged)), built)
                replays += 1
    return f"{replays} graph replays equal to fresh builds"


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked")
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {chip_of(torch.device('cuda'))}")
    for check in (check_values, check_no_waiting, check_graphs):
        print(f"{check.__name__}: {check()}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
