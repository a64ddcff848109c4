"""`cpkit sweep`: which deployment a trace needs, found by replaying it on many."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpkit.cli.exit_codes import INTERRUPTED, VIOLATED
from cpkit.cli.options import MERGES, add_acceptance_rate, add_num_drafts
from cpkit.cli.output import check_outputs, emit, write_json
from cpkit.cli.parser import int_list, positive_number, whole_number
from cpkit.cli.processes import MAX_DEFAULT, num_processes
from cpkit.cli.sized_model import add_longest, add_model_flags, add_overlap, read_sized_model
from cpkit.errors import ConfigError
from cpkit.sizing.deployment import ENGINES

if TYPE_CHECKING:  # numpy is not needed for --help
    from cpkit.sizing.memory.deployment import Limits
    from cpkit.sizing.sweep.candidates import Choices
    from cpkit.sizing.sweep.replay import SweepSetting
    from cpkit.sizing.sweep.run import SweepProgress
    from cpkit.workload.request import Trace

DESCRIPTION = """\
Replay a request trace on every deployment of so many GPUs that an engine's rules, the planner and memory allow, with
the cost model as the clock, and say which to take: the deployments that no other beats in time to first token, time
per output token, tokens/s a GPU and room for tokens, and for each other one what beats it.
"""

EPILOG = """\
examples:
  what 8 to 32 H200 do with the example trace:
    cpkit sweep examples/data/conversation_excerpt.jsonl.gz --model deepseek-v3.2 --chip h200 --gpus 8..32

  a long sweep in a file that it goes on with when started again, figures for a script:
    cpkit sweep trace.jsonl --model glm-5.2 --gpus 8..1024 --limit 64 --results sweep.jsonl --json sweep.json

exit codes: 0 a deployment to take is named (whether it keeps --ttft and --tpot is in the report, keeps_aim of --json),
1 there is none (every one is refused, or none serves a request), 2 bad usage or input, 130 interrupted (what was
replayed is in --results)
"""


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `sweep` to the parser."""
    parser = commands.add_parser("sweep", help="which deployment a trace needs", description=DESCRIPTION, epilog=EPILOG)
    parser.set_defaults(run=run)
    parser.add_argument("trace", metavar="TRACE", help="a trace file, as for `cpkit simulate`")
    parser.add_argument("--requests", type=whole_number, metavar="N", help="its first N requests (default: all)")
    parser.add_argument(
        "--load", type=positive_number, default=1.0, metavar="X", help="come this many times as fast (default: 1)"
    )
    add_model_flags(parser)
    parser.add_argument("--chip", default="h200", help="chip (default: %(default)s)")
    parser.add_argument(
        "--engine", choices=tuple(ENGINES), default="cpkit", help="whose rules and times count (default: %(default)s)"
    )
    add_longest(parser)
    parser.add_argument("--max-num-seqs", type=whole_number, default=256, metavar="N", help="of a step (default: 256)")
    add_num_drafts(parser)
    add_acceptance_rate(parser)
    tried = parser.add_argument_group("what is tried")
    tried.add_argument(
        "--gpus", type=gpu_counts, default=(8,), metavar="N|N..M|N,N", help="GPUs; 8..64 is 8, 16, 32, 64 (default: 8)"
    )
    tried.add_argument(
        "--batch-tokens", type=int_list, default=[2048, 8192], metavar="N,N", help="of a step (default: 2048,8192)"
    )
    tried.add_argument(
        "--partitions", default="", metavar="NAME,NAME", help="of prompts (default: head-tail; sglang's: round-robin)"
    )
    tried.add_argument(
        "--interleaves",
        type=int_list,
        default=[0],
        metavar="N,N",
        help="tokens; 0: the block size, sglang's: 1 (default: 0)",
    )
    tried.add_argument(
        "--dcp-comm-backend", choices=MERGES, default=MERGES[0], help="how DCP ranks merge (default: %(default)s)"
    )
    tried.add_argument(
        "--limit", type=whole_number, metavar="N", help="replay so many, chosen by a rough estimate (default: all)"
    )
    add_overlap(tried)
    aim = parser.add_argument_group("what is asked of it")
    aim.add_argument(
        "--ttft", type=positive_number, default=10.0, metavar="S", help="time to first token, p99 (default: 10)"
    )
    aim.add_argument(
        "--tpot", type=positive_number, default=0.1, metavar="S", help="time per output token, p99 (default: 0.1)"
    )
    output = parser.add_argument_group("the sweep")
    output.add_argument("--results", metavar="FILE", help="keep every result here and go on with those that are there")
    output.add_argument("--json", metavar="FILE", help="also write the report as JSON; - prints it and nothing else")
    output.add_argument(
        "--processes",
        type=whole_number,
        metavar="N",
        help=f"default: one a core, at most {MAX_DEFAULT}",
    )
    output.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of sampling (default: 0)")
    output.add_argument("--skip-bad", action="store_true", help="count malformed lines, do not stop")


