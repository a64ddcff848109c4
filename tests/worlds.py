"""Random worlds for hypothesis: batches with every kind of request, topologies up to 16 x 16, made-up models."""

from hypothesis import strategies as st

from cpkit.batch import Batch
from cpkit.budget import Budget
from cpkit.layers import Index, Layer
from cpkit.model import Model
from cpkit.topology import Topology, legal_dcp_sizes

RATIOS = (1, 2, 3, 4, 16, 128)
PARALLEL_SIZES = [
    (tp, pcp, dcp)
    for tp in range(1, 17)
    for pcp in range(1, 17)
    if tp * pcp <= 32
    for dcp in legal_dcp_sizes(tp, pcp)
    if dcp <= 16
]
BOTH = [sizes for sizes in PARALLEL_SIZES if sizes[1] > 1 and sizes[2] > 1]


def made_up_model(ratio, num_heads, pool=1):
    """An indexed layer, one that attends all its keys, and a window."""
    index = Index(topk=8, num_heads=2, head_dim=16, ratio=ratio * pool, key_bytes=20)
    caches = {"compress_ratio": ratio, "key_dim": 24, "value_dim": 16, "key_bytes": 40}
    layers = (
        Layer("dsa", 2, **caches, index=index, runs_index=True),
        Layer("c4a", 1, **caches),
        Layer("swa", 1, window_size=8, window_dim=16, window_bytes=32),
    )
    return Model("made-up", "made-up", 32, num_heads, 1 << 20, layers)


@st.composite
def topologies(draw, sizes=PARALLEL_SIZES, ratio=1):
    """A topology whose blocks and turns hold whole states of `ratio` tokens."""
    tp, pcp, dcp = draw(st.sampled_from(sizes))
    interleave = ratio * draw(st.integers(1, max(1, 128 // ratio)))
    block_size = interleave * draw(st.integers(1, 4))
    return Topology(tp=tp, pcp=pcp, dcp=dcp, interleave=interleave, block_size=block_size)


@st.composite
def batches(draw, longest=5000, max_drafts=3):
    """Decodes with drafts, prompts fresh, continued, resumed and of one token, requests without tokens."""
    seq, query, prompt = [], [], []
    lens = st.one_of(st.integers(0, 40), st.integers(0, longest))
    for kind in draw(st.lists(st.sampled_from(["decode", "prefill", "resumed", "one", "idle"]), max_size=6)):
        computed, new = draw(lens), draw(lens)
        if kind == "decode":
            new = draw(st.integers(1, 1 + max_drafts))
            end = draw(st.integers(0, computed))
        elif kind == "resumed":
            end = draw(st.integers(0, computed + new))
        else:
            computed, new = {"prefill": (computed, new), "one": (0, 1), "idle": (computed, 0)}[kind]
            end = computed + new
        seq.append(computed + new)
        query.append(new)
        prompt.append(end)
    return Batch.from_lens(seq, query, prompt)


@st.composite
def budgets(draw, topology, most=1 << 16):
    """Budgets from one round of the ranks' turns upwards, so that keys, queries or nothing is cut."""
    least = topology.dcp * topology.interleave
    return Budget(
        workspace_tokens=least * draw(st.integers(1, 40)),
        logits_bytes=4 * least * draw(st.integers(1, 40)),
        max_num_batched_tokens=most,
        num_speculative_tokens=draw(st.integers(0, 3)),
    )
