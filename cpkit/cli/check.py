"""`cpkit check`: do the ranks of a job agree, from what they left behind."""

import argparse
from typing import Any

from cpkit.cli.exit_codes import USAGE_ERROR, VIOLATED
from cpkit.cli.output import emit, write_json

DESCRIPTION = """\
Compare the ranks of a job and find the first place where they part: a call that one left out or made too many, another
operation, size, dtype or order, ranks that others wait for. Files are told apart by what they hold:

  logs of `cpkit record`, one a rank
  dumps of PyTorch's flight recorder, one a rank, pickled or JSON; their names end in the rank (nccl_trace_rank_7)
  plans of `cpkit plan --save`, made on different machines or from different batches
"""

EPILOG = """\
examples:
  cpkit record --out logs -- torchrun --nproc-per-node 2 train.py
  cpkit check logs

  cpkit check /tmp/nccl_trace_rank_*
  cpkit check node0/plan.npz node1/plan.npz --json

A pickle is read as plain data; one that asks for anything else is refused and nothing of it runs. What cannot be read
is named, and the rest is compared. exit codes: 0 all ranks agree, 1 they do not, 2 something could not be compared.
"""


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `check` to the parser."""
    parser = commands.add_parser(
        "check", help="find where the ranks of a job part", description=DESCRIPTION, epilog=EPILOG
    )
    parser.set_defaults(run=run)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders of files")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    """Compare and print; returns 0, VIOLATED if ranks do not agree, USAGE_ERROR if not all could be compared."""
    from cpkit.consistency.check import check, check_data
    from cpkit.report.check_report import check_report

    result = check(args.paths)
    if args.json:
        write_json("-", check_data(result))
    else:
        emit(check_report(result))
    if result.diverges:
        return VIOLATED
    return USAGE_ERROR if result.bad else 0
