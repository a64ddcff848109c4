"""`cpkit run` whose rank 2 alone is given a batch file that is not there: python -m tests.worker.refused ARGS."""

import sys

from cpkit.cli.main import main
from cpkit.comm.launcher import detect

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:], *(["no/such.json"] if detect().rank == 2 else [])]))
