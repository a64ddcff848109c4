"""`cpkit draw` of what is not one step's plan: capacity, time to first token, the outcomes of a sweep."""

import argparse
from collections.abc import Callable
from typing import Any

from cpkit.cli.parser import int_list, positive_number, whole_number
from cpkit.cli.sized_model import (
    add_longest,
    add_model_flags,
    add_overlap,
    add_weights_gib,
    given_weights,
    read_sized_model,
)
from cpkit.errors import ConfigError, InputError
from cpkit.sizing.deployment import ENGINES
from cpkit.topology import legal_dcp_sizes

Added = tuple[argparse.ArgumentParser, Callable[[argparse.Namespace], str]]

MAX_LINES = 8
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)


def add_capacity(kinds: Any) -> Added:
    """Add `capacity`; returns its parser and what draws it."""
    parser = kinds.add_parser(
        "capacity",
        help="tokens of context that fit, over dcp, a line a chip",
        description="Tokens of context that one replica has room for, over every legal dcp, a line for each chip.\n"
        "Hollow marks: sizes that the engine's rules refuse (`cpkit doctor` says which).",
        epilog="example:\n  cpkit draw capacity --model deepseek-v3.2 --engine vllm --chips h100,h200,b200 -tp 8 "
        "-o capacity.png",
    )
    add_model_flags(parser)
    parser.add_argument("--engine", choices=tuple(ENGINES), default="cpkit", help="(default: cpkit)")
    parser.add_argument("--chips", default="h200", metavar="NAME,NAME", help="at most eight (default: %(default)s)")
    parser.add_argument("-tp", type=whole_number, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("-pcp", type=whole_number, default=1, metavar="N", help="(default: 1)")
    add_weights_gib(parser)
    add_longest(parser)
    return parser, draw_capacity


def add_ttft(kinds: Any) -> Added:
    """Add `ttft`; returns its parser and what draws it."""
    parser = kinds.add_parser(
        "ttft",
        help="time to first token over context, for several pcp x dcp",
        description="Seconds from the start of a prompt to its first token, alone on the replica, over the length of\n"
        "the prompt: the cost model's estimate, a line for each legal world of the pcp and dcp sizes that are named.",
        epilog="example:\n  cpkit draw ttft --model deepseek-v3.2 --chip h200 -tp 8 -pcp 1,2,4 -dcp 1,8,16,32 "
        "-o ttft.png",
    )
    add_model_flags(parser)
    parser.add_argument("--chip", default="h200", help="(default: %(default)s)")
    parser.add_argument("-tp", type=whole_number, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("-pcp", type=int_list, default=[1, 2, 4], metavar="N,N", help="(default: 1,2,4)")
    parser.add_argument("-dcp", type=int_list, metavar="N,N", help="(default: 1 and all ranks of the replica)")
    parser.add_argument("--contexts", type=int_list, metavar="N,N", help="tokens (default: 4K to 128K, doubling)")
    parser.add_argument(
        "--max-num-batched-tokens", type=whole_number, default=8192, metavar="N", help="of a step (default: 8192)"
    )
    add_overlap(parser)
    return parser, draw_ttft


def add_pareto(kinds: Any) -> Added:
    """Add `pareto`; returns its parser and what draws it."""
    parser = kinds.add_parser(
        "pareto",
        help="outcomes of a sweep, and which no other beats",
        description="Every deployment that a sweep replayed: first token p99 and time per output token p99 over\n"
        "tokens/s a GPU. Those that no other beats are numbered and named, the one to take is ringed.",
        epilog="example:\n  cpkit sweep trace.jsonl --gpus 8..32 --results sweep.jsonl\n"
        "  cpkit draw pareto sweep.jsonl -o pareto.png",
    )
    parser.add_argument("results", metavar="RESULTS", help="a file of `cpkit sweep --results` or `--json`")
    parser.add_argument(
        "--ttft", type=positive_number, metavar="S", help="first token p99 asked for (default: the report's, or 10)"
    )
    parser.add_argument(
        "--tpot", type=positive_number, metavar="S", help="time per token p99 asked for (default: the report's, or 0.1)"
    )
    return parser, draw_pareto


def draw_capacity(args: argparse.Namespace) -> str:
    """Count what fits for each chip and dcp, and draw it."""
    from cpkit.report.pictures.capacity import draw_capacity, fits
    from cpkit.sizing.chips import chip
    from cpkit.sizing.memory.deployment import Limits

    names = [name.strip() for name in args.chips.split(",")]
    if len(set(names)) != len(names) or len(names) > MAX_LINES:
        raise InputError(f"--chips {args.chips}: up to {MAX_LINES} chips, each once")
    sized = read_sized_model(args)
    limits = Limits(
        config=sized.config,
        max_model_len=sized.max_model_len,
        weights=given_weights(args),
        weight_bits=sized.weight_bits,
    )
    lines = [fits(sized.model, args.engine, chip(one), limits, tp=args.tp, pcp=args.pcp) for one in names]
    return draw_capacity(lines, args.out)


def draw_ttft(args: argparse.Namespace) -> str:
    """Cost a prompt of each length in each world, and draw the curves."""
    from cpkit.budget import default_budget
    from cpkit.report.pictures.ttft import TtftSetting, draw_ttft, prefill_curve
    from cpkit.sizing.chips import chip
    from cpkit.sizing.cost.assumptions import Assumptions

    sized = read_sized_model(args)
    model = sized.model
    contexts = tuple(sorted(set(args.contexts or CONTEXTS)))
    if contexts[0] < 1 or contexts[-1] > model.max_model_len:
        raise InputError(f"--contexts: from 1 to {model.max_model_len} tokens, the model's longest request")
    wanted = {(pcp, dcp) for pcp in args.pcp for dcp in args.dcp or (1, args.tp * pcp)}
    worlds = sorted((pcp, dcp) for pcp, dcp in wanted if pcp > 0 and dcp in legal_dcp_sizes(args.tp, pcp))
    if not 1 <= len(worlds) <= MAX_LINES:
        raise ConfigError(
            f"{len(worlds)} legal worlds of tp={args.tp} with pcp {args.pcp} and dcp {args.dcp}: name 1 to {MAX_LINES} "
            "(dcp is a divisor of tp, or with pcp > 1 one of 1, pcp, tp * pcp)"
        )
    setting = TtftSetting(
        model=model,
        weights=sized.weights(),
        chip=chip(args.chip),
        tp=args.tp,
        budget=default_budget(model, max_num_batched_tokens=args.max_num_batched_tokens),
        assumptions=Assumptions(overlap=args.overlap),
    )
    curves = [prefill_curve(setting, contexts, pcp=pcp, dcp=dcp) for pcp, dcp in worlds]
    return draw_ttft(setting, curves, args.out)


def draw_pareto(args: argparse.Namespace) -> str:
    """Read a sweep and draw its outcomes."""
    from cpkit.report.pictures.pareto import draw_pareto
    from cpkit.report.pictures.sweep_file import read_sweep
    from cpkit.sizing.sweep.choice import Aim

    sweep = read_sweep(args.results)
    asked = Aim(args.ttft or sweep.aim.ttft_s, args.tpot or sweep.aim.tpot_s)
    return draw_pareto(sweep, asked, args.out)
