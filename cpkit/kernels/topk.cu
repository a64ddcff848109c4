// Top-k of the rows of a matrix of fp32 scores, one block of threads per row or part of a row. Follows topk_held.cu and
// topk_registers.cu. Selections are written in ascending order of positions, whatever order threads ran in.
//
//     row of up to 16,384 keys   held::Row
//     longer row                 samples -> bound -> one pass: survivors  -> choose
//     few long rows              each part of a row by a block of its own; the last to finish selects for the row
//
// All keys of a row differ in the order of (score, position), so a bound lets through any wanted number of them, even
// where all scores are equal. Samples lie at hashed places of equal strata: how many keys pass is then a matter of
// chance, not of the data. Where chance is unkind (fewer than K pass, or more than fit) the bound is narrowed between
// the two that failed and the row is read again.

using HeldRow = held::Row<THREADS, held::Alone, true>;
constexpr int ANY_POS = 0x7FFFFFFF;
constexpr u64 EVERY_KEY = (u64)MINUS_INF << 32;  // the bound that all but NaN pass

// How many samples should pass so that K of the keys surely do: 4.5 standard deviations more than expected.
__device__ int wanted_samples(int K, int num_samples, int num_keys) {
    float expected = (float)K * (float)num_samples / (float)num_keys;
    return (int)(expected + 4.5f * sqrtf(expected)) + 4;
}

// The bound that about `want` of the samples pass.
template <class Pos>
__device__ u64 bound_of(Block& block, const u32 (&rank)[LEVELS], int levels, int want, Pos pos) {
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
    int first[LEVELS / 4];
    u32 rank[LEVELS];
#pragma unroll
    for (int v = 0; v < LEVELS / 4; ++v) {
        u32 stratum = (v * THREADS + thread) / 2;
        int begin = __umulhi(stratum << 22, num_keys);  // stratum / 1024 of the row
        int hashed = __umulhi((stratum + seed * 1024 + 1) * 0x9E3779B1u, num_keys / 1024);
        int sector = max((begin + hashed + shift) & ~7, 8) - shift;
        first[v] = (sector + 8 > num_keys ? sector - 8 : sector) + thread % 2 * 4;
        float4 four = __ldg((const float4*)(row + first[v]));
        rank[v * 4] = rank_of(four.x), rank[v * 4 + 1] = rank_of(four.y);
        rank[v * 4 + 2] = rank_of(four.z), rank[v * 4 + 3] = rank_of(four.w);
    }
    return bound_of(block, rank, LEVELS, want, [&](int u) { return first[u / 4] + u % 4; });
}

