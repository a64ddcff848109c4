"""Calls and files of ranks, made by hand."""

import json

from cpkit.consistency.history import Entered

A, B, C = ("all_reduce", "a.py:1"), ("broadcast", "a.py:2"), ("all_gather", "a.py:3")
LOOP = [A, B, C]


def entered(op, site, *, dtype="float32", size=4, root=-1, even=True, order=0):
    return Entered("0", order, (order, 0), op, (dtype,), ((size,),), (size,) if even else None, root, site)


def line(calls, **changes):
    """Entered calls from (op, site) pairs; changes: number of a call -> what is different about it."""
    changed = changes.get("changes", {})
    return [entered(op, site, order=i, **changed.get(i, {})) for i, (op, site) in enumerate(calls, 1)]


def log_text(rank, calls, *, world=2, run="r", ranks=(0, 1), end=True, name="0"):
    """A recorder's log of one group; calls: (op, site) or (op, site, fields that differ)."""
    lines = [{"format": "cpkit-record-1", "run": run, "rank": rank, "world": world}]
    lines.append({"group": 0, "name": name, "ranks": None if ranks is None else list(ranks)})
    for seq, (op, site, *rest) in enumerate(calls, 1):
        entry = {"group": 0, "seq": seq, "step": 0, "op": op, "dtypes": ["float32"], "shapes": [[4]], "site": site}
        lines.append({**entry, **(rest[0] if rest else {})})
    lines += [{"end": 1}] * end
    return "".join(json.dumps(one) + "\n" for one in lines)


def write_logs(folder, *calls_of_ranks, **options):
    """A log for each rank."""
    folder.mkdir(exist_ok=True)
    for rank, calls in enumerate(calls_of_ranks):
        world = len(calls_of_ranks)
        text = log_text(rank, calls, **{"world": world, "ranks": range(world), **options})
        (folder / f"rank{rank}.jsonl").write_text(text)
    return folder


def dump(calls, *, ranks=(0, 1), first=0, state="completed", group=("0", "default_pg")):
    """A flight-recorder dump; calls: (op, site, fields that differ...)."""
    entries = []
    for number, (op, site, *rest) in enumerate(calls, first):
        file, _, at = site.partition(":")
        torch_frame = {"name": op, "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 9}
        entry = {
            "frames": [torch_frame, {"name": "f", "filename": f"/home/x/{file}", "line": int(at)}],
            "record_id": number,
            "pg_id": 0,
            "process_group": group,
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "profiling_name": f"nccl:{op}",
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[4]],
            "output_dtypes": ["Float"],
            "state": state,
        }
        entries.append({**entry, **(rest[0] if rest else {})})
    config = {group[0]: {"name": group[0], "desc": group[1], "ranks": str(list(ranks))}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
