// Top-k by counting scores in bins of equal width, a row in shared memory: one block selects for a row of up to 16,384
// keys. Follows topk_bins.cu and topk_team.cu; topk_cluster.cu lets blocks share a row in the same way.
//
//     scores -> 1,024 bins -> bin of the K-th -> a bit for each key that reaches the bin -> positions, ascending
//                                   |                        |
//                           its few keys, in pairs -> losers struck out
//
// Where the K-th's bin holds many keys, or bins of equal width would be of no use (scores of many magnitudes), the bits
// of scores are counted, 10 at a time; among equal scores the lowest positions are taken.

namespace held {

constexpr int MAX_RIVALS = 128;  // keys in the K-th's bin that are compared in pairs

// A team of blocks of THREADS selects for a row. A block's part of it is in shared memory if IN_SHARED; else it is read
// again whenever it is needed.
template <int THREADS, class Team, bool IN_SHARED>
struct Row : Threads<THREADS, Team> {
    using All = Threads<THREADS, Team>;
    using All::BLOCKS, All::WARPS, All::lane, All::warp, All::block, All::sum_before, All::sum_before_in_row;
    static constexpr int OWN_BINS = BINS / THREADS;
    static constexpr int MAX_PART = IN_SHARED ? THREADS * 32 : 131072;
    static constexpr int LOADS = IN_SHARED ? 4 : 16, CHUNK = LOADS * 32;  // neighbouring keys that a warp takes at once

    struct Shared {
        int bins[BINS];
        u32 chosen[MAX_PART / 32];  // a bit for each position of the part
        u32 equal[MAX_PART / 32];
        u64 rivals[MAX_RIVALS], row_rivals[BLOCKS > 1 ? MAX_RIVALS : 1];
        typename All::Partial partial;
        int num_rivals, num_row_rivals;
        struct {
            int bin, beyond, reached;
        } found;
        // IN_SHARED: as many keys as the part has, then NaN up to a multiple of CHUNK. In the end, positions in order.
        float4 keys[IN_SHARED ? 1 : MAX_K / 4];
    };

    Shared& shared;
    const float* source;         // the part's keys, in shared memory or where they came from
    int num_keys, first_key, K;  // of the part; its first position in the row

    __device__ Row(char* memory, int K)
        : All(((Shared*)memory)->partial), shared(*(Shared*)memory), K(K) {
        for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((int4*)shared.bins)[i] = make_int4(0, 0, 0, 0);
        if (threadIdx.x == 0) shared.num_rivals = shared.num_row_rivals = 0;
        Team::started();
    }

    // Find the bin with the K-th key of the row, `beyond` keys lying above all bins: found.beyond keys lie above it,
    // found.reached reach it. Where fewer than K are counted, reached is 0 and beyond says how many. Called when all
    // have counted.
    __device__ void find(int beyond) {
        Team::meet();
        int count[OWN_BINS], sum = 0;  // the highest bin first
#pragma unroll
        for (int i = 0; i < OWN_BINS; ++i) count[i] = 0;
        int own = (THREADS - 1 - threadIdx.x) * (OWN_BINS / 2);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const int2* bins = (const int2*)Team::at_block(shared.bins, (block + b) % BLOCKS) + own;
#pragma unroll
            for (int i = 0; i < OWN_BINS; i += 2) {
                int2 two = bins[OWN_BINS / 2 - 1 - i / 2];
                count[i] += two.y, count[i + 1] += two.x;
            }
        }
#pragma unroll
        for (int i = 0; i < OWN_BINS; ++i) sum += count[i];
        Sum all = sum_before(sum);
        int before = beyond + all.place;
        if (threadIdx.x == 0 && beyond + all.total < K) shared.found = {0, beyond + all.total, 0};
        if (before < K && before + sum >= K) {
            int i = 0;
#pragma unroll
            for (int j = 0; j < OWN_BINS - 1; ++j) {
                if (before + count[j] < K && i == j) before += count[j], ++i;
            }
            int n = count[0];
#pragma unroll
            for (int j = 1; j < OWN_BINS; ++j) n = i == j ? count[j] : n;
            shared.found = {BINS - 1 - OWN_BINS * (int)threadIdx.x - i, before, before + n};
        }
        __syncthreads();
    }

