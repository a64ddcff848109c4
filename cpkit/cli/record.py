"""`cpkit record`: run a program, and log every collective that its processes enter."""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from cpkit.errors import InputError

DESCRIPTION = """\
Run a command with every torch.distributed collective of its processes logged, one file a process, before the call can
block. The program need not know cpkit. A process that is killed leaves its log up to its last call.
"""

EPILOG = """\
examples:
  cpkit record --out logs -- torchrun --nproc-per-node 2 train.py
  cpkit check logs

A folder may hold several runs: each is compared on its own. The processes must be Python's, started without -I, -E or
-S. Not seen: collectives that C++ enters alone (DDP's buckets, functional collectives) and those of other libraries
(NCCL called without torch.distributed, MPI).
The exit code is the command's own.
"""


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `record` to the parser."""
    parser = commands.add_parser(
        "record", help="log the collectives of any torch program", description=DESCRIPTION, epilog=EPILOG
    )
    parser.usage = "cpkit record [-h] [--out DIR] -- COMMAND [ARGUMENT ...]"  # argparse would repeat the --
    parser.set_defaults(run=run)
    parser.add_argument("--out", default="cpkit-record", metavar="DIR", help="where logs go (default: cpkit-record)")
    parser.add_argument("program", nargs="+", metavar="-- COMMAND", help="the command and its arguments, behind --")


def run(args: argparse.Namespace) -> int:
    """Become the command; returns only by InputError."""
    from cpkit.consistency.recorder import FOLDER_VARIABLE, RUN_VARIABLE

    program = shutil.which(args.program[0])
    if program is None:
        raise InputError(f"{args.program[0]}: there is no such command")
    folder = Path(args.out).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror or error}") from error
    hook = str(Path(__file__).parents[1] / "consistency" / "hook")
    behind = os.environ.get("PYTHONPATH")
    env = {
        **os.environ,
        "PYTHONPATH": f"{hook}{os.pathsep}{behind}" if behind else hook,
        FOLDER_VARIABLE: str(folder),
        RUN_VARIABLE: os.urandom(4).hex(),
    }
    print(f"cpkit record: logs go to {args.out}; compare them by: cpkit check {args.out}", file=sys.stderr, flush=True)
    os.execve(program, args.program, env)
