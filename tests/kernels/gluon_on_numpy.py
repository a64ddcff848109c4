"""Functions of Gluon kernels on numpy arrays: the code itself, without a GPU and without its layouts.

on_numpy makes a module's kernel functions plain ones and its constants numbers, and puts numpy where Gluon was. A
pointer is an integer: the number of a memory times MEMORY, and a place in it. Inline PTX runs line by line, each
instruction on all elements at once, and atomic additions one element after another, in any order.
"""

import re
from types import SimpleNamespace

import numpy as np
from triton.experimental.gluon import language as gl

MEMORY = 1 << 40


class Tensor(np.ndarray):
    """An array with what kernels call on a tensor."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)

    def broadcast_to(self, shape):
        return np.broadcast_to(self, shape, subok=True)


def tensor(x):
    return np.asarray(x).view(Tensor)


def pointer(memory, at=0):
    return np.int64(memory * MEMORY + at)


def on_numpy(monkeypatch, modules, memories, rng):
    """memories: flat arrays, that pointers name by their order."""
    for module in modules:
        monkeypatch.setattr(module, "gl", _gluon(memories, rng))
        for name, value in list(vars(module).items()):
            if isinstance(value, gl.constexpr):
                monkeypatch.setattr(module, name, value.value)
            elif callable(getattr(value, "fn", None)):
                monkeypatch.setattr(module, name, value.fn)


def _gluon(memories, rng):
    def where(condition, x, y):
        of_ints = isinstance(x, int) and isinstance(y, int)
        return tensor(np.where(condition, np.int32(x), np.int32(y)) if of_ints else np.where(condition, x, y))

    def load(pointers, mask, other):
        memory = memories[np.min(pointers) // MEMORY]
        loaded = [memory[at % MEMORY] if wanted else other for at, wanted in zip(pointers, mask, strict=True)]
        return tensor(np.array(loaded, memory.dtype))

    def store(pointers, value, mask):
        pointers, value, mask = np.broadcast_arrays(pointers, value, mask)
        for at, x in zip(pointers[mask], value[mask], strict=True):
            memories[at // MEMORY][at % MEMORY] = x

    def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
        assert not is_pure and pack == 1 and len(constraints.split(",")) == len(args) + len(dtype)
        return _run_ptx(getattr(asm, "value", asm), np.broadcast_arrays(*args), len(dtype), memories, rng)

    return SimpleNamespace(
        where=where, load=load, store=store, inline_asm_elementwise=inline_asm_elementwise, int32=np.int32,
        int64=np.int64, uint32=np.uint32, float32=np.float32, minimum=np.minimum, maximum=np.maximum,
        expand_dims=lambda x, axis: tensor(np.expand_dims(x, axis)), min=np.min, SliceLayout=lambda dim, parent: None,
        arange=lambda start, stop, layout: tensor(np.arange(start, stop, dtype=np.int32)),
        full=lambda shape, value, dtype, layout: tensor(np.full(shape, value, dtype)),
    )  # fmt: skip


_INSTRUCTIONS = {
    "setp.ne.u32": lambda x, y: x != y,
    "or.pred": lambda p, q: p | q,
    "and.pred": lambda p, q: p & q,
    "selp.b64": lambda x, y, p: np.where(p, x, y),
}


def _run_ptx(asm, inputs, num_outputs, memories, rng):
    shape = inputs[0].shape
    regs = {f"${i}": np.full(shape, -99).ravel() for i in range(num_outputs)}  # what is never written
    regs |= {f"${num_outputs + i}": np.asarray(values).ravel() for i, values in enumerate(inputs)}
    for line in asm.strip("{}\n").splitlines():
        guard, op, args = re.fullmatch(r"(?:@(\w+) )?([\w.]+) (.*);", line).groups()
        if op == ".reg":
            continue
        to, *names = args.replace("[", "").replace("]", "").split(", ")
        values = [regs[name] if name in regs else np.full(regs["$0"].shape, int(name, 0)) for name in names]
        if op == "atom.global.gpu.relaxed.add.u32":
            for i in rng.permutation(np.flatnonzero(regs[guard])):
                memory, at = divmod(int(values[0][i]), MEMORY)
                regs[to][i] = memories[memory][at]
                memories[memory][at] += values[1][i]
        else:
            regs[to] = _INSTRUCTIONS[op](*values)
    return tuple(tensor(regs[f"${i}"].reshape(shape)) for i in range(num_outputs))
