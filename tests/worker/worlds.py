"""Small runs of any world: a few steps of three prompts, few heads, few keys picked, windows shorter than prompts."""

from dataclasses import dataclass, field, replace

from cpkit.activations.generate import Generated
from cpkit.budget import Budget
from cpkit.model import load_model
from cpkit.report.run_report import total_findings
from cpkit.run.execute import RunOptions, execute
from cpkit.run.model import run_model
from cpkit.run.steps import prompt_steps
from cpkit.settings import StepSettings
from cpkit.topology import Topology, legal_dcp_sizes

MODELS = {
    "dsa": "glm-5.2",
    "kpool": "glm-5.3-flash",
    "c4a": "deepseek-v4-flash",
    "c128a": "deepseek-v4-flash",
    "swa": "deepseek-v4-flash",
}
"""kpool: dsa layers whose indexer scores pools."""
BLOCK = {"dsa": 64, "kpool": 64, "c4a": 64, "c128a": 256, "swa": 64}
PROMPTS = {"dsa": (70, 9, 1), "kpool": (183, 15, 16), "c4a": (70, 9, 1), "c128a": (260, 9, 1), "swa": (70, 9, 1)}
INTERLEAVES = {"dsa": (1, 16, 64), "swa": (1, 16, 64), "c4a": (16, 64), "c128a": (128,)}
SHARES = [(kind, interleave) for kind, interleaves in INTERLEAVES.items() for interleave in interleaves]
WORLDS = [
    {"tp": tp, "pcp": pcp, "dcp": dcp}
    for pcp in (1, 2, 4)
    for tp in (1, 2, 4)
    for dcp in legal_dcp_sizes(tp, pcp)
    if dcp <= 8
]
PARTITIONS = ("head_tail", "head_tail_even", "contiguous", "round_robin")


@dataclass(frozen=True)
class Case:
    """One run. budget: Budget's fields; tight ones cut chunks, runs and key spans."""

    kind: str
    interleave: int = 1
    world: dict = field(default_factory=dict)
    merge: str = "ag_rs"
    partition: str = "head_tail"
    shard: bool | None = None
    data: str = "exact"
    prompts: tuple[int, ...] = ()
    decodes: int = 2
    budget: dict = field(default_factory=dict)
    topk: int = 8
    index_heads: int = 2

    @property
    def settings(self):
        topology = Topology(**self.world, interleave=self.interleave, block_size=BLOCK[self.kind])
        limits = {"workspace_tokens": 4096, "max_num_batched_tokens": 256, "max_num_seqs": 8} | self.budget
        return StepSettings(topology, self.model, Budget(**limits), self.partition, self.merge, self.shard)

    @property
    def model(self):
        model = run_model(load_model(MODELS[self.kind]), {"kpool": "dsa"}.get(self.kind, self.kind), 16)
        return replace(model, hidden_size=24, layers=tuple(self.small(layer) for layer in model.layers))

    def small(self, layer):
        index = layer.index and replace(layer.index, topk=self.topk, num_heads=self.index_heads)
        return replace(layer, index=index, window_size=min(layer.window_size, 9))

    @property
    def steps(self):
        return prompt_steps(self.prompts or PROMPTS[self.kind], self.decodes, self.settings, seed=0)

    def __str__(self):
        world = "-".join(f"{axis}{size}" for axis, size in self.world.items()) or "alone"
        parts = [self.kind, f"i{self.interleave}", world, self.partition, self.merge]
        return "-".join(parts + ["replicated"] * (self.shard is False) + ["random"] * (self.data == "random"))


def run(case, **options):
    """Reports of all ranks of a run on simulated ranks, every row verified."""
    options = RunOptions(**{"comm": "sim", "verify": "all", "timeout_s": 120} | options)
    return execute(case.steps, case.settings, Generated(7, case.data), options)[1]


def findings(case, **options):
    """All ranks' findings, without a mismatch."""
    found = total_findings(run(case, **options))
    assert found.first is None, str(found.first)
    return found
