"""`cpkit plan`: one step, as every rank would plan it."""

import argparse
from typing import TYPE_CHECKING, Any

from cpkit.cli.options import add_engine_flags, check_model_len, read_settings
from cpkit.cli.output import check_folder, emit, write_json
from cpkit.cli.parser import int_list, whole_number
from cpkit.errors import InputError

if TYPE_CHECKING:
    from cpkit.batch import Batch

DESCRIPTION = """\
Plan one step and show who computes which query tokens, who stores which keys, which prefill chunks fit the
budgets, and which collectives run, in order and with their bytes.
"""

EPILOG = """\
examples:
  a decode with 10 tokens of context and the last 7 of a 9-token prompt, on 4 ranks, small enough to be drawn:
    cpkit plan -tp 2 -pcp 2 -dcp 4 --seq-lens 10,9 --query-lens 1,7

  one million tokens of prompt in one step on 256 ranks, as rank 77 sees it, and kept for a notebook:
    cpkit plan -tp 8 -pcp 32 -dcp 256 --block-size 256 --computed-lens 0 --query-lens 1000000 \\
        --max-num-batched-tokens 1000000 --rank 77 --save plan.npz

A batch file is {"seq_lens": [10, 9], "query_lens": [1, 7]} and optionally prompt_lens, block_tables, req_ids;
`cpkit simulate` writes one when a step breaks a promise. Positions are half-open ranges [start:stop).
plan.npz: `help(cpkit.views.saved_plan)` names its arrays; `cpkit.views.saved_plan.load_plan` reads it.
"""


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `plan` to the parser."""
    parser = commands.add_parser("plan", help="show the plan of one step", description=DESCRIPTION, epilog=EPILOG)
    parser.set_defaults(run=run)
    add_batch_flags(parser)
    add_engine_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--rank", type=whole_number, metavar="R", help="plan and show this rank alone")
    output.add_argument("--json", action="store_true", help="print the plan as JSON and nothing else")
    output.add_argument("--save", metavar="PLAN.npz", help="also write the plan as numpy arrays with a JSON header")


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add what describes a step; read_batch reads it."""
    batch = parser.add_argument_group("the step: a batch file, or two of the three lengths of each request")
    batch.add_argument("batch", nargs="?", metavar="BATCH.json", help="a batch file")
    lens = {
        "--seq-lens": "context with this step's tokens, like 10,9",
        "--query-lens": "tokens computed in this step",
        "--computed-lens": "tokens computed before this step (seq = computed + query)",
        "--prompt-lens": "prompt tokens; a request is a decode once its prompt was computed before this step "
        "(default: 1 query token behind some context is a decode, all else ends its prompt now)",
    }
    for flag, meaning in lens.items():
        batch.add_argument(flag, type=int_list, metavar="N,N,..", help=meaning)


def run(args: argparse.Namespace) -> int:
    """Plan, print, save; returns 0."""
    from cpkit.report.plan_report import plan_report
    from cpkit.views.plan_data import plan_data
    from cpkit.views.saved_plan import save_plan

    if args.save is not None:
        check_folder(args.save)
    settings = read_settings(args)
    batch = read_batch(args)
    check_model_len(batch, args.max_model_len)
    plan = settings.plan(batch, args.rank)
    if args.save:
        save_plan(plan, args.save)
    if args.json:
        write_json("-", plan_data(plan))
    else:
        saved = f"\n\nSaved as {args.save}" if args.save else ""
        emit(plan_report(plan, args.rank) + saved)
    return 0


def read_batch(args: argparse.Namespace) -> "Batch":
    """The batch of a file or of the lengths; raises InputError or PlanError."""
    from cpkit.batch import Batch

    lens = {name: getattr(args, f"{name}_lens") for name in ("seq", "query", "computed", "prompt")}
    given = [name for name, values in lens.items() if values is not None]
    if args.batch is not None:
        if given:
            raise InputError(f"{args.batch} and --{given[0]}-lens: give a batch file or lengths, not both")
        return Batch.load(args.batch)
    seq, query, computed = lens["seq"], lens["query"], lens["computed"]
    if sum(values is not None for values in (seq, query, computed)) < 2:
        raise InputError("no step to plan: give a batch file, or two of --seq-lens, --query-lens and --computed-lens")
    counts = {f"--{name}-lens": len(values) for name, values in lens.items() if values is not None}
    if len(set(counts.values())) > 1:
        raise InputError(f"{', '.join(f'{flag} has {n}' for flag, n in counts.items())} values: one each a request")
    if computed is not None:
        _check_lens(seq, query, computed)
        if seq is None:
            seq = [c + q for c, q in zip(computed, query, strict=True)]
        if query is None:
            query = [s - c for s, c in zip(seq, computed, strict=True)]
    return Batch.from_lens(seq, query, lens["prompt"])


def _check_lens(seq: list[int] | None, query: list[int] | None, computed: list[int]) -> None:
    """Refuse lengths that contradict each other; the nouns check what is left."""
    for i, before in enumerate(computed):
        if before < 0:
            raise InputError(f"--computed-lens: request {i} has {before}: a length is not negative")
        if seq is not None and seq[i] < before:
            raise InputError(f"request {i}: seq_len={seq[i]} < computed_len={before}: the context counts both")
        if seq is not None and query is not None and seq[i] != before + query[i]:
            raise InputError(
                f"request {i}: seq_len={seq[i]} is not computed_len={before} + query_len={query[i]}: "
                "give two of the three, or make them agree"
            )
