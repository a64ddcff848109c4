// Exact top-k of rows of fp32 scores, one block of threads per row or part of a row. Meaning, reference and launch:
// topk.py and topk_cuda.py. Selections are written in ascending order of positions, whatever order threads ran in.
//
//     row of up to 8,192 keys    all keys in registers                    -> nth_largest -> write
//     longer row                 samples -> bound -> one pass: survivors  -> nth_largest -> write
//     few long rows              each part of a row by a block of its own; the last to finish selects for the row
//
// A key is (score, position); it ranks higher by score, then by lower position, so all keys of a row differ and a bound
// lets through any wanted number of them, even where all scores are equal. Samples lie at hashed places of equal strata:
// how many keys pass is then a matter of chance, not of the data. Where chance is unkind (fewer than K pass, or more
// than fit) the bound is narrowed between the two that failed and the row is read again.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int HELD = 16;                  // keys that a thread holds in registers
constexpr int CAPACITY = THREADS * HELD;  // keys a block can select among
constexpr int WINDOW = 131072;            // positions put in order at once, a bit each
constexpr int MAX_K = 2048;
constexpr int LOG2_BINS = 11, BINS = 1 << LOG2_BINS;  // 4 a thread
constexpr u32 FULL = 0xFFFFFFFFu;
constexpr u32 MINUS_INF = 0x007FFFFFu;          // rank of -inf, the lowest of a key; 0 is no key
constexpr int ANY_POS = 0x7FFFFFFF;
constexpr u64 EVERY_KEY = (u64)MINUS_INF << 32;  // the bound that all but NaN pass

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
    struct {
        int bin, beyond, reached;
    } found;
};

__device__ u32 rank_of(float x) {
    u32 bits = x == 0.0f ? 0u : __float_as_uint(x);
    return x == x ? bits ^ ((u32)((int)bits >> 31) | 0x80000000u) : 0u;
}