// Put the marked of a warp's keys, 16 a lane, into the block's list; where they do not fit they are only counted.
template <class Pos>
__device__ void append(Block& block, const float* row, u32 marks, Pos pos) {
    int n = __popc(marks), upto = sum_upto(n, block.lane);
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

__device__ void ranks_of_survivors(const Shared& shared, int count, int levels, u32 (&rank)[LEVELS]) {
#pragma unroll
    for (int u = 0; u < LEVELS; ++u) {
        if (u >= levels) break;
        int i = u * THREADS + threadIdx.x;
        rank[u] = i < count ? rank_of(__uint_as_float(shared.survivors[i] >> 32)) : 0u;
    }
}

// How blocks share a row: this one is `split` of `splits`. lists [rows * splits, room] and counts [rows * splits] take
// what each finds, arrived [rows], zeros, says how many have found it.
struct Sharing {
    int row, split, splits, room;
    u64* lists;
    int *counts, *arrived;
};

// Hand a part's survivors to the block that finishes the row last: true in that block, with all of them in its list.
__device__ bool join(Block& block, const Sharing& sharing, int& count) {
    auto [row, split, splits, room, lists, counts, arrived] = sharing;
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

// Select for a row, or, where blocks share it, for this one's part.
__device__ __forceinline__ void select_row(char* memory, const float* keys, int num_keys, int K,
                                           const Sharing& sharing, int* out) {
    int split = sharing.split, splits = sharing.splits;
    if (num_keys <= HeldRow::MAX_PART) {
        if (split == 0) HeldRow(memory, K).select(keys, num_keys, out);
        return;
    }
    Block block(*(Shared*)memory);
    Shared& shared = block.shared;
    int count, want = wanted_samples(K, CAPACITY, num_keys), segment = ((num_keys + splits - 1) / splits + 3) & ~3;
    u64 low = EVERY_KEY - 1, high = ~0ull;  // bounds that too many keys pass, and too few
    for (int attempt = 0;; ++attempt) {
        u64 bound = attempt < 2 ? sampled_bound(block, keys, num_keys, want, attempt) : low;
        if (bound <= low || bound >= high) bound = low + (high - low) / 2;
        bool part = splits > 1 && attempt == 0;
        int first = part ? min(split * segment, num_keys) : 0;
        count = survivors(block, keys, first, part ? min(first + segment, num_keys) : num_keys, bound);
        if (part && !join(block, sharing, count)) return;
        if (count <= CAPACITY && (count >= K || bound == EVERY_KEY)) break;
        if (count < K) {
            high = bound, want *= 4;
        } else {
            low = bound, want /= 2;
        }
    }
    int levels = (count + THREADS - 1) / THREADS;
    u32 rank[LEVELS];
    ranks_of_survivors(shared, count, levels, rank);
    auto pos = [&](int u) { return (int)(u32)shared.survivors[u * THREADS + threadIdx.x]; };
    choose(block, rank, levels, num_keys, K, pos, out, [](int, int) {});
}

// Grid: rows * splits blocks. lists, counts and arrived are used where splits > 1.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
topk_rows(const float* logits, const int* key_start, const int* key_end, int* out, u64* lists, int* counts,
          int* arrived, int N, int row_stride, int out_stride, int K, int splits, int room) {
    extern __shared__ __align__(16) char memory[];
    int row = blockIdx.x / splits, split = blockIdx.x % splits;
    int start = max(key_start[row], 0), num_keys = keys_between(start, key_end[row], N);
    const float* keys = logits + (long long)row * row_stride + start;
    out += (long long)row * out_stride;
    select_row(memory, keys, num_keys, K, {row, split, splits, room, lists, counts, arrived}, out);
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
    int num_keys = keys_between(max(key_start[row], 0), key_end[row], N);
    int first = sample_start[row], num_samples = min(sample_end[row] - first, CAPACITY);
    u64 bound = EVERY_KEY;
    if (num_keys > room) {
        auto key = [&](int u) { return sampled[first + u * THREADS + threadIdx.x]; };
        u32 rank[LEVELS];
#pragma unroll
        for (int u = 0; u < LEVELS; ++u) {
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
// than K of them, or more than fit, is left open: open_rows [1 + M] holds how many are, then which. scores [M, K] takes
// those of the selection, -inf behind them, unless it is null.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
topk_survivors(const u64* lists, const int* counts, const int* key_start, const float* bound_score,
               const int* bound_key, int* out, float* scores, int* open_rows, int N, int out_stride,
               int score_stride, int K, int room) {
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
    u32 rank[LEVELS];
    ranks_of_survivors(block.shared, count, levels, rank);
    auto pos = [&](int u) { return (int)(u32)block.shared.survivors[u * THREADS + threadIdx.x] - start; };
    if (scores) scores += (long long)row * score_stride;
    auto placed = [&](int u, int i) {
        if (scores) scores[i] = __uint_as_float(__ldcg(list + u * THREADS + threadIdx.x) >> 32);
    };
    int taken = choose(block, rank, levels, N, K, pos, out + (long long)row * out_stride, placed);
    for (int i = taken + threadIdx.x; scores && i < K; i += THREADS) scores[i] = score_of(MINUS_INF);
}

// Select for the rows that topk_survivors left open, from the `first` of them on, a block each: block i has the logits
// of row open_rows[1 + first + i] in row i of its own. Blocks beyond the last open row leave at once. M: rows in all.
// scores: as above.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
topk_open(const float* logits, const int* open_rows, const int* key_start, const int* key_end, int* out, float* scores,
          int first, int M, int N, int row_stride, int out_stride, int score_stride, int K) {
    extern __shared__ __align__(16) char memory[];
    int i = first + blockIdx.x;
    if (i >= min(open_rows[0], M)) return;
    int row = open_rows[1 + i], start = max(key_start[row], 0), num_keys = keys_between(start, key_end[row], N);
    const float* keys = logits + (long long)blockIdx.x * row_stride + start;
    out += (long long)row * out_stride;
    select_row(memory, keys, num_keys, K, {row, 0, 1}, out);
    if (!scores) return;
    __syncthreads();
    scores += (long long)row * score_stride;
    for (int i = threadIdx.x; i < K; i += THREADS) scores[i] = out[i] < 0 ? score_of(MINUS_INF) : __ldg(keys + out[i]);
}
