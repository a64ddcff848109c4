"""Slow truths for partition, chunks and gathers: cards dealt, lists sliced, keys placed one by one.

Nothing here imports the code under test.
"""

from tests.oracles import deal


def pieces_by_ceil(tokens, num_pieces):
    """Slices of ceil(n / num_pieces) tokens; the last may be short or empty."""
    size = -(-len(tokens) // num_pieces)
    return [tokens[i * size : (i + 1) * size] for i in range(num_pieces)]


def pieces_by_dealing(tokens, num_pieces):
    """Slices as even as can be: one token is added to each piece in turn until none is left."""
    sizes = [0] * num_pieces
    for i in range(len(tokens)):
        sizes[i % num_pieces] += 1
    rest = list(tokens)
    pieces = []
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    return pieces


def pieces_of_ranks(tokens, ranks, strategy):
    """Per rank, its pieces of one prefill (round_robin: dealt as if it were the only one)."""
    if strategy == "contiguous":
        return [[piece] for piece in pieces_by_ceil(tokens, ranks)]
    if strategy == "round_robin":
        return [[tokens[rank::ranks]] for rank in range(ranks)]
    cut = pieces_by_ceil if strategy == "head_tail" else pieces_by_dealing
    pieces = cut(tokens, 2 * ranks)
    return [[pieces[rank], pieces[2 * ranks - 1 - rank]] for rank in range(ranks)]


def partition(query_lens, is_prefilling, *, ranks, dcp, strategy, shard_decodes):
    """Per rank, its rows [(request, query tokens, writes KV), ...]: decodes, then prefills, by request and start."""
    hands = [[] for _ in range(ranks)]
    decodes = [i for i, prefilling in enumerate(is_prefilling) if not prefilling and query_lens[i]]
    for turn, req in enumerate(decodes):
        for rank in range(ranks):
            if not shard_decodes or rank == turn % ranks:
                hands[rank].append((req, list(range(query_lens[req])), shard_decodes or rank == 0))
    cards = []  # the flat prefill tokens that round_robin deals
    for req, prefilling in enumerate(is_prefilling):
        if not prefilling or not query_lens[req]:
            continue
        tokens = list(range(query_lens[req]))
        shares = pieces_of_ranks(tokens, ranks, strategy)
        if dcp > 1 and not all(all(share) for share in shares):
            for rank in range(ranks):
                hands[rank].append((req, tokens, rank == 0))
        elif strategy == "round_robin":
            start = len(cards)
            cards.extend((req, token) for token in tokens)
            for rank in range(ranks):
                mine = [token for place, (_, token) in enumerate(cards) if place >= start and place % ranks == rank]
                if mine:
                    hands[rank].append((req, mine, True))
        else:
            for rank in range(ranks):
                hands[rank].extend((req, piece, True) for piece in shares[rank] if piece)
    return hands


def greedy_chunks(query_lens, context_keys, *, workspace, max_logits, unit):
    """Chunks [(rows, keys, queries a run)], one request after another; unit None: keys are never cut."""
    chunks, open_rows = [], []

    def fits(rows):
        keys, queries = sum(context_keys[i] for i in rows), sum(query_lens[i] for i in rows)
        return keys <= workspace and queries * keys <= max_logits

    def close():
        if sum(query_lens[i] for i in open_rows):
            chunks.append((list(open_rows), (0, max(context_keys[i] for i in open_rows)), None))
        open_rows.clear()

    for row, keys in enumerate(context_keys):
        if open_rows and not fits([*open_rows, row]):
            close()
        if open_rows or fits([row]):
            open_rows.append(row)
        elif query_lens[row]:
            span = keys
            if unit is not None and keys > min(workspace, max_logits):
                span = min(workspace, max_logits)
                while span % unit:
                    span -= 1
            start = 0
            while start < keys:
                stop = min(start + span, keys)
                chunks.append(([row], (start, stop), max(1, max_logits // span)))
                start = stop
    close()
    return chunks


def gathered_places(num_keys, first, stop, ranks, interleave):
    """Where each key of several requests lies after an all-gather of shards padded to the largest.

    num_keys: keys of each request; first, stop: keys [first, stop) of each are sent. Returns a {key: place} of each
    request, and the places of the whole buffer.
    """
    hands = [[] for _ in range(ranks)]
    for req, total in enumerate(num_keys):
        shards = [[key for key in shard if first <= key < stop] for shard in deal(total, ranks, interleave)]
        widest = max(map(len, shards))
        for rank, shard in enumerate(shards):
            hands[rank] += [(req, key) for key in shard] + [None] * (widest - len(shard))
    places = [{} for _ in num_keys]
    for place, card in enumerate(card for hand in hands for card in hand):
        if card is not None:
            places[card[0]][card[1]] = place
    return places, sum(map(len, hands))
