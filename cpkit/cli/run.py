"""`cpkit run`: steps executed by all ranks, simulated or launched, and verified."""

import argparse
import time
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cpkit.cli.exit_codes import VIOLATED
from cpkit.cli.options import add_engine_flags, check_model_len, read_settings
from cpkit.cli.output import check_folder, emit, write_json
from cpkit.cli.parser import int_list, positive_number, whole_number
from cpkit.comm.patience import TIMEOUT_S
from cpkit.errors import ConfigError, DesyncError, InputError, PlanError, print_error
from cpkit.layers import RUN_KINDS
from cpkit.model import Model
from cpkit.run.injection import KINDS, Injection
from cpkit.run.model import run_model

if TYPE_CHECKING:  # torch is an extra, and --help does without numpy
    from cpkit.activations.generate import Activations
    from cpkit.comm.launcher import Launch
    from cpkit.run.execute import RankReport, RunOptions
    from cpkit.run.steps import RunSteps
    from cpkit.settings import StepSettings

FORMAT = "cpkit-run-1"
COMMS = ("auto", "sim", "torch", "mpi")
GATHERS = ("collective", "symmetric")  # of comm/key_gather.py, which needs torch
FIRST_TELLS_S = 10.0
"""How long a refused rank leaves the word to the first rank of its machine, whose end ends it, too."""

DESCRIPTION = """\
Run steps of one layer on every rank of a replica and compare with an unsharded float64 oracle: selected keys, outputs,
LSE, and the order of hidden rows. The ranks are threads of this process, or those that torchrun or mpirun started; the
program is the same. After each layer the collectives that a rank issued are compared with its plan.
"""

