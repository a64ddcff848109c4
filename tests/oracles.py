"""Slow truths: tokens are dealt out one by one, like cards. Nothing here imports the code under test."""

import itertools


def deal(length, ranks, interleave):
    """Positions 0..length-1 dealt to the ranks in turns of `interleave`: one list of positions a rank."""
    held = [[] for _ in range(ranks)]
    turns = itertools.cycle(held)
    for start in range(0, length, interleave):
        next(turns).extend(range(length)[start : start + interleave])
    return held


def block_slot(block_table, index, block_size):
    """Slot of the index-th entry of one request on one rank, counting through its blocks."""
    return block_table[index // block_size] * block_size + index % block_size


def token_slots(seq_lens, query_lens, block_tables, block_size, ranks, interleave):
    """Per rank, the slot of every query token, -1 where another rank holds it."""
    slots = [[] for _ in range(ranks)]
    for seq_len, query_len, table in zip(seq_lens, query_lens, block_tables, strict=True):
        held = deal(seq_len, ranks, interleave)
        for pos in range(seq_len - query_len, seq_len):
            for rank in range(ranks):
                if pos in held[rank]:
                    slots[rank].append(block_slot(table, held[rank].index(pos), block_size))
                else:
                    slots[rank].append(-1)
    return slots


def state_slots(seq_lens, query_lens, block_tables, *, ratio, states_per_block, ranks, interleave, written=None):
    """Per rank, the slot of the state that each query token completes, -1 for none: the states are appended in turn."""
    total = sum(query_lens)
    slots = [[-1] * total for _ in range(ranks)]
    token = 0
    for seq_len, query_len, table in zip(seq_lens, query_lens, block_tables, strict=True):
        held = deal(seq_len, ranks, interleave)
        num_states = [0] * ranks
        for pos in range(seq_len):
            owner = next(rank for rank in range(ranks) if pos in held[rank])
            in_step = pos >= seq_len - query_len
            if pos % ratio == ratio - 1:
                if in_step and (written is None or written[token]):
                    slots[owner][token] = block_slot(table, num_states[owner], states_per_block)
                num_states[owner] += 1
            token += in_step
    return slots


def window_positions(pos, window_size, first=0):
    """Positions that a sliding window over `window_size` keys shows the token at `pos`, found by looking at each."""
    return [key for key in range(pos + 1) if pos - key < window_size and key >= first]


def visible_keys(held, pos, ratio):
    """How many of a rank's keys (states, in its own order) the token at `pos` may score: those complete at `pos`."""
    return sum((state + 1) * ratio <= pos + 1 for state in held)


def decode_lens(seq_lens, query_lens):
    """Context of each query token: append the step's tokens one by one and count what is there."""
    lens = []
    for seq_len, query_len in zip(seq_lens, query_lens, strict=True):
        context = list(range(max(seq_len - query_len, 0)))
        row = []
        for token in range(query_len):
            if seq_len - query_len + token >= 0:
                context.append("query")
            row.append(len(context))
        lens.append(row)
    return lens
