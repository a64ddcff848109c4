"""`cpkit run` whose rank 2 raises before the second step: python -m tests.worker.failing ARGS."""

import sys

from cpkit.cli.main import main
from cpkit.comm.launcher import detect
from cpkit.consistency.guard import StepGuard

RIGHT = StepGuard.check


def fail(guard, step, plan):
    if detect().rank == 2 and step == 1:
        raise ValueError("planted")
    RIGHT(guard, step, plan)


if __name__ == "__main__":
    StepGuard.check = fail
    sys.exit(main(["run", *sys.argv[1:]]))
