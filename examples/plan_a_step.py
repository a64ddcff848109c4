"""Plan one mixed step for every rank of a small world, and print who computes and who stores what.

Run: python examples/plan_a_step.py
"""

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.step import plan_step
from cpkit.topology import Topology
from cpkit.views.materialize import stored_keys


def main() -> None:
    model = load_model("deepseek-v3.2")
    topology = Topology(tp=2, pcp=2, dcp=4, interleave=2)
    # One decode with 9 tokens of context, and a prompt of 12 tokens of which this step computes all.
    batch = Batch.from_lens(seq_lens=[10, 12], query_lens=[1, 12], prompt_lens=[8, 12])
    plan = plan_step(batch, topology, model, default_budget(model))

    print("rank  computes (request: positions)        stores this step")
    for rank in plan.ranks:
        rows = rank.rows
        computes = [
            f"{req}: {start}..{start + count - 1}" if count > 1 else f"{req}: {start}"
            for req, start, count in zip(rows.req, rows.start_pos, rows.num_tokens, strict=True)
        ]
        stored = stored_keys(plan, rank, ratio=1)
        stores = [f"{req}: {key}" for req, key in zip(stored.req, stored.key, strict=True)]
        print(f"{rank.rank:4}  {', '.join(computes):37}{', '.join(stores)}")

    print("\ncollectives of one layer, in order:")
    for collective in plan.collectives.layers[0]:
        print(f"  {collective.op:15} {collective.group:4} {collective.what:13} {collective.bytes:9,} bytes a rank")


if __name__ == "__main__":
    main()
