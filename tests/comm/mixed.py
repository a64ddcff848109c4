"""One program of mixed collectives, the same for every comm, and the worlds of four ranks that it runs in."""

import torch

from cpkit.topology import GROUPS, Topology

WORLDS = {
    "tp4-dcp4": Topology(tp=4, dcp=4),
    "tp2-pcp2-dcp4": Topology(tp=2, pcp=2, dcp=4),  # group order 0, 2, 1, 3
    "pcp4-dcp4": Topology(pcp=4, dcp=4),
    "pp2-tp2-dcp2": Topology(pp=2, tp=2, dcp=2),
    "dp2-pcp2": Topology(dp=2, pcp=2),
}

# (operation, dtype, rows for each rank of the group, columns); 0 rows or columns: an empty tensor
CASES = [
    ("all_gather", torch.bfloat16, 3, (2, 5)),
    ("all_gather", torch.int64, 1, ()),
    ("all_gather", torch.uint8, 0, (7,)),
    ("all_gather", torch.bool, 2, (3,)),
    ("all_gather", torch.float8_e4m3fn, 1, (3,)),
    ("all_to_all", torch.float16, 2, (3,)),
    ("all_to_all", torch.int16, 1, ()),
    ("all_to_all", torch.int32, 2, (0, 4)),
    ("reduce_scatter", torch.float32, 5, (3,)),
    ("reduce_scatter", torch.bfloat16, 1, (9,)),
    ("reduce_scatter", torch.int64, 0, ()),
    ("all_reduce sum", torch.float32, 1, (33,)),
    ("all_reduce sum", torch.int32, 1, (2,)),
    ("all_reduce min", torch.float64, 2, (2,)),
    ("all_reduce max", torch.bfloat16, 1, (4,)),
]


def random_tensor(seed, dtype, shape):
    """Values whose float sums depend on the order of adding; the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        scale = 10.0 ** torch.randint(-3, 3, shape, generator=generator)
        return (torch.randn(shape, generator=generator) * scale).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def mixed(comm):
    """Every case over every group -> {(group, case): result}; inputs are overwritten as soon as a call returns."""
    results = {}
    for name in GROUPS:
        comm.barrier(name)
        for case, (op, dtype, rows, columns) in enumerate(CASES):
            op, *reduction = op.split()
            whole = op in ("all_to_all", "reduce_scatter")
            shape = (rows * comm.group(name).size if whole else rows, *columns)
            tensor = random_tensor(1000 * comm.rank + case, dtype, shape).to(comm.device)
            options = {"reduction": reduction[0]} if reduction else {}
            results[name, case] = getattr(comm, op)(tensor, name, what=f"case_{case}", **options).cpu()
            tensor.zero_()
    return results


def whole_numbers(comm):
    """Every operation over every group, on numbers that tell where they came from."""
    results = []
    for name in GROUPS:
        whole = 100 * comm.rank + torch.arange(3 * comm.group(name).size)
        for op in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce"):
            results.append(getattr(comm, op)(whole.to(comm.device), name, what="numbers").tolist())
    return results


def without_sites(issued):
    """A ledger's entries as tuples, the lines of the program aside."""
    return [(one.op, one.group, one.what, one.dtype, one.elements, one.bytes) for one in issued]