def gpu_counts(text: str) -> tuple[int, ...]:
    """8 -> (8,), 8,24 -> (8, 24), 8..64 -> (8, 16, 32, 64)."""
    first, dots, last = text.partition("..")
    if dots:
        low, high = whole_number(first), whole_number(last)
        counts = tuple(low << i for i in range(32) if low << i <= high) if low > 0 else ()
    else:
        counts = tuple(int_list(text))
    if not counts or min(counts) < 1 or max(counts) > 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs: 8, or 8,24, or 8..1024 (doubling)")
    return counts


def run(args: argparse.Namespace) -> int:
    """Sweep and report; returns the exit code."""
    from time import perf_counter

    from cpkit.cli.progress import StatusLine
    from cpkit.report.sweep_report import SweepFacts, sweep_data, sweep_report
    from cpkit.sizing.chips import chip
    from cpkit.sizing.sweep.candidates import sort_out
    from cpkit.sizing.sweep.choice import Aim, choose
    from cpkit.sizing.sweep.results import Results
    from cpkit.sizing.sweep.run import run_sweep
    from cpkit.sizing.sweep.screen import screen, source_kinds

    check_outputs(args.trace, results=args.results, json=args.json)
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: it is not negative")
    start = perf_counter()
    processes, choices = num_processes(args.processes), _choices(args)
    setting, limits = read_setting(args)
    trace = read_requests(args)
    line = StatusLine()

    def show(progress: "SweepProgress") -> None:
        took = perf_counter() - start
        line.show(lambda: f"{progress.num_done}/{progress.num_all} deployments   {took:,.0f} s   {progress.latest}")

    with Results(None if args.results is None else Path(args.results), trace, setting) as results:
        allowed, refused = sort_out(setting.model, chip(setting.chip), args.engine, limits, choices, setting.merge)
        chosen, left_out = screen(allowed, trace, setting, args.limit)
        try:
            outcomes, failed = run_sweep(chosen, trace, setting, results, processes=processes, on_progress=show)
        except KeyboardInterrupt:
            line.clear()
            print(f"cpkit sweep: interrupted; {_kept(args.results, len(results.outcomes))}", file=sys.stderr)
            return INTERRUPTED
        finally:
            line.clear()
    choice = choose(outcomes, Aim(args.ttft, args.tpot))
    take = [one for one in chosen if choice.take is not None and one.candidate == choice.take.candidate]
    kinds = source_kinds(take[0], trace, setting) if take else {}
    memory = take[0].memory if take else None
    facts = SweepFacts(trace, setting, [*refused, *left_out, *failed], kinds, perf_counter() - start, memory)
    if args.json != "-":
        emit(sweep_report(choice, facts))  # before anything is written, which may fail
    if args.json is not None:
        write_json(args.json, sweep_data(choice, facts))
    return VIOLATED if choice.take is None else 0


def _kept(path: str | None, num_outcomes: int) -> str:
    if path is None:
        return "nothing is kept without --results FILE"
    return f"{num_outcomes} replayed so far kept in {path}, which the same command goes on with"


def read_setting(args: argparse.Namespace) -> "tuple[SweepSetting, Limits]":
    """What all candidates share, and what decides their memory; raises ConfigError."""
    from cpkit.budget import default_budget
    from cpkit.sizing.chips import chip
    from cpkit.sizing.cost.assumptions import Assumptions
    from cpkit.sizing.memory.deployment import Limits
    from cpkit.sizing.sweep.replay import SweepSetting

    sized = read_sized_model(args)
    budget = {"max_num_seqs": args.max_num_seqs, "num_speculative_tokens": args.num_speculative_tokens}
    limits = Limits(sized.config, sized.max_model_len, weight_bits=sized.weight_bits, budget=budget)
    setting = SweepSetting(
        model=sized.model,
        weights=sized.weights(),
        chip=chip(args.chip).name,
        budget=default_budget(sized.model, **budget),
        max_model_len=sized.max_model_len,
        engine=args.engine,
        merge=args.dcp_comm_backend,
        acceptance_rate=args.acceptance_rate,
        assumptions=Assumptions(overlap=args.overlap),
        seed=args.seed,
    )
    return setting, limits


def read_requests(args: argparse.Namespace) -> "Trace":
    """The trace, its first requests alone, arrivals and pauses between turns as much shorter as asked for."""
    from cpkit.workload.traces import read_trace

    trace = read_trace(args.trace, seed=args.seed, skip_bad=args.skip_bad)
    requests = trace.requests
    if args.requests is not None:
        if args.requests < 1:
            raise ConfigError(f"--requests {args.requests}: at least 1")
        requests = requests[: args.requests]
    if args.load != 1:
        requests = tuple(
            replace(request, arrival_s=request.arrival_s / args.load, think_time_s=request.think_time_s / args.load)
            for request in requests
        )
    return replace(trace, requests=requests)


def _choices(args: argparse.Namespace) -> "Choices":
    from cpkit.sizing.sweep.candidates import Choices

    partitions = tuple(name.strip().replace("-", "_") for name in args.partitions.split(","))
    return Choices(args.gpus, tuple(args.batch_tokens), partitions, tuple(args.interleaves))
