"""Times of DCP's collectives that others measured in a decode step, beside the cost model's for the same sizes."""

from dataclasses import dataclass

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.weights import load_weights
from cpkit.topology import Topology

SOURCE = "ai-dynamo/aisimulate pull 240"
INPUTS = "8 x B200, tp 8, 32 decodes of 32k, NCCL; model not published: deepseek-v3.2"


@dataclass(frozen=True)
class Measured:
    """least, most: what was published, one number or a range over dcp 2 to 8; ours: of each dcp. unit: us or ms."""

    what: str
    least: float
    most: float
    ours: tuple[float, ...]
    unit: str
    within: float

    @property
    def holds(self):
        """Ours lies in the range, give or take the bound."""
        return all(self.least * (1 - self.within) <= one <= self.most * (1 + self.within) for one in self.ours)


def calls(dcp):
    """Seconds of one layer's collectives by what travels, and the number of layers."""
    model = load_model("deepseek-v3.2")
    topology = Topology(tp=8, dcp=dcp)
    plan = StepSettings(topology, model, default_budget(model)).plan(Batch.from_lens([32768] * 32, [1] * 32), 0)
    cost = CostModel(model, load_weights("deepseek-v3.2", model), topology, chip("b200")).step_cost(plan)
    return {each.collective.what: each.seconds for each in cost.layers[0].collectives}, model.num_layers


def measured():
    """Every published time of a collective."""
    found = {dcp: calls(dcp) for dcp in (2, 4, 8)}
    queries = 1e6 * found[8][0]["query_heads"]
    lse = {dcp: seconds["lse"] for dcp, (seconds, _) in found.items()}
    yield Measured("gather of query heads, dcp 8, one layer", 32, 32, (queries,), "us", 0.1)
    yield Measured("gather of the LSE, dcp 2 to 8, one layer", 7, 25, tuple(1e6 * one for one in lse.values()), "us", 0)
    steps = tuple(1e3 * lse[dcp] * layers for dcp, (_, layers) in found.items())
    yield Measured("gather of the LSE, dcp 2 to 8, a step", 0.5, 1.4, steps, "ms", 0)


def collective_rows():
    """Cells of the page's table."""
    for row in measured():
        published = f"{row.least:g}" if row.least == row.most else f"{row.least:g} to {row.most:g}"
        ours = ", ".join(f"{one:.3g}" for one in row.ours)
        bound = f"{row.within:.0%}" if row.within else "the range"
        yield [row.what, f"{published} {row.unit}", f"{ours} {row.unit}", bound, INPUTS, SOURCE]
