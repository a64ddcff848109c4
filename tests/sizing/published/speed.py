"""Prefill speed-ups of PCP that others published, beside the cost model's for the same inputs.

What is not published is stated in `inputs`: it was chosen once, for all rows of a source, and a row whose chip or model
is not known is not judged.
"""

from dataclasses import dataclass, replace

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.settings import StepSettings
from cpkit.sizing.chips import Chip, chip
from cpkit.sizing.cost.assumptions import Assumptions
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.figures import Figure
from cpkit.sizing.weights import load_weights
from cpkit.topology import Topology

BOUND = 0.15


@dataclass(frozen=True)
class SpeedUp:
    """before, after: published, in ms; seconds of ours stand beside them only to show the size."""

    what: str
    length: int
    before_ms: float
    after_ms: float
    model: str
    chip: Chip
    step_tokens: int
    worlds: tuple[dict[str, int], dict[str, int]]
    inputs: str
    source: str
    is_judged: bool = True
    weight_bits: int | None = None
    assumptions: Assumptions = Assumptions()  # noqa: RUF009  # frozen

    @property
    def published(self):
        return self.before_ms / self.after_ms

    def ours_s(self):
        """Seconds of the whole prompt before and after."""
        return [self.prefill_s(world) for world in self.worlds]

    def prefill_s(self, world):
        model = load_model(self.model)
        block_size = 256 if "v4" in self.model else 64
        topology = Topology(block_size=block_size, **world)
        settings = StepSettings(topology, model, default_budget(model, max_num_batched_tokens=self.step_tokens))
        weights = load_weights(self.model, model, weight_bits=self.weight_bits)
        cost = CostModel(model, weights, topology, self.chip, self.assumptions)
        total = 0.0
        for done in range(0, self.length, self.step_tokens):
            query = min(self.step_tokens, self.length - done)
            batch = Batch.from_lens([done + query], [query], [self.length])
            total += cost.step_cost(settings.plan(batch, 0)).seconds()
        return total


def told(value, source):
    return Figure(value, "hardware", source)


MI308_CUS = "80 of the MI300X's 304 compute units (ROCm/rocMLIR pull 1927) at its clock"
MI308 = replace(
    chip("mi300x"),
    name="mi308x",
    label="MI308X",
    peak_flops={
        dtype: Figure(80 / 304 * flops.value, "assumed", f"{MI308_CUS}; its own limits of power are not published")
        for dtype, flops in chip("mi300x").peak_flops.items()
    },
)
HGX_B300 = "HGX B300, a GPU's eighth: glennklockwood.com/garden/processors/B300; fp8 and bf16 alike on fibermall.com"
B300 = replace(
    chip("b200"),
    name="b300",
    label="B300",
    peak_flops={
        "bf16": told(2.25e15, HGX_B300),
        "fp8": told(4.5e15, HGX_B300),
        "fp4": told(13.125e15, HGX_B300),
    },
    hbm_bandwidth=told(8e12, HGX_B300),
)
SPLIT_IN_TWO = {"tp": 8}, {"tp": 4, "pcp": 2}


def speed_ups():
    """Every published row that has a model of cpkit."""
    for length, before, after in (
        (8192, 3588, 2307),
        (16384, 8012, 4920),
        (32768, 14908, 9347),
        (65536, 32727, 18667),
    ):
        yield SpeedUp(
            what="tp 8 to tp 4, pcp 2, DeepSeek-V4",
            length=length,
            before_ms=before,
            after_ms=after,
            model="deepseek-v4-flash",
            chip=MI308,
            step_tokens=16384,
            worlds=SPLIT_IN_TWO,
            inputs="8 x MI308, 8 requests at once; not published: which V4 (Flash, by its gsm8k of 0.86), 16,384 "
            "tokens a step, MI308 peaks: 80 of the MI300X's 304 compute units, 344 (bf16) and 688 (fp8) TFLOP/s",
            source="ROCm/ATOM pull 1220",
        )
    yield SpeedUp(
        what="tp 8 to pcp 8, GLM-5.2 NVFP4, forward pass",
        length=32768,
        before_ms=973.9,
        after_ms=366.9,
        model="glm-5.2",
        chip=B300,
        step_tokens=32768,
        worlds=({"tp": 8}, {"pcp": 8}),
        inputs="8 x B300; not published: attention kernel. FlashMLA's, padded to 128 heads, would alone take "
        "longer than the published pass with tp 8, so one that pads to 16 is assumed",
        source="vllm-project/vllm pull 52046",
        weight_bits=4,
        assumptions=Assumptions(head_tile=16),
    )
    for length, before, after in (
        (131072, 11170, 8730),
        (262144, 21200, 18380),
        (524288, 49190, 41010),
        (1 << 20, 126680, 95590),
    ):
        yield SpeedUp(
            what="tp 8 to pcp 2, DeepSeek-V4",
            length=length,
            before_ms=before,
            after_ms=after,
            model="deepseek-v4-pro",
            chip=chip("h200"),
            step_tokens=8192,
            worlds=SPLIT_IN_TWO,
            inputs="8 GPUs; not published: their kind, which V4, tp beside pcp 2, tokens a step; counted for H200, "
            "V4-Pro, tp 4, 8,192 tokens a step",
            source="vllm-project/vllm pull 43809",
            is_judged=False,
        )


def speed_rows():
    """Cells of the page's table."""
    for row in speed_ups():
        before_s, after_s = row.ours_s()
        ratio = before_s / after_s
        yield [
            row.what,
            f"{row.length // 1024}k",
            f"{row.before_ms:,.0f} / {row.after_ms:,.0f} ms = {row.published:.2f} ×",
            f"{ratio:.2f} ×",
            f"{ratio / row.published - 1:+.1%}",
            f"{BOUND:.0%}" if row.is_judged else "not judged",
            row.inputs,
            row.source,
        ]
