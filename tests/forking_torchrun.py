"""torchrun whose ranks are forked from it: python -m tests.forking_torchrun, and what torchrun takes, with -m MODULE.

An import of torch takes seconds of each process: here one process imports it and MODULE, not each rank. All else is
torchrun's own: agent, store, environment, and what is done when a rank ends.
"""

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler


class Forked:
    """What torchrun uses of a Popen: pid, poll and wait."""

    def __init__(self, args, env, **streams_and_session):
        assert streams_and_session == {"stdout": None, "stderr": None, "start_new_session": True}
        argv = args[args.index("-m") + 1 :]
        self._process = multiprocessing.get_context("fork").Process(target=be_a_rank, args=(argv, env))
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self._process.exitcode


def be_a_rank(argv, env):
    os.setsid()
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # those that torchrun handles
        signal.signal(one, signal.SIG_DFL)
    os.environ.update(env)
    sys.argv[1:] = argv[1:]
    sys.modules.pop(argv[0])  # the module is to run as a program; what it imports is there
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    args = run.parse_args(sys.argv[1:])
    importlib.import_module(args.training_script)
    subprocess_handler.Popen = Forked
    run.main(sys.argv[1:])
