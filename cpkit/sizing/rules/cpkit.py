"""What cpkit itself refuses; the nouns refuse the same when they are made."""

from cpkit.layers import RUN_KINDS
from cpkit.sizing.rules.rule import Note, Rule
from cpkit.topology import MAX_WORLD, legal_dcp_sizes

WORLD = ("tp", "pcp", "dcp")


RULES = (
    Rule(
        "cpkit-dcp-sizes",
        "dcp={d.dcp} with tp={d.tp} pcp={d.pcp}: dcp is a divisor of tp, or with pcp > 1 one of 1, pcp and tp * pcp",
        "topology.py",
        lambda d: d.dcp not in legal_dcp_sizes(d.tp, d.pcp),
        "another dcp, or a tp and pcp that it fits",
        WORLD,
    ),
    Rule(
        "cpkit-world",
        f"{{d.num_gpus}} ranks: worlds have at most {MAX_WORLD}",
        "topology.py",
        lambda d: d.num_gpus > MAX_WORLD,
        "a smaller dp, pp, pcp or tp",
        ("dp", "pp", *WORLD),
    ),
    Rule(
        "cpkit-heads-tp",
        "{d.model.num_heads} heads do not divide over tp={d.tp}",
        "model.py",
        lambda d: d.model.num_heads % d.tp > 0,
        "a tp that divides the heads",
        ("tp",),
    ),
    Rule(
        "cpkit-interleave-block",
        "interleave={d.interleave} does not divide block_size={d.block_size}: a block would start inside another "
        "rank's turn",
        "topology.py",
        lambda d: d.block_size % d.interleave > 0,
        "an interleave that divides the block size",
        ("interleave", "block_size"),
    ),
    Rule(
        "cpkit-block-keys",
        "block_size={d.block_size} is not a multiple of {d.key_ratio}, the tokens that a key of {d.model.name} stands "
        "for: a block would end inside one",
        "model.py",
        lambda d: d.block_size % d.key_ratio > 0,
        "a block size that is a multiple of {d.key_ratio}",
        ("block_size",),
    ),
    Rule(
        "cpkit-interleave-keys",
        "interleave={d.interleave} is not a multiple of {d.key_ratio}, the tokens that a key of {d.model.name} stands "
        "for: a key would span two DCP ranks",
        "model.py",
        lambda d: d.dcp > 1 and d.interleave % d.key_ratio > 0,
        "an interleave that is a multiple of {d.key_ratio}",
        ("interleave", "dcp"),
    ),
    Rule(
        "cpkit-heads-merge",
        "heads of partial outputs cannot be scattered over dcp={d.dcp}: they are {d.model.num_heads} in all, "
        "{d.local_heads} a TP rank",
        "model.py",
        lambda d: d.dcp > 1 and bool(d.model.slot_ratios) and d.gathered_heads % d.dcp > 0,
        "a dcp that divides the heads",
        WORLD,
    ),
    Rule(
        "cpkit-merge",
        "merge {d.merge}: partial outputs are merged by ag_rs or a2a",
        "planner/collectives.py",
        lambda d: d.merge not in (None, "ag_rs", "a2a"),
        "--dcp-comm-backend ag_rs or a2a",
        ("merge",),
    ),
)

NOTES = (
    Note(
        "cpkit-planned-alone",
        "some kinds of layers of {d.model.name} are planned and simulated, but not executed by cpkit run",
        "worker/caches.py",
        lambda d: not {layer.kind for layer in d.model.layers} <= set(RUN_KINDS),
    ),
    Note(
        "cpkit-pools-planned-alone",
        "pcp={d.pcp} with dcp={d.dcp} and an indexer that scores pools: such layers of {d.model.name} are planned and "
        "simulated, but not executed by cpkit run",
        "worker/layer_state.py",
        lambda d: d.pools and d.pcp > 1 and d.dcp > 1,
    ),
)
