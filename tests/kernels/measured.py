"""The tables of docs/kernels.md, made from the code and benchmarks/results; run as a program it writes them anew.

    python -m tests.kernels.measured

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import inspect
import json
from importlib import import_module
from pathlib import Path

from cpkit.kernels.registry import all_kernels
from tests.sizing.pages import markdown, rewrite

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PAGE = "kernels.md"

KERNELS = {
    "step_slots": ("step_slots", "slots of tokens, compressed states and kpool tails, in one launch"),
    "compressed_slots": ("compressed_slots", "slots of states alone"),
    "packed_compressed_slots": ("compressed_slots", "the same under PCP + DCP, with the owner, as ranks exchange them"),
    "tail_slots": ("tail_slots", "slots of kpool tails alone"),
    "token_to_req": ("token_to_req", "request of each token"),
    "dcp_local_lens": ("dcp_local_lens", "lengths of one rank's shard"),
    "gather_lens": ("gather_lens", "tokens that windows reach back to"),
    "key_ranges_local": ("key_ranges", "keys of the own shard that each query token may score"),
    "key_ranges_gathered": ("key_ranges", "the same among keys gathered from all shards"),
    "swa_indices": ("swa_indices", "window rows of each token, causal or replayed"),
    "draft_swa_indices": ("swa_indices", "the same of drafts that see each other"),
    "flat_decodes": ("decode_lens", "decodes of any lengths as rows of one query token"),
    "native_decodes": ("decode_lens", "decodes of one length as rows of several query tokens"),
    "tile_schedule": ("tile_schedule", "where each worker of a decode kernel starts"),
    "shard_slots": ("position_slots", "positions to cache slots of this rank, -1 for others'"),
    "compact_shard_slots": ("position_slots", "the same, kept slots in front and counted, in a fixed order"),
    "gathered_slots": ("position_slots", "positions to rows gathered from all ranks"),
    "deinterleave_idx": ("deinterleave", "token order of gathered shards, as an array"),
    "table_slots": ("table_slots", "slots of a workspace's keys, by block tables"),
    "pool_keys": ("pool_keys", "keys of the pools that an indexer picks, and the tail that fills none"),
    "quantize_fp8": ("fp8", "groups of values to e4m3 and a scale"),
    "quantize_index_keys": ("index_cache", "the same of index keys, straight into the cache"),
    "write_rows": ("paged_rows", "packed rows into a cache"),
    "read_rows": ("paged_rows", "packed rows out of a cache"),
    "table_keys": ("table_keys", "paged index keys side by side, by block tables"),
    "pack_table_keys": ("table_keys", "the same, as the shard that a rank sends"),
    "gather_keys": ("gather_keys", "gathered shards to token order, values and scales together"),
    "pick_keys": ("gather_keys", "the keys at some places of the token order"),
    "pull_keys": ("gather_keys", "all keys in token order, out of the peers' buffers"),
    "pull_table_keys": ("table_keys", "all keys in token order, out of the peers' caches"),
}


def kernels_table():
    """Who takes a backend has a torch form; whose file has a kernel in the registry has a Triton form."""
    compiled = {entry.kernel.fn.__module__ for entry in all_kernels()}
    rows = []
    for name, (file, what) in KERNELS.items():
        module = import_module(f"cpkit.kernels.{file}")
        forms = ["torch"] * ("backend" in inspect.signature(getattr(module, name)).parameters)
        forms += ["triton"] * (module.__name__ in compiled)
        rows.append([f"`{name}`", f"`{file}.py`", what, ", ".join(forms)])
    return markdown(["function", "in cpkit/kernels/", "gives", "backends"], rows)


def results(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def us(number):
    """Microseconds as printed: three digits from 100 on, else one behind the point."""
    return "" if number is None else f"{number:,.0f}" if number >= 100 else f"{number:,.1f}"


def target(row):
    return f"{row['target_us']:,.0f}{'' if row['met'] else ', missed'}" if "target_us" in row else ""


def launches_table(rows):
    """Single kernels: others are torch, or whatever ran or was recorded beside."""
    lines = []
    for row in rows:
        others = {name: taken for name, taken in row["us"].items() if name != "cpkit"}
        others |= {f"{name} (recorded)": taken for name, taken in row["recorded_us"].items()}
        peers = "; ".join(f"{name} {us(taken)}" for name, taken in others.items())
        lines.append(
            [f"`{row['work']}`", row["shape"], us(row["us"]["cpkit"]), us(row["floor_us"]), target(row), peers]
        )
    return markdown(["kernel", "shape", "cpkit µs", "floor µs", "target µs", "others µs"], lines)


def metadata_table():
    return launches_table([row for row in results("metadata.json")["rows"] if "us" in row])


def plans_table():
    rows = [row for row in results("metadata.json")["rows"] if row["work"].startswith("global chunk plan")]
    lines = [[row["shape"], us(row["wall_us"]), target(row), us(row["recorded_us"]["vllm"])] for row in rows]
    return markdown(["chunk plan to the device, host included", "cpkit µs", "target µs", "vllm (recorded) µs"], lines)


def builds_table():
    lines = [
        [
            row["shape"],
            *(us(row[clock][who]) for clock in ("wall_us", "graph_replay_us") for who in ("cpkit", "torch")),
            f"{row['ratio']['wall']:.2f}, {row['ratio']['graph']:.2f}",
            f"{row['target_ratio']:.2f}",
        ]
        for row in results("metadata.json")["rows"]
        if row["work"].startswith("decode-step metadata build")
    ]
    clocks = ["host + device, cpkit µs", "torch µs", "graph replay, cpkit µs", "torch µs"]
    return markdown(["decode step built", *clocks, "ratios", "target"], lines)


def caches_table():
    return launches_table(results("gather.json")["one_gpu"]["rows"])


def exchange_table():
    rows = [row for row in results("gather.json")["several_gpus"]["rows"] if row["work"] == "exchange"]
    paths = list(rows[0]["us"])
    lines = [[row["shape"], *(us(row["us"][path]) for path in paths), us(row["floor_us"])] for row in rows]
    return markdown(["µs an exchange", *paths, "floor"], lines)


def overlap_table():
    rows = [row for row in results("gather.json")["several_gpus"]["rows"] if row["work"] == "overlap"]
    ways = list(rows[0]["us"])
    return markdown(
        ["µs a chunk", *ways], [[row["shape"], *(f"{row['us'][way]:,.1f}" for way in ways)] for row in rows]
    )


TABLES = {
    "kernels": kernels_table,
    "metadata": metadata_table,
    "plans": plans_table,
    "builds": builds_table,
    "caches": caches_table,
    "exchange": exchange_table,
    "overlap": overlap_table,
}


if __name__ == "__main__":
    rewrite(PAGE, TABLES)
