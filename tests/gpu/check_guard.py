"""Ranks that disagree over NCCL: every kind of fault, a rank that sleeps, and what the guard and the watch cost.

python tests/gpu/check_guard.py        needs two GPUs; prints what jobs of two ranks said, in 3 minutes

It exits 0 if every fault was told and every job ended within its limit.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
STEPS = "-m cpkit run -pcp 2 -dcp 2 --heads 16 --backend torch --verify all --prompt-lens 900,70,5 --decode-steps 12"
DEVICE = os.environ.get("CHECK_DEVICE", "cuda")
IN_ONE_JOB = [
    "stale-seq-len",
    "dropped-request",
    "extra-request",
    "reordered-requests",
    "other-interleave",
    "other-block-size",
    "other-partition",
    "other-budget",
    "early-return",
    "stopped",
]
ENDING = [("skipped-collective", "every"), ("wrong-dtype", "every"), ("killed", "every"), ("skipped-collective", "off")]


class Job:
    """A launched job, whose processes end with it."""

    def __init__(self, name, argv, limit_s, folder):
        self.name, self.deadline = name, time.monotonic() + limit_s
        self.out = (folder / f"{name}.log").open("w+")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.start = time.time()
        self.process = subprocess.Popen(
            [*LAUNCH.split(), *argv],
            cwd=ROOT,
            env=env,
            stdout=self.out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def poll(self):
        """Whether it is over; a job at its limit is ended."""
        self.status = self.process.poll()
        if self.status is None and time.monotonic() < self.deadline:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.seconds = time.time() - self.start
        self.out.seek(0)
        self.text = self.out.read()
        return True

    def ended(self, began):
        """Seconds from the moment in a file to the end of the job."""
        return self.start + self.seconds - float(began.read_text())


def over(jobs):
    """Jobs in the order in which they end."""
    running = list(jobs)
    while running:
        for job in [job for job in running if job.poll()]:
            running.remove(job)
            yield job
        time.sleep(0.05)


def told(text, words=("DesyncError", "rank ", "guard of", "planned", "not at the same")):
    """The first lines that say what happened."""
    lines = [line for line in text.splitlines() if any(word in line for word in words) and "torch/" not in line]
    return " | ".join(line.strip()[:230] for line in lines[:3])


def main():
    good = True
    folder = Path(tempfile.mkdtemp())
    injected = ["-m", "tests.run.injected", str(folder), "2", DEVICE]
    tests = ["-m", "pytest", "-q", "-x", "--durations", "4", "-o", "faulthandler_timeout=60", "multi_gpu_tests"]
    jobs = [
        Job("multi_gpu_tests", tests, 105, folder),
        Job("kinds", [*injected, *(f"{kind}.every" for kind in IN_ONE_JOB)], 80, folder),
        Job("sleeping", [__file__, "sleeping"], 80, folder),
        Job("guarded", [*STEPS.split(), "--device", DEVICE], 60, folder),
        *[Job(f"{kind}.{guard}", [*injected, f"{kind}.{guard}"], 80, folder) for kind, guard in ENDING],
    ]
    for job in over(jobs):
        began = folder / f"{job.name}.began"
        ended = f", {job.ended(began):.1f} s after the fault" if began.exists() else ""
        status = "KILLED" if job.status is None else job.status
        print(f"== {job.name}: {status} in {job.seconds:.0f} s{ended}", flush=True)
        print("   ", told(job.text) if job.name != "multi_gpu_tests" else job.text[-1500:], flush=True)
        print_ranks(folder, job.name)
        good &= job.status is not None
        if job.name == "kinds":
            good &= print_kinds(folder)
    [job] = over([Job("cost", [__file__, "cost"], 40, folder)])
    print(f"== cost: {job.status} in {job.seconds:.0f} s\n{job.text[-1500:]}", flush=True)
    sys.exit(not good or job.status != 0)


def print_ranks(folder, name):
    """What ranks of a job of one kind said, and when, as far as they lived to tell."""
    for path in sorted(folder.glob(f"{name}.[0-9]")):
        rank, began = json.loads(path.read_text()), float((folder / f"{name}.began").read_text())
        print(f"    rank {path.suffix[1:]}, {rank['at'] - began:.2f} s: {rank['text'][:230]!r}", flush=True)


def print_kinds(folder):
    """Of each kind in the one job: seconds to detection, and the text of all ranks."""
    good = True
    for kind in IN_ONE_JOB:
        said = [folder / f"{kind}.every.{rank}" for rank in range(2)]
        if not all(path.exists() for path in said):
            print(f"    {kind}: NOT TOLD")
            good = False
            continue
        ranks = [json.loads(path.read_text()) for path in said]
        began = float((folder / f"{kind}.every.began").read_text())
        seconds = [round(rank["at"] - began, 2) for rank in ranks]
        same = len({rank["text"] for rank in ranks}) == 1 and ranks[0]["text"]
        print(f"    {kind}: {seconds} s, {'same' if same else 'DIFFERENT'}: {ranks[0]['text'][:200]!r}", flush=True)
        good &= bool(same)
    return good


def sleeping():
    """Without a guard, rank 1 does not come to a gather whose result rank 0 reads."""
    import torch

    from cpkit.comm.connect import make_comm
    from cpkit.topology import Topology

    with make_comm(Topology(tp=2, dcp=2), device=DEVICE, timeout_s=10) as comm:
        comm.barrier("world")
        start = time.time()
        if comm.rank == 1:
            time.sleep(60)
        print(comm.all_gather(torch.zeros(4, device=comm.device), "dcp", what="x").tolist(), time.time() - start)


def cost():
    """Microseconds of a small gather with and without the watch, and of the guard of a step, waiting or begun early."""
    import torch

    from cpkit.comm.connect import make_comm
    from cpkit.consistency.guard import StepGuard
    from tests.worker.worlds import Case

    case = Case("dsa", 1, {"pcp": 2, "dcp": 2}, prompts=(30, 5, 9), decodes=2)
    with make_comm(case.settings.topology, device=DEVICE, timeout_s=30) as comm:
        x = torch.zeros(1024, device=comm.device)
        sync = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None

        def gathers():
            for _ in range(200):
                comm.all_gather(x, "dcp", what="x")
            sync()

        watch = getattr(comm, "_watch", None)
        for name in ("watched", "unwatched", "watched", "unwatched"):
            if name == "unwatched" and watch is not None:
                watch.enter, watch.leave = lambda *_: None, lambda: None
            elif watch is not None:
                watch.__dict__.pop("enter", None), watch.__dict__.pop("leave", None)
            gathers()
            start = time.perf_counter()
            gathers()
            if comm.rank == 0:
                print(f"gather of 4 KiB, {name}: {(time.perf_counter() - start) / 200 * 1e6:.1f} us", flush=True)
        guard = StepGuard(comm, limit_s=20)
        plan = case.settings.plan(case.steps.batches[0], comm.rank)
        a = torch.zeros(4096, 4096, device=comm.device)
        times = {"digests": [], "check": [], "start": [], "wait behind work": []}
        for step in range(300):
            t = [time.perf_counter()]
            plan.digests()
            t.append(time.perf_counter())
            guard.check(2 * step, plan)
            comm.ledger.expect(None)
            t.append(time.perf_counter())
            guard.start(2 * step + 1, plan)
            t.append(time.perf_counter())
            if DEVICE == "cuda":
                a @ a
                sync()
            t.append(time.perf_counter())
            guard.wait()
            comm.ledger.expect(None)
            t.append(time.perf_counter())
            for name, i in (("digests", 0), ("check", 1), ("start", 2), ("wait behind work", 4)):
                times[name].append(t[i + 1] - t[i])
        if comm.rank == 0:
            for name, values in times.items():
                values.sort()
                print(f"guard, {name}: {values[len(values) // 2] * 1e6:.0f} us", flush=True)


if __name__ == "__main__":
    {"sleeping": sleeping, "cost": cost}[sys.argv[1]]() if len(sys.argv) > 1 else main()