    // Empty the bins when all blocks have read them.
    __device__ void empty_bins() {
        Team::meet();
        for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((int4*)shared.bins)[i] = make_int4(0, 0, 0, 0);
        __syncthreads();
    }

    // Take a part of a row: to shared memory, or only looked at. A block alone looks at a quarter of its keys, one of a
    // cluster at those it holds, or at 16 a thread. Bounds for the bins: the most of all scores looked at, and the
    // least, or, in a long row, the least of what is the most of a thread's: K keys reach that where there are K
    // threads. Only finite scores count.
    __device__ void load(const float* row, int row_keys, float& least, float& most) {
        const float inf = __uint_as_float(INF_BITS);
        int size = BLOCKS > 1 ? ((row_keys + BLOCKS - 1) / BLOCKS + 127) & ~127 : row_keys;
        first_key = min(block * size, row_keys), num_keys = min(size, row_keys - first_key);
        row += first_key;
        least = inf, most = -inf;
        auto look = [&](float x) {
            if (finite(x)) least = fminf(least, x), most = fmaxf(most, x);
        };
        if (IN_SHARED) {
            float* keys = (float*)shared.keys;
            source = keys;
            int done = (u64)row % 16 == 0 ? num_keys & ~3 : 0;
#pragma unroll 4
            for (int i = threadIdx.x * 4; i < done; i += THREADS * 4) {
                float4 four = __ldg((const float4*)(row + i));
                *(float4*)(keys + i) = four;
                look(four.x);
                if (BLOCKS > 1) look(four.y), look(four.z), look(four.w);
            }
#pragma unroll 4
            for (int i = done + threadIdx.x; i < num_keys; i += THREADS) {
                float x = __ldg(row + i);
                keys[i] = x;
                if (BLOCKS > 1 || i % 128 < 32) look(x);
            }
            int i = num_keys + threadIdx.x;
            if (i < (num_keys + CHUNK - 1) / CHUNK * CHUNK) keys[i] = __uint_as_float(FULL);
        } else {
            source = row;
            float x[16];
#pragma unroll
            for (int u = 0; u < 16; ++u) {
                int i = (int)((u64)num_keys * (warp * 16 + u) / (WARPS * 16)) + lane;
                x[u] = i < num_keys ? __ldg(row + i) : __uint_as_float(FULL);
            }
#pragma unroll
            for (int u = 0; u < 16; ++u) look(x[u]);
        }
        if (BLOCKS > 1 && row_keys >= 8 * THREADS * BLOCKS) least = most > -inf ? most : inf;
    }

    // Apply f(4 keys, place of the first) to the part, 32 places between a lane's keys; NaN behind its end.
    template <class F>
    __device__ void each_four(F f) const {
        for (int first = warp * CHUNK; first < num_keys; first += WARPS * CHUNK) {
            float x[LOADS];
#pragma unroll
            for (int u = 0; u < LOADS; ++u) {
                int i = first + u * 32 + lane;
                x[u] = IN_SHARED ? source[i] : i < num_keys ? __ldg(source + i) : __uint_as_float(FULL);
            }
#pragma unroll
            for (int u = 0; u < LOADS; u += 4) f((const float(&)[4])x[u], first + u * 32);
        }
    }

    template <class F>
    __device__ void write_bits(u32* words, const float (&x)[4], int first, F is_set) const {
        u32 word[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) word[u] = __ballot_sync(FULL, is_set(x[u]));
        if (lane == 0) *(uint4*)(words + first / 32) = make_uint4(word[0], word[1], word[2], word[3]);
    }

    // Write a bit for each key, and do something else with it.
    template <class F, class G>
    __device__ void mark(u32* words, F chosen, G also) const {
        each_four([&](const float(&x)[4], int first) {
            write_bits(words, x, first, chosen);
            also(x, first);
        });
    }
    template <class F>
    __device__ void mark(u32* words, F chosen) const {
        mark(words, chosen, [](const float(&)[4], int) {});
    }

    // This thread's share of the bits: up to `pieces` words from words[first / 32] on, or 8 or 16 bits of one.
    struct Share {
        int first, width, pieces;
    };
    __device__ Share share() const {
        int pieces = (num_keys + THREADS * 32 - 1) / (THREADS * 32);
        int width = num_keys <= THREADS * 8 ? 8 : num_keys <= THREADS * 16 ? 16 : 32;
        return {(int)threadIdx.x * width * pieces, width, pieces};
    }
    __device__ u32 piece(const u32* words, const Share& share, int i) const {
        int first = share.first + i * 32;
        return first < num_keys ? words[first / 32] >> first % 32 & FULL >> (32 - share.width) : 0u;
    }
    __device__ int bits_of(const u32* words, const Share& share) const {
        int n = 0;
        for (int i = 0; i < share.pieces; ++i) n += __popc(piece(words, share, i));
        return n;
    }

