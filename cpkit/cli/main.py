"""The command `cpkit`: its parser, and how every ending becomes an exit code.

A reader that closes the pipe early (`cpkit plan ... | head -1`) ends the output quietly and changes no exit code.
"""

import argparse
import io
import sys
from collections.abc import Sequence

import cpkit
from cpkit.cli import check, doctor, draw, plan, record, run, simulate, sweep
from cpkit.cli.exit_codes import INTERRUPTED, USAGE_ERROR
from cpkit.cli.output import open_closed_streams, silence
from cpkit.cli.parser import Parser
from cpkit.errors import ConfigError, InputError, PlanError, print_error

EPILOG = """\
a first look:
  cpkit plan -tp 2 -pcp 2 -dcp 4 --seq-lens 10,9 --query-lens 1,7
  cpkit simulate examples/data/conversation_excerpt.jsonl.gz -tp 4 -pcp 2 -dcp 8 --steps 500
  cpkit run --prompt-lens 700,33,5,1 -tp 2 -pcp 2 -dcp 4 --heads 16 --verify all
  cpkit record --out logs -- torchrun --nproc-per-node 2 train.py && cpkit check logs
  cpkit doctor --model deepseek-v3.2 --engine vllm --chip h200 -tp 8 -dcp 8
  cpkit sweep examples/data/conversation_excerpt.jsonl.gz --requests 20 --gpus 8 --limit 4
  cpkit draw ownership -tp 2 -pcp 2 -dcp 4 --seq-lens 10,9 --query-lens 1,7 -o ownership.png

exit codes: 0 done, 1 a promise was violated, a run failed, an engine refuses or a sweep finds nothing to take,
2 bad usage or input, 130 interrupted
`cpkit COMMAND --help` explains every flag and its default.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name that the terminal's encoding lacks
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
        return 0
    except KeyboardInterrupt:
        print_error("cpkit: interrupted")
        return INTERRUPTED
    return code


def _run(argv: Sequence[str]) -> int:
    args: argparse.Namespace | None = None
    try:
        args = make_parser().parse_args(argv)
        code: int = args.run(args)
        return code
    except SystemExit as stop:  # argparse has printed its help or its error
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    except (ConfigError, PlanError, InputError) as error:
        reason = str(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = f"{error.filename or 'output'}: {error.strerror or error}"
    command = f"cpkit {args.command}" if args else "cpkit"
    print_error(f"{command}: error: {' '.join(reason.split())}")
    return USAGE_ERROR


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="cpkit",
        description="Plan, simulate, run and check context parallelism for sparse-attention inference.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"cpkit {cpkit.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    plan.add_command(commands)
    simulate.add_command(commands)
    run.add_command(commands)
    record.add_command(commands)
    check.add_command(commands)
    sweep.add_command(commands)
    doctor.add_command(commands)
    draw.add_command(commands)
    return parser
