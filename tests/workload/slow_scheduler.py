"""Continuous batching with one dictionary a request and one a block: slow, plain, and sharing no code with cpkit."""

import itertools


class SlowPool:
    """Blocks as dictionaries; the least recently used is the one freed longest ago."""

    def __init__(self, num_blocks):
        self.blocks = [{"id": i, "refs": 0, "key": None, "freed": 0} for i in range(1, num_blocks)]
        self.time = itertools.count(1)

    def free(self):
        return [b for b in self.blocks if b["refs"] == 0]

    def find(self, key):
        return next((b for b in self.blocks if b["key"] is not None and b["key"] == key), None)

    def take(self, count):
        taken = sorted(self.free(), key=lambda b: (b["key"] is not None, b["freed"]))[:count]
        assert len(taken) == count
        for block in taken:
            block.update(refs=1, key=None)
        return taken

    def release(self, blocks):
        for block in reversed(blocks):
            block["refs"] -= 1
            if block["refs"] == 0:
                block["freed"] = next(self.time)


def prompt_keys(request, span):
    """What each whole block of the prompt holds: the hashes of all tokens up to its end, and which block it is."""
    keys = []
    for end in range(span, request.prompt_len + 1, span):
        hashes = [int(h) for i, h in enumerate(request.block_hashes) if i * request.hash_block_size < end]
        if len(hashes) * request.hash_block_size < end:
            break
        keys.append((tuple(hashes), end))
    return keys


class SlowScheduler:
    def __init__(self, requests, span, budget, num_blocks, max_model_len, accept_all):
        self.requests, self.span, self.budget = requests, span, budget
        self.num_blocks, self.max_model_len, self.accept_all = num_blocks, max_model_len, accept_all
        self.pool = SlowPool(num_blocks)
        self.coming = {r.req_id: r.arrival_s for r in requests if r.depends_on is None}
        self.waiting, self.running, self.emitted = [], [], {r.req_id: 0 for r in requests}
        self.refused, self.finished, self.now, self.hits = [], [], 0.0, {}

    def can_ever_fit(self, r):
        most = r.prompt_len
        if r.output_len > 1:
            most = min(most + r.output_len - 1 + self.budget.num_speculative_tokens, self.max_model_len)
        fits_model = r.prompt_len + r.output_len <= self.max_model_len
        return r.prompt_len > 0 and fits_model and most <= self.span * (self.num_blocks - 1)

    def answered(self, req, at):
        for r in self.requests:
            if r.depends_on == req:
                self.coming[r.req_id] = max(r.arrival_s, at + r.think_time_s)

    def welcome(self):
        while True:
            ready = sorted((t, i) for i, t in self.coming.items() if t <= self.now)
            if ready:
                t, i = ready[0]
                del self.coming[i]
                if self.can_ever_fit(self.requests[i]):
                    self.waiting.append(i)
                else:
                    self.refused.append(i)
                    self.answered(i, t)
            elif self.waiting or self.running:
                return True
            elif self.coming:
                self.now = min(self.coming.values())
            else:
                return False

    def lacking(self, run, tokens):
        have, need = len(run["blocks"]), 0
        while (have + need) * self.span < tokens:
            need += 1
        return need

    def decodes(self):
        left, rows = self.budget.max_num_batched_tokens, []
        for run in self.running:
            if run["computed"] < run["target"]:
                continue
            query = 1 + self.budget.num_speculative_tokens
            query = min(query, left, self.max_model_len - run["computed"])
            if query > 0:
                rows.append((run, query))
                left -= query
        return rows, left

    def step(self):
        preempted = False
        while True:
            decodes, left = self.decodes()
            if sum(self.lacking(r, r["computed"] + q) for r, q in decodes) <= len(self.pool.free()):
                break
            run, preempted = self.running.pop(), True
            self.pool.release(run["blocks"])
            self.emitted[run["req"]] = self.requests[run["req"]].output_len - run["left"]
            self.waiting.insert(0, run["req"])
        for run, query in decodes:
            run["blocks"] += self.pool.take(self.lacking(run, run["computed"] + query))
        prefills = []
        for run in self.running:
            if run["computed"] < run["target"] and left:
                prefills.append((run, min(left, run["target"] - run["computed"])))
                left -= prefills[-1][1]
        while not preempted and self.waiting and left and len(self.running) < self.budget.max_num_seqs:
            run = self.admit(self.waiting[0])
            if run is None:
                break
            self.waiting.pop(0)
            self.running.append(run)
            prefills.append((run, min(left, run["target"] - run["computed"])))
            left -= prefills[-1][1]
        seen = [(r["req"], q, r["computed"] + q, r["target"]) for r, q in decodes + prefills]
        self.now += 1.0
        self.apply(decodes, prefills)
        return seen

    def admit(self, req):
        target = self.requests[req].prompt_len + self.emitted[req]
        hit = []
        for key in prompt_keys(self.requests[req], self.span):
            block = self.pool.find(key)
            if block is None or (len(hit) + 1) * self.span > target - 1:
                break
            hit.append(block)
        run = {"req": req, "target": target, "computed": len(hit) * self.span, "blocks": list(hit)}
        run["left"] = self.requests[req].output_len - self.emitted[req]
        need = self.lacking(run, target)
        if need > len([b for b in self.pool.free() if b not in hit]):
            return None
        for block in hit:
            block["refs"] += 1
        run["blocks"] += self.pool.take(need)
        self.hits.setdefault(req, run["computed"])
        return run

    def apply(self, decodes, prefills):
        for run, query in decodes:
            kept = min(query if self.accept_all else 1, run["left"])
            run["computed"] += kept
            run["left"] -= kept
        self.finish([run for run, _ in decodes])
        for run, query in prefills:
            run["computed"] += query
            for i, key in enumerate(prompt_keys(self.requests[run["req"]], self.span)):
                if (i + 1) * self.span <= run["computed"] and self.pool.find(key) is None:
                    run["blocks"][i]["key"] = key
            if run["computed"] == run["target"]:
                run["left"] = max(run["left"] - 1, 0)
        self.finish([run for run, _ in prefills])

    def finish(self, runs):
        for run in runs:
            if run["left"] == 0 and run["computed"] >= run["target"]:
                self.pool.release(run["blocks"])
                self.running.remove(run)
                self.finished.append(run["req"])
                self.answered(run["req"], self.now)