    // Bin 0 takes NaN too. In a cluster most keys lie in it, and those are not counted.
    __device__ void count(const Bins& bins) const {
        each_four([&](const float(&x)[4], int) {
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                float step = fminf(fmaxf(bins.step(x[u]), BIN_0), BIN_0 + (BINS - 1));
                int* bin = (int*)((char*)shared.bins + (__float_as_uint(step) % (BINS * 4) & ~3u));
                if (BLOCKS == 1 || step >= BIN_0 + 1) atomicAdd(bin, 1);
            }
        });
    }

    // A list of what all blocks have in theirs, one warp to a block.
    __device__ const u64* rivals_of_row(int& num_rivals) {
        if (warp < BLOCKS) {
            const u64* theirs = Team::at_block(shared.rivals, warp);
            u64 rival[MAX_RIVALS / 32];
#pragma unroll
            for (int u = 0; u < MAX_RIVALS / 32; ++u) rival[u] = theirs[lane + u * 32];
            int n = *Team::at_block(&shared.num_rivals, warp);
#pragma unroll
            for (int u = 0; u < MAX_RIVALS / 32; ++u) {
                if (lane + u * 32 < n) shared.row_rivals[atomicAdd(&shared.num_row_rivals, 1)] = rival[u];
            }
        }
        __syncthreads();
        num_rivals = shared.num_row_rivals;
        return shared.row_rivals;
    }

    // Mark the keys that reach a bin; of its own, at most MAX_RIVALS, the best `room`, found by comparing all pairs.
    template <class R, class H>
    __device__ void choose_by_pairs(R reached, H holds, int room) {
        auto collect = [&](const float(&x)[4], int first) {
            if (!(holds(x[0]) | holds(x[1]) | holds(x[2]) | holds(x[3]))) return;
            for (int u = 0; u < 4; ++u) {
                if (!holds(x[u])) continue;
                u32 at = first_key + first + u * 32 + lane;
                shared.rivals[atomicAdd(&shared.num_rivals, 1)] = (u64)rank_of(x[u]) << 32 | ~at;
            }
        };
        mark(shared.chosen, reached, collect);
        Team::meet();
        const u64* rivals = shared.rivals;
        int num_rivals = shared.num_rivals;
        if (BLOCKS > 1) rivals = rivals_of_row(num_rivals);
        if (threadIdx.x < num_rivals) {
            u64 own = rivals[threadIdx.x];
            int better = 0;
            for (int i = 0; i < num_rivals; ++i) better += rivals[i] > own;
            int at = (int)~(u32)own - first_key;
            if (better >= room && at >= 0 && at < num_keys) atomicAnd(&shared.chosen[at / 32], ~(1u << at % 32));
        }
    }

    // Mark the K best by the bits of scores, those in question and with `beyond` keys above them. Each turn counts what
    // is left in bins, looks how far apart it lies, and goes on with the bin of the K-th. Called with empty bins.
    __device__ void choose_by_bits(const Bins& bins, int beyond) {
        u32 low = MINUS_INF, high = ~MINUS_INF;  // of any score
        auto left = [&](float x) { return rank_of(x) - low <= high - low; };
        for (;; empty_bins()) {
            int shift = max(0, 32 - LOG2_BINS - __clz(high - low));
            u32 least = FULL, most = 0;
            each_four([&](const float(&x)[4], int) {
#pragma unroll
                for (int u = 0; u < 4; ++u) {
                    if (!left(x[u]) || !bins.holds(x[u])) continue;
                    u32 rank = rank_of(x[u]);
                    least = min(least, rank), most = max(most, rank);
                    atomicAdd(&shared.bins[(rank - low) >> shift], 1);
                }
            });
            Extent counted = All::template extent<false>(least, most);
            find(beyond);
            int reached = shared.found.reached;
            if (reached == 0) return mark(shared.chosen, [](float x) { return x == x; });  // fewer than K scores
            beyond = shared.found.beyond;
            low += (u32)shared.found.bin << shift;
            high = min(min(high, low + ((1u << shift) - 1)), counted.high), low = max(low, counted.low);
            auto reaches = [&](float x) { return rank_of(x) >= low; };
            if (reached == K) return mark(shared.chosen, reaches);
            if (reached - beyond <= MAX_RIVALS) return choose_by_pairs(reaches, left, K - beyond);
            if (low == high) return choose_ties(score_of(low), K - beyond);
        }
    }

    // Mark the keys above a score, and as many that score the same as there is room for, in the order of positions.
    __device__ void choose_ties(float last, int room) {
        auto equal = [&](const float(&x)[4], int first) {
            write_bits(shared.equal, x, first, [&](float x) { return x == last; });
        };
        mark(shared.chosen, [&](float x) { return x > last; }, equal);
        __syncthreads();
        Share own = share();
        Sum sum = sum_before_in_row(bits_of(shared.equal, own));
        room -= sum.before + sum.place;
        for (int i = 0; i < own.pieces; ++i) {
            u32 equal = piece(shared.equal, own, i), kept = 0;
            for (; equal && room > 0; equal &= equal - 1, --room) kept |= equal & -equal;
            int first = own.first + i * 32;
            if (kept) atomicOr(&shared.chosen[first / 32], kept << first % 32);
        }
    }

    __device__ void choose(const float* row, int row_keys) {
        float least, most;
        load(row, row_keys, least, most);
        Team::wait_for_start();
        Extent scores = All::template extent<true>(rank_of(least), rank_of(most));
        if (row_keys <= K) return mark(shared.chosen, [](float x) { return x == x; });
        Bins bins(score_of(scores.low), score_of(scores.high));
        int beyond = 0;
        if (bins.spread(score_of(scores.middle))) {
            count(bins);
            find(0);
            int reached = shared.found.reached;
            beyond = shared.found.beyond;
            bins.look_at(shared.found.bin);
            auto reaches = [&](float x) { return bins.reached(x); };
            if (reached == K) return mark(shared.chosen, reaches);
            if (reached && reached - beyond <= MAX_RIVALS) {
                return choose_by_pairs(reaches, [&](float x) { return bins.holds(x); }, K - beyond);
            }
            empty_bins();
        } else {
            bins.look_at_all();
        }
        choose_by_bits(bins, beyond);
    }

    // Positions of the chosen in ascending order, then -1.
    __device__ void write(int* out) {
        __syncthreads();
        Share own = share();
        Sum sum = sum_before_in_row(bits_of(shared.chosen, own));
        int place = sum.place, *in_order = (int*)shared.keys;
        for (int i = 0; i < own.pieces; ++i) {
            int first = first_key + own.first + i * 32;
            for (u32 bits = piece(shared.chosen, own, i); bits; bits &= bits - 1) {
                in_order[place++] = first + __ffs(bits) - 1;
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < sum.of_block; i += THREADS) out[sum.before + i] = in_order[i];
        if (block < BLOCKS - 1) return;
        for (int i = sum.total + threadIdx.x; i < K; i += THREADS) out[i] = -1;
    }

    __device__ void select(const float* row, int row_keys, int* out) {
        choose(row, row_keys);
        write(out);
    }
};

}  // namespace held

// Later blocks take earlier rows: causal rows grow, and the last had better be short.
#define TOPK_HELD_KERNEL(name, attributes, THREADS, Team, IN_SHARED)                                                   \
    extern "C" __global__ void attributes name(const float* logits, const int* key_start, const int* key_end,          \
                                               int* out, int M, int N, int row_stride, int out_stride, int K) {        \
        extern __shared__ __align__(16) char memory[];                                                                 \
        int row = M - 1 - blockIdx.x / held::Team::BLOCKS;                                                             \
        int start = max(key_start[row], 0), num_keys = keys_between(start, key_end[row], N);                           \
        held::Row<THREADS, held::Team, IN_SHARED> selection(memory, K);                                                \
        selection.select(logits + (long long)row * row_stride + start, num_keys, out + (long long)row * out_stride);   \
    }

TOPK_HELD_KERNEL(topk_rows_8k, __launch_bounds__(256, 5), 256, Alone, true)
TOPK_HELD_KERNEL(topk_rows_16k, __launch_bounds__(512, 3), 512, Alone, true)
