"""`cpkit draw`: plans, sizes and sweeps as pictures."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cpkit.cli.draw_sizes import add_capacity, add_pareto, add_ttft
from cpkit.cli.options import add_engine_flags, read_settings
from cpkit.cli.output import check_writable, emit
from cpkit.cli.parser import Parser, whole_number
from cpkit.cli.plan import add_batch_flags, read_batch

if TYPE_CHECKING:  # numpy is not needed for --help
    from cpkit.step import StepPlan

DESCRIPTION = """\
Draw a picture, PNG or SVG by the file's name. Every number in it says below where it comes from; equal input gives
equal bytes. Needs the extra plot: pip install -c constraints.txt '.[plot]' in cpkit's checkout.
"""

EPILOG = """\
examples:
  who computes and who stores each token of one million on 256 ranks:
    cpkit draw ownership -tp 8 -pcp 32 -dcp 256 --block-size 64 --cp-kv-cache-interleave-size 64 \\
        --computed-lens 0 --query-lens 1000000 --max-num-batched-tokens 1000000 -o ownership.png

  what a step sends:
    cpkit draw traffic --seq-lens 9000,8000 --query-lens 1,8000 -tp 4 -pcp 2 -dcp 8 -o traffic.svg

  which dcp holds how many tokens on three chips:
    cpkit draw capacity --model deepseek-v3.2 --chips h100,h200,b200 -tp 8 -o capacity.png

`cpkit draw KIND --help` explains each kind and its flags; docs/pictures.md shows one of each.
"""

STEP_KINDS = {
    "ownership": (
        "who computes and who stores each position",
        "Two maps, ranks over positions: who computes the tokens of the step (PCP partition), and who stores the keys\n"
        "of the whole context (DCP). Borders between requests are marked; a large step is drawn in columns of many\n"
        "tokens, coloured by each rank's share of them.",
        "  4 ranks, a decode behind 10 tokens of context and the last 7 tokens of a 9-token prompt:\n"
        "    cpkit draw ownership -tp 2 -pcp 2 -dcp 4 --seq-lens 10,9 --query-lens 1,7 -o ownership.png",
    ),
    "chunks": (
        "prefill chunks against their budgets",
        "Each prefill chunk of one rank: tokens whose keys it gathers against --workspace-tokens, and the logits of\n"
        "its largest run of queries against --logits-mb.",
        "  why 300k tokens of context are scored in several runs:\n"
        "    cpkit draw chunks --seq-lens 300000,90000 --query-lens 6000,2000 -tp 4 -pcp 2 -dcp 8 -o chunks.png",
    ),
    "work": (
        "causal work and stored keys of every rank",
        "A bar a rank: query x key pairs that its tokens see, and keys that it stores; with the mean, and the largest\n"
        "rank over the mean (1.000 is even).",
        "  what another partition does to the balance:\n"
        "    cpkit draw work --seq-lens 8000 --query-lens 8000 -tp 1 -pcp 4 --partition contiguous -o work.png",
    ),
    "traffic": (
        "bytes of a step by collective",
        "A bar for each collective of the step, most bytes first: what one rank puts in, over all layers.",
        "  a mixed step on 8 ranks:\n"
        "    cpkit draw traffic --seq-lens 9000,8000 --query-lens 1,8000 -tp 4 -pcp 2 -dcp 8 -o traffic.svg",
    ),
}


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `draw` and its kinds to the parser."""
    parser = commands.add_parser(
        "draw", help="plans, sizes and sweeps as pictures", description=DESCRIPTION, epilog=EPILOG
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)
    for kind, (short, description, example) in STEP_KINDS.items():
        one = kinds.add_parser(kind, help=short, description=description, epilog=f"example:\n{example}")
        add_output(one, _draw_step)
        add_batch_flags(one)
        add_engine_flags(one)
        if kind == "chunks":
            one.add_argument("--rank", type=whole_number, default=0, metavar="R", help="whose chunks (default: 0)")
    for add in (add_capacity, add_ttft, add_pareto):
        add_output(*add(kinds))
    parser.set_defaults(run=run)


def add_output(parser: argparse.ArgumentParser, draw: Callable[[argparse.Namespace], str]) -> None:
    """Add -o, and what draws the picture."""
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="picture.png or picture.svg")
    parser.set_defaults(draw=draw)


def run(args: argparse.Namespace) -> int:
    """Draw, and say what was drawn; returns 0."""
    from cpkit.report.pictures.canvas import check_picture

    check_writable(args.out)
    check_picture(args.out)
    title = args.draw(args)
    emit(f"{args.out}: {title}")
    return 0


def _draw_step(args: argparse.Namespace) -> str:
    """A picture of the plan of one step."""
    settings = read_settings(args)
    plan = settings.plan(read_batch(args), args.rank if args.kind == "chunks" else None)
    return _drawers()[args.kind](plan, args.out)


def _drawers() -> "dict[str, Callable[[StepPlan, str], str]]":
    from cpkit.report.pictures.chunks import draw_chunks
    from cpkit.report.pictures.ownership import draw_ownership
    from cpkit.report.pictures.traffic import draw_traffic
    from cpkit.report.pictures.work import draw_work

    return {
        "ownership": draw_ownership,
        "chunks": lambda plan, path: draw_chunks(plan, plan.ranks[0], path),
        "work": draw_work,
        "traffic": draw_traffic,
    }
