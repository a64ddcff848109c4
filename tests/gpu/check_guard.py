"""Ranks that disagree over NCCL: every kind of fault, a rank that sleeps, and steps under the guard.

python tests/gpu/check_guard.py        needs two GPUs; prints what jobs of two ranks said, in a minute and a half

It exits 0 if every fault was told and every job ended within its limit, and writes when and what the ranks told to
benchmarks/results/injected_nccl.json.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
STEPS = "-m cpkit run -pcp 2 -dcp 2 --heads 16 --backend torch --verify all --prompt-lens 900,70,5 --decode-steps 12"
DEVICE = os.environ.get("CHECK_DEVICE", "cuda")
RESULT = ROOT / "benchmarks" / "results" / "injected_nccl.json"
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
    jobs = [
        Job("kinds", [*injected, *(f"{kind}.every" for kind in IN_ONE_JOB)], 80, folder),
        Job("sleeping", [__file__, "sleeping"], 80, folder),
        Job("guarded", [*STEPS.split(), "--device", DEVICE], 60, folder),
        *[Job(f"{kind}.{guard}", [*injected, f"{kind}.{guard}"], 80, folder) for kind, guard in ENDING],
    ]
    found = {}
    for job in over(jobs):
        began = folder / f"{job.name}.began"
        ended = f", {job.ended(began):.1f} s after the fault" if began.exists() else ""
        status = "KILLED" if job.status is None else job.status
        print(f"== {job.name}: {status} in {job.seconds:.0f} s{ended}", flush=True)
        print("   ", told(job.text), flush=True)
        print_ranks(folder, job.name)
        found[job.name] = {"status": job.status, "seconds": round(job.seconds, 1), "said": told(job.text)}
        if began.exists():
            found[job.name] |= {"ended_after_s": round(job.ended(began), 2), "ranks": said_by(folder, job.name)}
        good &= job.status is not None
        if job.name == "kinds":
            good &= print_kinds(folder)
    kinds = {kind: said_by(folder, f"{kind}.every") for kind in IN_ONE_JOB}
    write(kinds, found)
    sys.exit(not good)


def said_by(folder, name):
    """Of each rank that lived to tell: seconds from the fault, and its text."""
    ranks = {}
    for path in sorted(folder.glob(f"{name}.[0-9]")):
        rank, began = json.loads(path.read_text()), float((folder / f"{name}.began").read_text())
        ranks[path.suffix[1:]] = {"seconds": round(rank["at"] - began, 2), "text": rank["text"]}
    return ranks


def write(kinds, jobs):
    """The result, where it is of GPUs."""
    if DEVICE != "cuda":
        return
    import torch

    out = {"date": date.today().isoformat(), "chip": torch.cuda.get_device_name(), "torch": torch.__version__}
    RESULT.write_text(json.dumps({**out, "kinds": kinds, "jobs": jobs}, indent=1) + "\n", encoding="utf-8")


def print_ranks(folder, name):
    """What ranks of a job of one kind said, and when, as far as they lived to tell."""
    for rank, one in said_by(folder, name).items():
        print(f"    rank {rank}, {one['seconds']:.2f} s: {one['text'][:230]!r}", flush=True)


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


if __name__ == "__main__":
    sleeping() if sys.argv[1:] == ["sleeping"] else main()