EPILOG = """\
examples:
  4 simulated ranks, four prompts prefilled within the budget, then 4 decode steps, every row verified:
    cpkit run --prompt-lens 700,33,5,1 -tp 2 -pcp 2 -dcp 4 --heads 16 --verify all

  the same on 4 processes (gloo on CPUs; --device cuda: NCCL, a GPU each), and under MPI:
    torchrun --nproc-per-node 4 -m cpkit run --prompt-lens 700,33,5,1 -tp 2 -pcp 2 -dcp 4 --heads 16
    mpirun -n 4 python -m cpkit run --prompt-lens 700,33,5,1 -tp 2 -pcp 2 -dcp 4 --heads 16

  a V4 layer on the first 20 steps of a trace:
    cpkit run --trace trace.jsonl --steps 20 --model deepseek-v4-flash --layer c4a --block-size 256 -tp 2 -dcp 2 \\
        --cp-kv-cache-interleave-size 64 --heads 8

  what happens when a rank is given a batch without its last request:
    cpkit run --prompt-lens 700,33,5,1 -tp 2 -pcp 2 -dcp 4 --heads 16 --inject dropped-request@rank=2,step=1

kinds of --inject:
{kinds}

exit codes: 0 everything agrees, 1 a row differs (the first is told) or a rank failed, 2 bad usage or input
"""


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `run` to the parser."""
    epilog = EPILOG.format(kinds="\n".join(f"  {name:20}{meaning}" for name, meaning in KINDS.items()))
    parser = commands.add_parser(
        "run", help="run steps on all ranks and verify them", description=DESCRIPTION, epilog=epilog
    )
    parser.set_defaults(run=run)
    _add_steps(parser)
    add_engine_flags(parser)
    _add_program(parser)
    _add_agreement(parser)
    _add_verification(parser)
    parser.add_argument("--json", metavar="FILE", help="also write the report as JSON; - prints it and nothing else")


def _add_steps(parser: argparse.ArgumentParser) -> None:
    steps = parser.add_argument_group("the steps: a batch file, prompts, or a trace")
    steps.add_argument(
        "batch", nargs="?", metavar="BATCH.json", help="one step; what it computed before is in the caches already"
    )
    steps.add_argument("--prompt-lens", type=int_list, metavar="N,N,..", help="prompts that arrive together")
    steps.add_argument(
        "--decode-steps",
        type=whole_number,
        metavar="N",
        help="output tokens of each prompt behind its first (default: 4)",
    )
    steps.add_argument("--trace", metavar="TRACE", help="a trace file, as for `cpkit simulate`")
    steps.add_argument("--steps", type=whole_number, metavar="N", help="stop after this many (default: 10 of a trace)")
    steps.add_argument(
        "--num-kv-blocks",
        type=whole_number,
        metavar="N",
        help="block ids of a trace's pool (default: room for its 4 longest requests)",
    )


def _add_program(parser: argparse.ArgumentParser) -> None:
    program = parser.add_argument_group("the program")
    program.add_argument(
        "--layer",
        choices=RUN_KINDS,
        help="kind of layer: dsa attends keys that its indexer picks, c4a and c128a keys of 4 and of 128 tokens, swa a "
        "window (default: the model's first of these)",
    )
    program.add_argument(
        "--heads",
        type=whole_number,
        metavar="N",
        help="attention heads, and at most as many index heads (default: the model's)",
    )
    program.add_argument(
        "--comm", choices=COMMS, default="auto", help="how ranks communicate (default: by who started this process)"
    )
    program.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    program.add_argument(
        "--backend",
        choices=("auto", "torch", "triton"),
        default="auto",
        help="kernels of metadata and indexer (default: triton on GPUs, torch on CPUs); sizes that triton's do not "
        "take are refused, and on a CPU it runs under TRITON_INTERPRET=1 alone",
    )
    program.add_argument(
        "--gather",
        choices=GATHERS,
        default="collective",
        help="how index keys of all shards are gathered: by an all-gather, or out of the other GPUs' memory "
        "(default: %(default)s)",
    )
    program.add_argument(
        "--timeout",
        type=positive_number,
        default=TIMEOUT_S,
        metavar="S",
        help="seconds that a rank waits for others (default: %(default)g)",
    )


def _add_agreement(parser: argparse.ArgumentParser) -> None:
    agreement = parser.add_argument_group("agreement of the ranks")
    agreement.add_argument(
        "--guard",
        default="every",
        metavar="every|sample:K|off",
        help="steps before which ranks compare digests of their plans (default: %(default)s)",
    )
    agreement.add_argument(
        "--inject",
        metavar="KIND@rank=R,step=S",
        help="let one rank do something else at one step; the kinds are listed below. stopped also takes ,seconds=T",
    )


def _add_verification(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data and verification")
    data.add_argument(
        "--data",
        choices=("exact", "random"),
        default="exact",
        help="exact: no sum of it rounds, so selections are compared to the bit (default: %(default)s)",
    )
    data.add_argument(
        "--activations",
        metavar="FILE",
        help="read activations by request from .npz or .safetensors instead, "
        "named as help('cpkit.activations.files') says in python",
    )
    data.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of data and samples (default: 0)")
    data.add_argument(
        "--verify", choices=("all", "sample", "none"), default="sample", help="rows to verify (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run, verify, report on rank 0; returns the exit code."""
    from cpkit.comm.launcher import detect

    launch = detect()
    try:
        settings, steps, activations, options = _prepare(args, launch)
    except (ConfigError, PlanError, InputError) as refused:
        if launch.local_rank:  # the first of its machine is refused with it, if they were started alike; else it tells
            time.sleep(FIRST_TELLS_S)
        if launch.rank:
            raise type(refused)(f"rank {launch.rank}: {refused}") from refused
        raise
    return _execute(args, launch, settings, steps, activations, options)


def _prepare(args: argparse.Namespace, launch: "Launch") -> "tuple[StepSettings, RunSteps, Activations, RunOptions]":
    """Everything that can be refused before ranks meet."""
    from cpkit.comm.connect import check_launch, choose

    if args.json not in (None, "-"):
        check_folder(args.json)

    def reduce(model: Model) -> Model:
        return run_model(model, args.layer, args.heads)

    settings = read_settings(args, reduce)
    check_launch(args.comm, launch, settings.topology)  # from here on there is torch
    from cpkit.run.execute import RunOptions
    from cpkit.run.inject import check_injection
    from cpkit.run.room import rank_room

    kind = choose(args.comm, launch)
    inject = None if args.inject is None else Injection.parse(args.inject)
    options = RunOptions(
        kind,
        args.device,
        args.verify,
        args.seed,
        args.timeout,
        args.backend,
        guard=args.guard,
        inject=inject,
        gather=args.gather,
    )
    steps = _read_steps(args, settings, rank_room(args.device, settings.topology.world_size if kind == "sim" else 1))
    if settings.topology.pcp == 1 or any(batch.num_decodes for batch in steps.batches):
        settings.model.check_merge(settings.topology)
    if inject is not None:
        check_injection(inject, steps, settings)
    return settings, steps, _read_activations(args), options


