"""What a launched rank runs: python -m tests.worker.job FILE. Every case of CASES over one job; rank 0 writes JSON."""

import json
import sys
from pathlib import Path

import torch

from cpkit.comm.launcher import detect
from cpkit.comm.torch_dist import close_job, open_job
from tests.worker.worlds import Case, run

ROOMY = {"num_speculative_tokens": 1}
TIGHT = {"workspace_tokens": 64, "logits_bytes": 4 * 160, "max_num_batched_tokens": 48}
CASES = [
    Case("dsa", 1, {"tp": 2, "pcp": 2, "dcp": 4}, "ag_rs", "head_tail", budget=TIGHT),
    Case("dsa", 16, {"tp": 2, "pcp": 2, "dcp": 2}, "a2a", "round_robin", budget=ROOMY),
    Case("dsa", 1, {"tp": 4, "dcp": 4}, "a2a", budget=TIGHT),
    Case("dsa", 64, {"tp": 2, "pcp": 2}, "ag_rs", "contiguous"),
    Case("dsa", 1, {"tp": 1, "pcp": 4, "dcp": 4}, "ag_rs", "head_tail_even", data="random"),
    Case("c4a", 16, {"tp": 2, "pcp": 2, "dcp": 4}, "a2a", "head_tail_even", budget=ROOMY),
    Case("c4a", 16, {"tp": 4, "dcp": 2}, "ag_rs", data="random"),
    Case("c4a", 64, {"tp": 1, "pcp": 4}, "ag_rs", "round_robin", shard=False),
    Case("c128a", 128, {"tp": 2, "pcp": 2, "dcp": 2}, "ag_rs", "contiguous"),
    Case("c128a", 128, {"tp": 2, "pcp": 2, "dcp": 4}, "a2a"),
    Case("swa", 1, {"tp": 2, "pcp": 2, "dcp": 4}, "ag_rs", "round_robin"),
    Case("swa", 1, {"tp": 4, "dcp": 2}, "a2a"),
]


def summary(case, **options):
    """Of each rank its digests, and what it found."""
    return [
        [report.selections, report.outputs, report.findings.rows, report.findings.num_mismatches, report.calls]
        for report in run(case, **options)
    ]


def main():
    launch = detect()
    if launch.kind == "torchrun":
        open_job(launch, torch.device("cpu"), 120)
    told = {str(case): summary(case, comm="auto") for case in CASES}
    if launch.kind == "torchrun":
        close_job()
    if launch.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
