"""One rank of a job whose last rank dies between two one-sided gathers; the others print the error that they get."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cpkit.comm.connect import make_comm
from cpkit.comm.key_gather import make_key_gather
from cpkit.errors import DesyncError
from multi_gpu_tests.worlds import one_dcp_group
from tests.comm.key_shards import DIM, workspace

LIMIT_S = 3


def main():
    comm = make_comm(one_dcp_group(int(os.environ["WORLD_SIZE"])), kind="torch", device="cuda", timeout_s=60)
    gather = make_key_gather(comm, "symmetric", dim=DIM, max_keys=100, backend="triton", timeout_s=LIMIT_S)
    cache, table, _ = workspace(comm, [70], 1, 0)
    gather.start(cache, table, interleave=1).wait()
    gather.check()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        gather.start(cache, table, interleave=1).wait()
        gather.check()
    except DesyncError as error:
        print(error, flush=True)
        # not sys.exit: closing the job would wait for the rank that died
        os._exit(0 if time.monotonic() - began < LIMIT_S + 5 else 3)
    os._exit(4)


if __name__ == "__main__":
    main()
