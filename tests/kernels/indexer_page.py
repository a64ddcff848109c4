"""The tables of docs/indexer-kernels.md, made from benchmarks/results; run as a program it writes them anew.

python -m tests.kernels.indexer_page
"""

from tests.kernels.measured import results
from tests.sizing.pages import markdown, rewrite

PAGE = "indexer-kernels.md"

LOGITS_TARGETS = {(4096, 131072, 64): 1 / 1.05, (2048, 16384, 64): 1 / 1.05}
TOPK_TARGETS = {
    ("topk", 4096, 131072): 0.75,
    ("topk decode", 64, 131072): 0.9,
    ("topk decode", 16, 131072): 0.9,
    ("topk decode", 8, 1 << 20): 0.9,
}
LISTED_TARGETS = {64: 0.85}
"""Most of the peer's time, by shape, or by heads; other logits have 1, others none."""


def took(ms):
    """8.10 ms, 0.458 ms, or 16.1 µs below a tenth."""
    return f"{1e3 * ms:.1f} µs" if ms < 0.1 else f"{ms:.3f} ms" if ms < 1 else f"{ms:.2f} ms"


def ratio(ours, theirs, most=None):
    """Time over the peer's, and what is said of it where there is a target."""
    said = "" if most is None else f" (target {most:.2f})" if ours <= most * theirs else f" (target {most:.2f}, missed)"
    return f"{ours / theirs:.3f}{said}"


def rows_of(work):
    return [row for row in results("indexer.json")["rows"] if row["work"] == work]


def logits_table():
    lines = []
    for row in rows_of("mqa_logits"):
        ours, theirs = row["ms"]["cpkit"], row["ms"]["peer"]
        most = LOGITS_TARGETS.get((row["M"], row["N"], row["H"]), 1.0)
        shape = f"{row['M']:,} x {row['N']:,}, {row['H']} heads"
        lines.append([shape, f"{took(ours)} = {row['tflops']:,.0f} TFLOP/s", took(theirs), ratio(ours, theirs, most)])
    for row in rows_of("mqa_logits head-tail"):
        kept = f"{row['rate_kept']:.0%} of the rate of the end alone (target 90%)"
        lines.append([f"half of {row['M']:,} rows at each end of {row['N']:,}", kept, "", ""])
    return markdown(["logits", "cpkit", "DeepGEMM", "ratio"], lines)


def decode_logits_table():
    lines = []
    for row in results("decode_logits.json")["rows"]:
        equal = row["keys"] == row["rows"] * row["longest"]
        keys = f"{row['longest']:,}" if equal else f"up to {row['longest']:,}, {row['keys']:,} in all"
        tokens = f"{row['tokens']} query token{'s' * (row['tokens'] > 1)}"
        ours, theirs = row["ms"]["cpkit"], row["ms"].get("peer")
        lines.append(
            [
                f"{row['rows']} x {keys}, {tokens}, {row['heads']} heads",
                f"{took(ours)} = {row['gb_per_s']:,} GB/s",
                took(theirs) if theirs else "",
                ratio(ours, theirs, 1.0) if theirs else "",
            ]
        )
    return markdown(["decode logits", "cpkit", "DeepGEMM", "ratio"], lines)


def topk_table():
    lines = []
    for row in [*rows_of("topk"), *rows_of("topk decode")]:
        ours, theirs = row["ms"]["cpkit"], row["ms"]["peer"]
        most = TOPK_TARGETS.get((row["work"], row["M"], row["N"]))
        name = f"{row['k']:,} of {row['N']:,}, {row['M']:,} {'decodes' if 'decode' in row['work'] else 'rows'}"
        lines.append([name, took(ours), took(row["floor_ms"]), took(theirs), ratio(ours, theirs, most)])
    return markdown(["top-k", "cpkit", "reading once", "vllm", "ratio"], lines)


def listed_table():
    lines = []
    for row in rows_of("logits and topk"):
        memory, written = row["peak_bytes"] / 1e6, 4 * row["M"] * row["N"] / 1e9
        for clock, how in (("ms", "replayed"), ("calls_ms", "called from Python")):
            ours, theirs = row[clock]["cpkit"], row[clock]["peer"]
            name = f"{row['M']:,} x {row['N']:,}, {row['H']} heads, {how}"
            most = LISTED_TARGETS.get(row["H"]) if clock == "ms" else None
            lines.append(
                [
                    name,
                    f"{took(ours)} in {memory:.0f} MB",
                    f"{took(theirs)} in {written:.1f} GB",
                    ratio(ours, theirs, most),
                ]
            )
    return markdown(["logits and top-k", "cpkit", "DeepGEMM, then vllm", "ratio"], lines)


def shards_table():
    """Keys scored as ranks sent them, beside the same keys put into token order first."""
    lines = []
    for row in rows_of("shards"):
        shape = f"{row['M']:,} x {row['N']:,}, {row['H']} heads, {row['ranks']} ranks, interleave {row['interleave']:,}"
        for work, name in (("logits", "logits"), ("logits and topk", "logits and top-k")):
            lies, ordered = row["ms"][work], row["ms"][f"{work}, ordered first"]
            lines.append([f"{name}, {shape}", took(lies), took(ordered), ratio(lies, ordered)])
    return markdown(["keys of DCP ranks", "as they lie", "ordered first", "ratio"], lines)


def steps_table():
    """Milliseconds of the whole step; behind a world's its speed-up over one rank of the same run."""
    found = results("indexer_step.json")
    alone, several = (found[part]["rows"] for part in ("one_gpu", "several_gpus"))
    cells = {("one GPU, peers", row["context"]): row for row in alone if row["way"] == "peers"}
    cells |= {(f"one GPU, {row['way']}", row["context"]): row for row in alone if row["way"] != "peers"}
    cells |= {(f"{row['world']}, {row['way']}", row["context"]): row for row in several if row["world"] != "one rank"}
    contexts = sorted({context for _, context in cells})

    def cell(row):
        total = f"{row['ms']['total']:,.2f}"
        return f"{total}, x {row['speed_up']:.2f}" if "speed_up" in row else total

    lines = [
        [world, *(cell(cells[world, context]) for context in contexts)] for world in dict.fromkeys(w for w, _ in cells)
    ]
    return markdown(["ms a step of one layer", *(f"{context:,}" for context in contexts)], lines)


TABLES = {
    "logits": logits_table,
    "decode_logits": decode_logits_table,
    "topk": topk_table,
    "listed": listed_table,
    "shards": shards_table,
    "indexer_steps": steps_table,
}


if __name__ == "__main__":
    rewrite(PAGE, TABLES)
