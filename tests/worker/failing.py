"""`cpkit run` whose rank 2 raises before the second step: python -m tests.worker.failing ARGS."""

import sys

from cpkit.cli.main import main
from cpkit.comm.launcher import detect
from cpkit.run import execute

RIGHT = execute.check_plans_agree
steps = iter(range(100))


def fail(comm, plan):
    if detect().rank == 2 and next(steps) == 1:
        raise ValueError("planted")
    RIGHT(comm, plan)


if __name__ == "__main__":
    execute.check_plans_agree = fail
    sys.exit(main(["run", *sys.argv[1:]]))
