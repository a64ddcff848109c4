"""Faults of one rank, planted in a program of three collectives over the world; rank 2 is the one that differs."""

import torch

CULPRIT = 2


def _gather(comm, what, rows=4, dtype=torch.float32, columns=()):
    return comm.all_gather(torch.zeros(rows, *columns, dtype=dtype), "world", what=what)


def other_op(comm, culprit):
    if culprit:
        comm.all_to_all(torch.zeros(4), "world", what="second")
    else:
        _gather(comm, "second")


def other_what(comm, culprit):
    _gather(comm, "hidden" if culprit else "second")


def other_dtype_of_equal_size(comm, culprit):
    _gather(comm, "second", dtype=torch.int32 if culprit else torch.float32)


def other_shape(comm, culprit):
    """B35, B37: one rank counts other rows than its peers."""
    _gather(comm, "second", rows=3 if culprit else 4)


def other_shape_of_equal_size(comm, culprit):
    if culprit:
        _gather(comm, "second", rows=2, columns=(2,))
    else:
        _gather(comm, "second")


def empty_on_one_rank(comm, culprit):
    _gather(comm, "second", rows=0 if culprit else 4)


def other_reduction(comm, culprit):
    comm.all_reduce(torch.zeros(4), "world", what="second", reduction="max" if culprit else "sum")


def skipped_collective(comm, culprit):
    """B01, B43: one rank finds that it has nothing to do and goes on."""
    if not culprit:
        _gather(comm, "second")


def barrier_for_data(comm, culprit):
    if culprit:
        comm.barrier("world")
    else:
        _gather(comm, "second")


# the fault, and the words for what differs
PLANTS = {
    other_op: "disagree about op in call 2",
    other_what: "disagree about what in call 2",
    other_dtype_of_equal_size: "disagree about dtype in call 2",
    other_shape: "disagree about shape in call 2",
    other_shape_of_equal_size: "disagree about shape in call 2",
    empty_on_one_rank: "disagree about shape in call 2",
    other_reduction: "disagree about reduction in call 2",
    skipped_collective: "disagree about what in call 2",
    barrier_for_data: "disagree about op, what, dtype, shape in call 2",
}


def planted(comm, plant):
    """first, the planted fault, third."""
    _gather(comm, "first")
    plant(comm, comm.rank == CULPRIT)
    _gather(comm, "third")
