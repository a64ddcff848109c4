"""`cpkit simulate`: a trace, replayed and planned for every rank, with every promise checked."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpkit.cli.exit_codes import INTERRUPTED, VIOLATED
from cpkit.cli.options import add_acceptance_rate, add_engine_flags, engine_flags, max_model_len, read_settings
from cpkit.cli.output import check_folder, check_outputs, emit, write_json
from cpkit.cli.parser import positive_number, whole_number
from cpkit.cli.pool import PoolSize, default_pool
from cpkit.cli.processes import MAX_DEFAULT, num_processes
from cpkit.cli.simulate_pictures import Pictures, add_picture_flags
from cpkit.cli.sized_model import add_overlap, add_weight_bits, add_weights_gib, given_weights, read_sized_model
from cpkit.errors import ConfigError, InputError
from cpkit.sizing.deployment import ENGINES

if TYPE_CHECKING:
    from cpkit.settings import StepSettings
    from cpkit.simulate.result import ReplaySettings, Simulation
    from cpkit.sizing.cost.clock import PlannedClock

MAX_STEPS = 1 << 40

DESCRIPTION = """\
Replay a request trace through a continuous-batching scheduler. Every step is planned for every rank of one replica,
each on its own, and the plans are checked together: every token computed once, every key stored once, all ranks in
agreement, no budget exceeded.
"""

EPILOG = """\
examples:
  500 steps of the example trace on 8 ranks:
    cpkit simulate examples/data/conversation_excerpt.jsonl.gz -tp 4 -pcp 2 -dcp 8 --steps 500

  another world and chip, every tenth step checked, figures for a script on stdout:
    cpkit simulate trace.csv --model glm-5 -tp 8 -pcp 4 -dcp 32 --chip b200 --weights-gib 40 --check every:10 --json -

  durations from the cost model of a chip, each rank's time for Perfetto, and the report as a page:
    cpkit simulate trace.csv -tp 4 -pcp 2 -dcp 8 --cost h200 --timeline timeline.json --html report.html

The trace is told by its content, gzip or not: Mooncake or Bailian JSONL, Azure CSV, agentic sessions, ServeGen
clients, or CSV with arrived_at,num_prefill_tokens,num_decode_tokens.
exit codes: 0 all promises kept, 1 a promise was violated (the step is saved for `cpkit plan`), 2 bad usage or input,
130 interrupted (with a report of the steps so far).
"""


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `simulate` to the parser."""
    parser = commands.add_parser(
        "simulate", help="replay a trace and check every plan", description=DESCRIPTION, epilog=EPILOG
    )
    parser.set_defaults(run=run)
    parser.add_argument("trace", metavar="TRACE", help="a trace file")
    add_engine_flags(parser)
    _add_pool(parser)
    _add_replay(parser)
    _add_output(parser)


def _add_pool(parser: argparse.ArgumentParser) -> None:
    pool = parser.add_argument_group("KV pool")
    pool.add_argument(
        "--num-kv-blocks",
        type=whole_number,
        metavar="N",
        help="block ids of a rank, block 0 included (default: what fits)",
    )
    pool.add_argument("--chip", help="chip whose memory is filled (default: --cost's, else h200)")
    add_weights_gib(pool, "estimated, or half the chip where the ranks cannot hold the model")
    add_weight_bits(pool)
    pool.add_argument(
        "--gpu-memory-utilization",
        type=positive_number,
        default=0.9,
        metavar="SHARE",
        help="share of the memory for weights and KV (default: 0.9)",
    )


