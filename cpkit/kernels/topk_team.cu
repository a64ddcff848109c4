// Sums and extents over all threads that select for a row: those of one block, or of a team of blocks. Follows
// topk_order.cu; topk_held.cu selects with them.
//
//     lanes of a warp      shuffles and reductions
//     warps of a block     a word each, in the block's shared memory
//     blocks of a team     a word each, in the shared memory of all of them

namespace held {

// A team of one block. topk_cluster.cu has the other team.
struct Alone {
    static constexpr int BLOCKS = 1;
    __device__ static int rank() { return 0; }
    template <class T>
    __device__ static T* at_block(T* mine, int) {
        return mine;
    }
    __device__ static void started() {}
    __device__ static void wait_for_start() {}
    __device__ static void meet() { __syncthreads(); }
};

// Of a sum over threads: what those before this one in its block have, all of the block, blocks before it, all.
struct Sum {
    int place, of_block, before, total;
};

// The least and the most rank, and the least of the warps' most.
struct Extent {
    u32 low, high, middle;
};

// Team: Alone, or a cluster. All THREADS of a block call each function, and all blocks where its words say "row".
template <int THREADS, class Team>
struct Threads {
    static constexpr int BLOCKS = Team::BLOCKS, WARPS = THREADS / 32;
    static constexpr int MAX_BLOCKS = 16;  // of any team

    struct Partial {  // [turn][which result][warp or block]
        u32 of_warp[2][2][32];
        u32 of_block[2][3][MAX_BLOCKS];
    };

    Partial& partial;
    int lane, warp, block;
    int turn = 0, block_turn = 0;  // partial results alternate between two places, so one barrier a reduction is enough

    __device__ Threads(Partial& partial)
        : partial(partial), lane(threadIdx.x % 32), warp(threadIdx.x / 32), block(Team::rank()) {}

    // Values of each block of the row, in shared memory of every one of them.
    __device__ u32 (*tell_all(u32 a, u32 b = 0, u32 c = 0))[MAX_BLOCKS] {
        u32(*of_block)[MAX_BLOCKS] = partial.of_block[block_turn];
        block_turn ^= 1;
        if (threadIdx.x < BLOCKS) {
            *Team::at_block(&of_block[0][block], threadIdx.x) = a;
            *Team::at_block(&of_block[1][block], threadIdx.x) = b;
            *Team::at_block(&of_block[2][block], threadIdx.x) = c;
        }
        Team::meet();
        return of_block;
    }

    // Of n over the threads of this block.
    __device__ Sum sum_before(int n) {
        u32* part = partial.of_warp[turn][0];
        turn ^= 1;
        int of_block, place = ::sum_before<WARPS>(n, lane, warp, part, of_block);
        return {place, of_block, 0, of_block};
    }

    // Of n over the threads of the row.
    __device__ Sum sum_before_in_row(int n) {
        Sum sum = sum_before(n);
        if (BLOCKS == 1) return sum;
        const u32* counts = tell_all(sum.of_block)[0];
        int count = lane < BLOCKS ? (int)counts[lane] : 0;
        sum.total = __reduce_add_sync(FULL, count);
        sum.before = __reduce_add_sync(FULL, lane < block ? count : 0);
        return sum;
    }

    // The most of the warps' ranks but for one warp's, whose most may be an outlier. Told to lanes below WARPS.
    __device__ u32 most_but_one(u32 rank) const {
        u32 most = __reduce_max_sync(FULL, rank);
        int first = __ffs(__ballot_sync(FULL, rank == most)) - 1;
        u32 rest = __reduce_max_sync(FULL, lane == first ? 0u : rank);
        return rest > MINUS_INF ? rest : most;
    }

    // Of the row's ranks. TRIMMED: each block leaves one warp's out at either end. Ranks of warps without any are those
    // of +inf and -inf, or beyond.
    template <bool TRIMMED>
    __device__ Extent extent(u32 low, u32 high) {
        low = __reduce_min_sync(FULL, low);
        high = __reduce_max_sync(FULL, high);
        u32(*part)[32] = partial.of_warp[turn];
        turn ^= 1;
        if (lane == 0) part[0][warp] = low, part[1][warp] = high;
        __syncthreads();
        u32 below = lane < WARPS ? ~part[0][lane] : 0u, above = lane < WARPS ? part[1][lane] : 0u;
        low = ~(TRIMMED ? most_but_one(below) : __reduce_max_sync(FULL, below));
        high = TRIMMED ? most_but_one(above) : __reduce_max_sync(FULL, above);
        u32 middle = TRIMMED ? __reduce_min_sync(FULL, above > MINUS_INF ? above : FULL) : 0u;
        if (BLOCKS == 1) return {low, high, middle};
        u32(*of_block)[MAX_BLOCKS] = tell_all(low, high, middle);
        low = __reduce_min_sync(FULL, of_block[0][lane % BLOCKS]);
        high = __reduce_max_sync(FULL, of_block[1][lane % BLOCKS]);
        return {low, high, __reduce_min_sync(FULL, of_block[2][lane % BLOCKS])};
    }
};

}  // namespace held
