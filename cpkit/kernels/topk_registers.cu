// The K best of up to 8,192 keys whose ranks a block's threads hold in registers. Follows topk_order.cu.
//
//     ranks -> counted in bins, 2 or 3 times over -> the K-th rank -> a bit for each position -> positions, ascending

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int LEVELS = 16;                  // keys that a thread holds
constexpr int CAPACITY = THREADS * LEVELS;  // keys a block can select among
constexpr int WINDOW = 131072;              // positions put in order at once, a bit each
constexpr int LOG2_BINS = 11, BINS = 1 << LOG2_BINS;  // 4 a thread

struct Shared {
    union {
        u64 survivors[CAPACITY];  // score bits << 32 | position
        struct {
            u32 chosen[WINDOW / 32];  // a bit for each position
            int before[WINDOW / 32];  // chosen positions before a word of them
            int in_order[MAX_K];
        };
    };
    int bins[BINS];  // all 0 whenever nobody counts
    u32 part[2][3][WARPS];
    int count;
    struct alignas(16) {  // read as 16 bytes at once, when others may write count
        int bin, beyond, reached;
    } found;
};

struct Block {
    Shared& shared;
    int lane, warp;
    int turn = 0;  // partial results alternate between two places, so one barrier a reduction is enough

    __device__ Block(Shared& s) : shared(s), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {
        for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    }

    __device__ int sum(int n) {
        n = __reduce_add_sync(FULL, n);
        u32* part = shared.part[turn][0];
        turn ^= 1;
        if (lane == 0) part[warp] = n;
        __syncthreads();
        return __reduce_add_sync(FULL, lane < WARPS ? (int)part[lane] : 0);
    }

    // Sum of n over the threads before this one; total over all.
    __device__ int sum_before(int n, int& total) {
        u32* part = shared.part[turn][0];
        turn ^= 1;
        return ::sum_before<WARPS>(n, lane, warp, part, total);
    }

    __device__ void extent(u32& low, u32& high, int& n) {
        low = __reduce_min_sync(FULL, low);
        high = __reduce_max_sync(FULL, high);
        n = __reduce_add_sync(FULL, n);
        u32(*part)[WARPS] = shared.part[turn];
        turn ^= 1;
        if (lane == 0) part[0][warp] = low, part[1][warp] = high, part[2][warp] = n;
        __syncthreads();
        low = __reduce_min_sync(FULL, part[0][lane % WARPS]);
        high = __reduce_max_sync(FULL, part[1][lane % WARPS]);
        n = __reduce_add_sync(FULL, lane < WARPS ? (int)part[2][lane] : 0);
    }
};

struct Nth {
    u32 rank;
    int reached;
};

// The largest t that at least `want` ranks reach, or an earlier t that at most want + slack reach; and how many.
// `levels` of the registers are in use. Each turn counts the ranks in question in equal bins and goes on with one bin.
__device__ Nth nth_largest(Block& block, const u32 (&rank)[LEVELS], int levels, int want, int slack) {
    Shared& shared = block.shared;
    u32 low = FULL, high = 0;
    int reached = 0, beyond = 0;  // ranks that reach low; ranks above high
#pragma unroll
    for (int u = 0; u < LEVELS; ++u) {
        if (u >= levels) break;
        if (rank[u]) low = min(low, rank[u]), high = max(high, rank[u]), ++reached;
    }
    block.extent(low, high, reached);
    while (reached > want + slack && low < high) {
        int shift = max(0, 32 - LOG2_BINS - __clz(high - low));
#pragma unroll
        for (int u = 0; u < LEVELS; ++u) {
            if (u >= levels) break;
            if (rank[u] >= low && rank[u] <= high) atomicAdd(&shared.bins[(rank[u] - low) >> shift], 1);
        }
        __syncthreads();
        // A thread's bins, the highest for the first thread; left empty for the next turn.
        int4* own = (int4*)shared.bins + (THREADS - 1 - threadIdx.x);
        int4 four = *own;
        *own = make_int4(0, 0, 0, 0);
        int total, before = beyond + block.sum_before(four.x + four.y + four.z + four.w, total);
        int upto[4] = {before + four.w, before + four.w + four.z, before + four.w + four.z + four.y, 0};
        upto[3] = upto[2] + four.x;
        if (before < want && upto[3] >= want) {
            int i = upto[0] >= want ? 0 : upto[1] >= want ? 1 : upto[2] >= want ? 2 : 3;
            shared.found.bin = BINS - 1 - 4 * threadIdx.x - i;
            shared.found.beyond = i == 0 ? before : i == 1 ? upto[0] : i == 2 ? upto[1] : upto[2];
            shared.found.reached = i == 0 ? upto[0] : i == 1 ? upto[1] : i == 2 ? upto[2] : upto[3];
        }
        __syncthreads();
        low += (u32)shared.found.bin << shift;
        high = min(high, low + ((1u << shift) - 1));
        reached = shared.found.reached, beyond = shared.found.beyond;
    }
    return {low, reached};
}