def _read_steps(args: argparse.Namespace, settings: "StepSettings", room: int) -> "RunSteps":
    from cpkit.batch import Batch
    from cpkit.run.steps import batch_steps, named_by_request, prompt_steps, trace_steps
    from cpkit.workload.traces import read_trace

    given = [name for name in ("batch", "prompt_lens", "trace") if getattr(args, name) is not None]
    if len(given) != 1:
        raise InputError("give one of a batch file, --prompt-lens and --trace: they are the steps to run")
    if args.decode_steps is not None and args.prompt_lens is None:
        raise InputError("--decode-steps follows the prompts of --prompt-lens; a batch file or a trace has its own")
    if args.steps is not None and (args.steps < 1 or args.trace is None):
        raise InputError(f"--steps {args.steps}: at least 1, of a --trace")
    if args.num_kv_blocks is not None and args.trace is None:
        raise InputError(f"--num-kv-blocks {args.num_kv_blocks}: the pool of a --trace; other steps get what they need")
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: it is not negative")
    if args.trace is not None and args.activations is not None:
        raise InputError("--activations hold values by request, and requests of a trace share prefixes: generate them")
    if args.batch is not None:
        batch = Batch.load(args.batch)
        check_model_len(batch, args.max_model_len)
        steps = batch_steps(batch, settings, args.batch, room=room)
        return steps if args.activations is None else named_by_request(steps)
    if args.prompt_lens is not None:
        num_decodes = 4 if args.decode_steps is None else args.decode_steps
        return prompt_steps(args.prompt_lens, num_decodes, settings, args.seed, args.max_model_len, room=room)
    trace = read_trace(args.trace, seed=args.seed)
    most = 10 if args.steps is None else args.steps
    return trace_steps(
        trace,
        settings,
        num_blocks=args.num_kv_blocks,
        max_steps=most,
        seed=args.seed,
        max_model_len=args.max_model_len,
        room=room,
    )


def _read_activations(args: argparse.Namespace) -> "Activations":
    from cpkit.activations.files import load_activations
    from cpkit.activations.generate import Generated

    if args.activations is not None:
        return load_activations(args.activations)
    return Generated(args.seed, args.data)


def _execute(
    args: argparse.Namespace,
    launch: "Launch",
    settings: "StepSettings",
    steps: "RunSteps",
    activations: "Activations",
    options: "RunOptions",
) -> int:
    from cpkit.run.execute import execute

    try:
        rank, reports = execute(steps, settings, activations, options)
    except (ConfigError, PlanError, InputError) as refused:
        raise type(refused)(_of_rank(refused, launch)) from refused
    except DesyncError as error:
        print_error(f"cpkit run: error: {error}")
        return VIOLATED
    except Exception as error:
        print_error(f"cpkit run: error: {_of_rank(error, launch).splitlines()[0]}")
        traceback.print_exc()
        return VIOLATED
    first = next((report.findings.first for report in reports if report.findings.first), None)
    if rank == 0:
        _report(args, options.comm, settings, steps, reports)
        if first is not None:
            print_error(f"cpkit run: mismatch in {first}")
    return 0 if first is None else VIOLATED


def _of_rank(error: Exception, launch: "Launch") -> str:
    """The error and the rank that raised it, which simulated ranks say in a note."""
    notes = getattr(error, "__notes__", None)
    if notes:
        return str(notes[0].rpartition("\n")[0])
    if launch.world_size == 1 and isinstance(error, ConfigError | PlanError | InputError):
        return str(error)  # refused before there were ranks
    return f"rank {launch.rank} raised {type(error).__name__}: {error}"


def _report(
    args: argparse.Namespace, kind: str, settings: "StepSettings", steps: "RunSteps", reports: "list[RankReport]"
) -> None:
    from cpkit.report.run_report import run_report, total_findings

    where = {"sim": "ranks are threads of one process", "torch": "torch.distributed", "mpi": "MPI"}[kind]
    data = f"{args.data}, seed {args.seed}" if args.activations is None else args.activations
    if args.json is not None:
        content = {
            "format": FORMAT,
            "model": settings.model.name,
            "layers": [layer.kind for layer in settings.model.layers],
            "num_heads": settings.model.num_heads,
            "topology": asdict(settings.topology),
            "partition": settings.partition,
            "merge": settings.merge,
            "comm": kind,
            "device": args.device,
            "backend": reports[0].backend,
            "data": data,
            "verify": args.verify,
            "steps": len(steps.batches),
            "tokens": sum(batch.num_tokens for batch in steps.batches),
            "findings": asdict(total_findings(reports)),
            "ranks": [asdict(report) for report in reports],
        }
        write_json(args.json, content)
    if args.json != "-":
        emit(run_report(steps, settings, reports, f"{where}, on {args.device}", data, args.verify))
