"""`python -m cpkit` is the command `cpkit`."""

import sys

from cpkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