// Among ranks equal to `last`, the ~position that as many of the lowest positions reach as there is room left for.
template <class Pos>
__device__ u32 tie_bound(Block& block, const u32 (&rank)[LEVELS], int levels, u32 last, int want, Pos pos) {
    u32 order[LEVELS];
    int above = 0;
#pragma unroll
    for (int u = 0; u < LEVELS; ++u) {
        if (u >= levels) break;
        above += rank[u] > last;
        order[u] = rank[u] == last ? ~(u32)pos(u) : 0u;
    }
    above = block.sum(above);
    return nth_largest(block, order, levels, want - above, 0).rank;
}

// Write the positions of the K best in ascending order, then -1; returns how many there are. num_keys: positions are
// below it. placed(u, i): told that the key at level u of this thread is the i-th.
template <class Pos, class Placed>
__device__ int choose(Block& block, u32 (&rank)[LEVELS], int levels, int num_keys, int K, Pos pos, int* out,
                      Placed placed) {
    Nth last = nth_largest(block, rank, levels, K, 0);
    u32 tie = last.reached > K ? tie_bound(block, rank, levels, last.rank, K, pos) : 0u;
    Shared& shared = block.shared;
#pragma unroll
    for (int u = 0; u < LEVELS; ++u) {  // from here on a thread holds positions, FULL for none
        if (u >= levels) break;
        u32 at = pos(u);
        rank[u] = rank[u] > last.rank || (rank[u] == last.rank && ~at >= tie) ? at : FULL;
    }
    int taken = 0;
    for (int first = 0; first < num_keys; first += WINDOW) {
        int words = (min(num_keys - first, WINDOW) + 31) / 32;
        __syncthreads();  // survivors were read, the window before is written
        for (int i = threadIdx.x; i < words; i += THREADS) shared.chosen[i] = 0;
        __syncthreads();
#pragma unroll
        for (int u = 0; u < LEVELS; ++u) {
            if (u >= levels) break;
            u32 at = rank[u] - first;
            if (at < WINDOW) atomicOr(&shared.chosen[at / 32], 1u << at % 32);
        }
        __syncthreads();
        int own = ((words + THREADS - 1) / THREADS) | 1;  // words of a thread: odd, for the banks of shared memory
        int begin = min((int)threadIdx.x * own, words), end = min(begin + own, words), n = 0, total;
        for (int i = begin; i < end; ++i) n += __popc(shared.chosen[i]);
        int place = taken + block.sum_before(n, total);
        for (int i = begin; i < end; ++i) {
            shared.before[i] = place;
            place += __popc(shared.chosen[i]);
        }
        taken += total;
        __syncthreads();
#pragma unroll
        for (int u = 0; u < LEVELS; ++u) {
            if (u >= levels) break;
            u32 at = rank[u] - first;
            if (at >= WINDOW) continue;
            u32 lower = shared.chosen[at / 32] & ((1u << at % 32) - 1);
            int place = shared.before[at / 32] + __popc(lower);
            shared.in_order[place] = rank[u];
            placed(u, place);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < K; i += THREADS) out[i] = i < taken ? shared.in_order[i] : -1;
    return taken;
}