__device__ float score_of(u32 rank) { return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank); }

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
        int upto = n;
        for (int step = 1; step < 32; step *= 2) {
            int left = __shfl_up_sync(FULL, upto, step);
            if (lane >= step) upto += left;
        }
        u32* part = shared.part[turn][0];
        turn ^= 1;
        if (lane == 31) part[warp] = upto;
        __syncthreads();
        int of_warp = lane < WARPS ? (int)part[lane] : 0;
        total = __reduce_add_sync(FULL, of_warp);
        return __reduce_add_sync(FULL, lane < warp ? of_warp : 0) + upto - n;
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
__device__ Nth nth_largest(Block& block, const u32 (&rank)[HELD], int levels, int want, int slack) {
    Shared& shared = block.shared;
    u32 low = FULL, high = 0;
    int reached = 0, beyond = 0;  // ranks that reach low; ranks above high
#pragma unroll
    for (int u = 0; u < HELD; ++u) {
        if (u >= levels) break;
        if (rank[u]) low = min(low, rank[u]), high = max(high, rank[u]), ++reached;
    }
    block.extent(low, high, reached);
    while (reached > want + slack && low < high) {
        int shift = max(0, 32 - LOG2_BINS - __clz(high - low));
#pragma unroll
        for (int u = 0; u < HELD; ++u) {
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
__device__ u32 tie_bound(Block& block, const u32 (&rank)[HELD], int levels, u32 last, int want, Pos pos) {
    u32 order[HELD];
    int above = 0;
#pragma unroll
    for (int u = 0; u < HELD; ++u) {
        if (u >= levels) break;
        above += rank[u] > last;
        order[u] = rank[u] == last ? ~(u32)pos(u) : 0u;
    }
    above = block.sum(above);
    return nth_largest(block, order, levels, want - above, 0).rank;
}

// Write the positions of the K best in ascending order, then -1. num_keys: positions are below it.
template <class Pos>
__device__ void choose(Block& block, u32 (&rank)[HELD], int levels, int num_keys, int K, Pos pos, int* out) {
    Nth last = nth_largest(block, rank, levels, K, 0);
    u32 tie = last.reached > K ? tie_bound(block, rank, levels, last.rank, K, pos) : 0u;
    Shared& shared = block.shared;
#pragma unroll
    for (int u = 0; u < HELD; ++u) {  // from here on a thread holds positions, FULL for none
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
        for (int u = 0; u < HELD; ++u) {
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
        for (int u = 0; u < HELD; ++u) {
            if (u >= levels) break;
            u32 at = rank[u] - first;
            if (at >= WINDOW) continue;
            u32 lower = shared.chosen[at / 32] & ((1u << at % 32) - 1);
            shared.in_order[shared.before[at / 32] + __popc(lower)] = rank[u];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < K; i += THREADS) out[i] = i < taken ? shared.in_order[i] : -1;
}

// How many samples should pass so that K of the keys surely do: 4.5 standard deviations more than expected.
__device__ int wanted_samples(int K, int num_samples, int num_keys) {
    float expected = (float)K * (float)num_samples / (float)num_keys;
    return (int)(expected + 4.5f * sqrtf(expected)) + 4;
}

// The bound that about `want` of the samples pass.
template <class Pos>
__device__ u64 bound_of(Block& block, const u32 (&rank)[HELD], int levels, int want, Pos pos) {
    int slack = want / 32;
    Nth nth = nth_largest(block, rank, levels, want, slack);
    if (nth.reached < want) return EVERY_KEY;
    u32 tie = nth.reached > want + slack ? tie_bound(block, rank, levels, nth.rank, want, pos) : 0u;
    return (u64)nth.rank << 32 | tie;
}

// 1,024 strata of the row give 8 neighbours each, a sector of memory at a hashed place, which two threads load.
__device__ u64 sampled_bound(Block& block, const float* row, int num_keys, int want, u32 seed) {
    int shift = (int)((u64)row / 4 % 8);  // sectors begin at multiples of 8 in memory, not in the row
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // else the places are computed before the caller's loop, and spilled
    int first[HELD / 4];
    u32 rank[HELD];
#pragma unroll
    for (int v = 0; v < HELD / 4; ++v) {
        u32 stratum = (v * THREADS + thread) / 2;
        int begin = __umulhi(stratum << 22, num_keys);  // stratum / 1024 of the row
        int hashed = __umulhi((stratum + seed * 1024 + 1) * 0x9E3779B1u, num_keys / 1024);
        int sector = max((begin + hashed + shift) & ~7, 8) - shift;
        first[v] = (sector + 8 > num_keys ? sector - 8 : sector) + thread % 2 * 4;
        float4 four = __ldg((const float4*)(row + first[v]));
        rank[v * 4] = rank_of(four.x), rank[v * 4 + 1] = rank_of(four.y);
        rank[v * 4 + 2] = rank_of(four.z), rank[v * 4 + 3] = rank_of(four.w);
    }
    return bound_of(block, rank, HELD, want, [&](int u) { return first[u / 4] + u % 4; });
}

// Put the marked of a warp's keys, 16 a lane, into the block's list; where they do not fit they are only counted.
template <class Pos>
__device__ void append(Block& block, const float* row, u32 marks, Pos pos) {
    int n = __popc(marks), upto = n;
    for (int step = 1; step < 32; step *= 2) {
        int left = __shfl_up_sync(FULL, upto, step);
        if (block.lane >= step) upto += left;
    }
    int total = __shfl_sync(FULL, upto, 31), place = 0;
    if (total == 0) return;
    if (block.lane == 31) place = atomicAdd(&block.shared.count, total);
    place = __shfl_sync(FULL, place, 31);
    if (place + total > CAPACITY) return;
    u64* list = block.shared.survivors + place + upto - n;
    for (; marks; marks &= marks - 1) {
        int at = pos(__ffs(marks) - 1);
        *list++ = (u64)__float_as_uint(__ldg(row + at)) << 32 | (u32)at;  // from the first cache: it was just read
    }
}

// Warps take turns of 512 keys and never wait for each other.
template <bool TIES>
__device__ void scan(Block& block, const float* row, int first, int last, float score, int last_pos) {
    float x[16];
    auto sift = [&](auto pos) {
        u32 marks = 0;
#pragma unroll
        for (int u = 0; u < 16; ++u) {
            bool passes = TIES ? (x[u] > score) | ((x[u] == score) & (pos(u) <= last_pos)) : x[u] >= score;
            marks |= (u32)passes << u;
        }
        append(block, row, marks, pos);
    };
    int head = min((int)(-(long long)((u64)(row + first) / 4) & 3), last - first);  // up to a multiple of 16 bytes
    int body = (last - first - head) & ~511, begin = first + head;
    for (int at = begin + block.warp * 512; at < begin + body; at += WARPS * 512) {
        const float4* source = (const float4*)(row + at) + block.lane;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float4 four = __ldg(source + j * 32);
            x[j * 4] = four.x, x[j * 4 + 1] = four.y, x[j * 4 + 2] = four.z, x[j * 4 + 3] = four.w;
        }
        int own = at + block.lane * 4;
        sift([&](int u) { return own + u / 4 * 128 + u % 4; });
    }
    // What is left before and behind, fewer than 3 + 512 keys: 512 for one warp, the rest for another.
    for (int at = block.warp * 512; at < last - first - body; at += WARPS * 512) {
        auto pos = [&](int u) {
            int i = at + u * 32 + block.lane;
            return i < head ? first + i : first + body + i;
        };
#pragma unroll
        for (int u = 0; u < 16; ++u) x[u] = pos(u) < last ? __ldg(row + pos(u)) : __uint_as_float(FULL);
        sift(pos);
    }
}

// A key that scores as much as the bound passes up to this position.
__device__ int last_pos_of(u64 bound) { return (u32)bound > 0x80000000u ? (int)~(u32)bound : ANY_POS; }

// Collect the keys first .. last - 1 that pass a bound; returns how many did, also when they do not fit.
__device__ int survivors(Block& block, const float* row, int first, int last, u64 bound) {
    if (threadIdx.x == 0) block.shared.count = 0;
    __syncthreads();
    float score = score_of((u32)(bound >> 32));
    int last_pos = last_pos_of(bound);
    if (last_pos == ANY_POS) {
        scan<false>(block, row, first, last, score, last_pos);
    } else {
        scan<true>(block, row, first, last, score, last_pos);
    }
    __syncthreads();
    int count = block.shared.count;
    __syncthreads();
    return count;
}

__device__ void ranks_of_survivors(const Shared& shared, int count, int levels, u32 (&rank)[HELD]) {
#pragma unroll
    for (int u = 0; u < HELD; ++u) {
        if (u >= levels) break;
        int i = u * THREADS + threadIdx.x;
        rank[u] = i < count ? rank_of(__uint_as_float(shared.survivors[i] >> 32)) : 0u;
    }
}

// Hand a part's survivors to the block that finishes the row last: true in that block, with all of them in its list.
__device__ bool join(Block& block, int row, int splits, int room, u64* lists, int* counts, int* arrived, int& count) {
    Shared& shared = block.shared;
    u64* own = lists + (long long)blockIdx.x * room;
    for (int i = threadIdx.x; i < min(count, room); i += THREADS) own[i] = shared.survivors[i];
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.count = atomicAdd(arrived + row, 1);
    __syncthreads();
    if (shared.count != splits - 1) return false;
    __threadfence();
    int before = 0, n = 0;
    counts += row * splits;
    for (int i = threadIdx.x; i < splits; i += THREADS) n += __ldcg(counts + i);
    count = block.sum(n);
    if (count > CAPACITY) return true;
    for (int part = block.warp, seen = 0; part < splits; part += WARPS) {
        for (int i = seen + block.lane; i < part; i += 32) before += __ldcg(counts + i);
        seen = part;
        int offset = __reduce_add_sync(FULL, before), size = __ldcg(counts + part);
        const u64* list = lists + ((long long)row * splits + part) * room;
#pragma unroll 4
        for (int i = block.lane; i < size; i += 32) shared.survivors[offset + i] = __ldcg(list + i);
    }
    __syncthreads();
    return true;
}

// Grid: rows * splits blocks. lists [rows * splits, room], counts [rows * splits] and arrived [rows], zeros, are used
// where splits > 1.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
topk_rows(const float* logits, const int* key_start, const int* key_end, int* out, u64* lists, int* counts,
          int* arrived, int N, int row_stride, int out_stride, int K, int splits, int room) {
    extern __shared__ __align__(16) char memory[];
    Block block(*(Shared*)memory);
    Shared& shared = block.shared;
    int row = blockIdx.x / splits, split = blockIdx.x % splits;
    int start = max(key_start[row], 0), num_keys = max(min(key_end[row], N) - start, 0);
    const float* keys = logits + (long long)row * row_stride + start;
    out += (long long)row * out_stride;
    bool fits = num_keys <= CAPACITY;
    if (fits && split) return;
    int count = num_keys;
    if (!fits) {
        int want = wanted_samples(K, CAPACITY, num_keys), segment = ((num_keys + splits - 1) / splits + 3) & ~3;
        u64 low = EVERY_KEY - 1, high = ~0ull;  // bounds that too many keys pass, and too few
        for (int attempt = 0;; ++attempt) {
            u64 bound = attempt < 2 ? sampled_bound(block, keys, num_keys, want, attempt) : low;
            if (bound <= low || bound >= high) bound = low + (high - low) / 2;
            bool part = splits > 1 && attempt == 0;
            int first = part ? min(split * segment, num_keys) : 0;
            count = survivors(block, keys, first, part ? min(first + segment, num_keys) : num_keys, bound);
            if (part && !join(block, row, splits, room, lists, counts, arrived, count)) return;
            if (count <= CAPACITY && (count >= K || bound == EVERY_KEY)) break;
            if (count < K) {
                high = bound, want *= 4;
            } else {
                low = bound, want /= 2;
            }
        }
    }
    int levels = (count + THREADS - 1) / THREADS;
    auto pos = [&](int u) {
        int i = u * THREADS + threadIdx.x;
        return fits ? i : (int)(u32)shared.survivors[i];
    };
    u32 rank[HELD];
    if (fits) {
        float x[HELD];  // all on their way before the first is looked at
#pragma unroll
        for (int u = 0; u < HELD; ++u) x[u] = count ? __ldg(keys + min(pos(u), count - 1)) : 0.0f;
#pragma unroll
        for (int u = 0; u < HELD; ++u) rank[u] = pos(u) < count ? rank_of(x[u]) : 0u;
    } else {
        ranks_of_survivors(shared, count, levels, rank);
    }
    choose(block, rank, levels, num_keys, K, pos, out);
}

// Of each row a bound that a few more than K of its keys pass, from logits of sampled keys: logits [M, samples] over
// sample_start .. sample_end - 1, sampled [samples] their ascending positions. Rows of up to `room` keys keep all.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
topk_bounds(const float* logits, const int* sampled, const int* sample_start, const int* sample_end,
            const int* key_start, const int* key_end, float* bound_score, int* bound_key, int N, int row_stride, int K,
            int room) {
    extern __shared__ __align__(16) char memory[];
    Block block(*(Shared*)memory);
    int row = blockIdx.x;
    int num_keys = min(key_end[row], N) - max(key_start[row], 0);
    int first = sample_start[row], num_samples = min(sample_end[row] - first, CAPACITY);
    u64 bound = EVERY_KEY;
    if (num_keys > room) {
        auto key = [&](int u) { return sampled[first + u * THREADS + threadIdx.x]; };
        u32 rank[HELD];
#pragma unroll
        for (int u = 0; u < HELD; ++u) {
            int i = u * THREADS + threadIdx.x;
            rank[u] = i < num_samples ? rank_of(__ldg(logits + (long long)row * row_stride + first + i)) : 0u;
        }
        int levels = (num_samples + THREADS - 1) / THREADS;
        bound = bound_of(block, rank, levels, wanted_samples(K, num_samples, num_keys), key);
    }
    if (threadIdx.x == 0) {
        bound_score[row] = score_of((u32)(bound >> 32));
        bound_key[row] = last_pos_of(bound);
    }
}

// Select among survivors collected elsewhere: lists [M, room] of score bits << 32 | key, counts [M]. A row with fewer
// than K of them, or more than fit, is left open: open_rows [1 + M] holds how many are, then which.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
topk_survivors(const u64* lists, const int* counts, const int* key_start, const float* bound_score,
               const int* bound_key, int* out, int* open_rows, int N, int out_stride, int K, int room) {
    extern __shared__ __align__(16) char memory[];
    Block block(*(Shared*)memory);
    int row = blockIdx.x, count = counts[row], start = max(key_start[row], 0);
    bool every = bound_score[row] == score_of(MINUS_INF) && bound_key[row] == ANY_POS;
    if (count > room || (count < K && !every)) {
        if (threadIdx.x == 0) open_rows[1 + atomicAdd(open_rows, 1)] = row;
        return;
    }
    const u64* list = lists + (long long)row * room;
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += THREADS) block.shared.survivors[i] = __ldcg(list + i);
    __syncthreads();
    int levels = (count + THREADS - 1) / THREADS;
    u32 rank[HELD];
    ranks_of_survivors(block.shared, count, levels, rank);
    auto pos = [&](int u) { return (int)(u32)block.shared.survivors[u * THREADS + threadIdx.x] - start; };
    choose(block, rank, levels, N, K, pos, out + (long long)row * out_stride);
}
