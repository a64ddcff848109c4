// The order of scores, and what else the sources of top-k share. topk_cuda.py joins them into one text, in this order:
//
//     topk_order.cu       what a key's rank is
//     topk_bins.cu        bins of equal width
//     topk_team.cu        sums over the threads that select for a row
//     topk_held.cu        rows of up to 16,384 keys, in shared memory
//     topk_registers.cu   the best of the keys that a block's threads hold in registers
//     topk.cu             all other rows: samples, a bound, and survivors for the registers
//     topk_cluster.cu     few longer rows, a cluster of blocks each, as in topk_held.cu
//
// A key is (score, position); it ranks higher by score, then by lower position. Meaning and reference: topk.py.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int MAX_K = 2048;
constexpr u32 FULL = 0xFFFFFFFFu;
constexpr u32 INF_BITS = 0x7F800000u;
constexpr u32 MINUS_INF = 0x007FFFFFu;  // rank of -inf, the lowest of a key; 0 is no key

__device__ u32 rank_of(float x) {
    u32 bits = x == 0.0f ? 0u : __float_as_uint(x);
    return x == x ? bits ^ ((u32)((int)bits >> 31) | 0x80000000u) : 0u;
}

__device__ float score_of(u32 rank) { return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank); }

// Keys of a range from `start`, not below 0, cut to the N of a row. The end is cut first: it may be any number.
__device__ int keys_between(int start, int end, int N) { return max(max(min(end, N), 0) - start, 0); }

// Sum of n over a warp's lanes up to this one.
__device__ int sum_upto(int n, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int left = __shfl_up_sync(FULL, n, step);
        if (lane >= step) n += left;
    }
    return n;
}

// Sum of n over a block's threads before this one; total over all of them. part: a place for each of its warps.
template <int WARPS>
__device__ int sum_before(int n, int lane, int warp, u32* part, int& total) {
    int upto = sum_upto(n, lane);
    if (lane == 31) part[warp] = upto;
    __syncthreads();
    int of_warp = lane < WARPS ? (int)part[lane] : 0;
    total = __reduce_add_sync(FULL, of_warp);
    return __reduce_add_sync(FULL, lane < warp ? of_warp : 0) + upto - n;
}