def _add_replay(parser: argparse.ArgumentParser) -> None:
    replay = parser.add_argument_group("replay")
    replay.add_argument(
        "--seed", type=whole_number, default=0, metavar="N", help="of sampling and draft acceptance (default: 0)"
    )
    replay.add_argument(
        "--steps", type=whole_number, metavar="N", help="stop after this many steps (default: the whole trace)"
    )
    replay.add_argument(
        "--check", type=check_every, default=1, metavar="all|none|every:K", help="steps to check (default: all)"
    )
    replay.add_argument("--strict", action="store_true", help="exit with 2 when a request is refused")
    replay.add_argument(
        "--skip-bad", action="store_true", help="count malformed lines instead of stopping at the first"
    )
    add_acceptance_rate(replay)
    replay.add_argument(
        "--cost",
        metavar="CHIP",
        help="take steps' durations from the cost model of this chip, and report waits, throughput and idle ranks",
    )
    replay.add_argument(
        "--engine",
        choices=tuple(ENGINES),
        help="--cost: whose layers are timed, cpkit's with its own kernels (default: the vendor's kernels alone)",
    )
    add_overlap(replay, "--cost: ")
    replay.add_argument(
        "--processes",
        type=whole_number,
        metavar="N",
        help=f"that plan and check; no figure but time depends on it (default: one a core, at most {MAX_DEFAULT})",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - prints them and nothing else")
    add_picture_flags(output)
    output.add_argument(
        "--save-violation",
        default="violation.json",
        metavar="FILE",
        help="where the first step that breaks a promise goes (default: %(default)s)",
    )


def check_every(text: str) -> int:
    """all -> 1, none -> 0, every:K -> K."""
    if text in ("all", "none"):
        return int(text == "all")
    word, _, every = text.partition(":")
    if word != "every" or not every.isdecimal() or int(every) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is none of all, none, every:K with K of at least 1")
    return int(every)


def run(args: argparse.Namespace) -> int:
    """Replay, report; returns the exit code."""
    from cpkit.cli.progress import ProgressLine
    from cpkit.report.simulate_report import simulate_report
    from cpkit.simulate.loop import simulate
    from cpkit.workload.traces import read_trace

    check_outputs(args.trace, json=args.json, timeline=args.timeline, html=args.html)
    check_folder(args.save_violation)  # most replays do not write it
    settings = read_settings(args)
    clock = read_clock(args, settings)
    pool = _pool(args, settings)
    replay = read_replay(args, settings, pool)
    trace = read_trace(args.trace, seed=args.seed, skip_bad=args.skip_bad)
    line = ProgressLine()
    with Pictures(args, clock, settings) as pictures:
        try:
            simulation = simulate(trace, settings, replay, clock=clock, on_step=pictures.add, on_progress=line.show)
        finally:
            line.clear()
    report, is_read = simulate_report(simulation, pool.source, pool.note), args.json != "-"
    if is_read:
        emit(report)  # before anything is written, which may fail
    pictures.write_page(simulation, report, pool.note)
    if args.json is not None:
        write_json(args.json, {**simulation.to_json(), **_pool_data(pool)})
    if is_read and (written := pictures.lines(simulation)):
        emit("\n".join(written))
    return _exit_code(args, settings, simulation)


def read_replay(args: argparse.Namespace, settings: "StepSettings", pool: PoolSize) -> "ReplaySettings":
    """The replay that the flags describe; raises ConfigError."""
    from cpkit.simulate.result import ReplaySettings

    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: it is not negative")
    if args.steps is not None and not 1 <= args.steps <= MAX_STEPS:
        raise ConfigError(f"--steps {args.steps}: it is from 1 to 2^40")
    return ReplaySettings(
        num_kv_blocks=pool.num_blocks,
        max_model_len=max_model_len(args, settings.model),
        seed=args.seed,
        acceptance_rate=args.acceptance_rate,
        max_steps=args.steps,
        check_every=args.check,
        processes=num_processes(args.processes),
    )


def read_clock(args: argparse.Namespace, settings: "StepSettings") -> "PlannedClock | None":
    """The clock of --cost; raises ConfigError."""
    if args.cost is None:
        if args.overlap or args.engine is not None:
            raise ConfigError("--engine and --overlap belong to --cost CHIP: name the chip")
        return None
    from cpkit.sizing.chips import chip
    from cpkit.sizing.cost.assumptions import Assumptions
    from cpkit.sizing.cost.clock import PlannedClock
    from cpkit.sizing.cost.model import CostModel

    weights = read_sized_model(args).weights()
    cost = CostModel(
        settings.model, weights, settings.topology, chip(args.cost), Assumptions(overlap=args.overlap), args.engine
    )
    return PlannedClock(cost, settings)


def _pool(args: argparse.Namespace, settings: "StepSettings") -> PoolSize:
    """KV blocks as given, or what fits beside the weights; raises ConfigError."""
    from cpkit.sizing.memory.weights import estimate_weights

    if args.num_kv_blocks is not None:
        if args.chip is not None or args.weights_gib is not None:
            raise ConfigError("--num-kv-blocks says how large the pool is: leave out --chip and --weights-gib")
        return PoolSize(args.num_kv_blocks, "from --num-kv-blocks")
    weights = given_weights(args)
    if weights is None:
        sized = read_sized_model(args)
        weights = estimate_weights(sized.config, settings.model, settings.topology, sized.weight_bits)
    return default_pool(
        settings,
        max_model_len=max_model_len(args, settings.model),
        chip=next(name for name in (args.chip, args.cost, "h200") if name is not None),
        weights=weights,
        utilization=args.gpu_memory_utilization,
    )


def _pool_data(pool: PoolSize) -> dict[str, Any]:
    """The pool for --json; memory: of a rank, as `cpkit doctor --json` has it."""
    return {
        "kv_pool_source": pool.source,
        "kv_pool_note": pool.note or None,
        "memory": None if pool.memory is None else pool.memory.to_json(),
    }


def _exit_code(args: argparse.Namespace, settings: "StepSettings", simulation: "Simulation") -> int:
    """Say on stderr what went wrong, worst first, save the broken step, and turn it into a number."""
    if simulation.broken:
        step = simulation.broken[0]
        path = Path(args.save_violation)
        for violation in step.violations:
            print(f"violation in step {step.index}: {violation}", file=sys.stderr)
        try:
            step.batch.save(path)
        except OSError as error:  # the step stays broken, and that is what the exit code says
            print(f"step {step.index} could not be saved as {path}: {error.strerror or error}", file=sys.stderr)
            return VIOLATED
        print(f"step {step.index} is saved as {path}; look at it with", file=sys.stderr)
        print(f"  cpkit plan {shlex.quote(str(path))} {engine_flags(args, settings)}", file=sys.stderr)
        return VIOLATED
    if not simulation.complete:
        return INTERRUPTED
    if args.strict and simulation.stats.num_refused:
        reasons = "; ".join(f"{number:,}: {reason}" for reason, number in simulation.stats.refused.items())
        refused = simulation.stats.num_refused
        verb = "request was" if refused == 1 else "requests were"
        raise InputError(f"--strict, and {refused:,} {verb} refused ({reasons})")
    return 0
