// Top-k of few rows: 8 blocks share a row, a cluster, and see each other's shared memory. The selection is that of
// topk_held.cu, which this follows; for chips that have clusters, of compute capability 9 on.
//
//     block      0         1         2       ...       7
//     row        part      part      part              part       at once: in shared memory, or longer and read twice
//     each       reads the bins of all, chooses in its part, writes behind what blocks before it chose

namespace held {

struct Cluster {
    static constexpr int BLOCKS = 8;
    __device__ static int rank() { return __clusterRelativeBlockRank(); }
    template <class T>
    __device__ static T* at_block(T* mine, int of) {
        return (T*)__cluster_map_shared_rank(mine, of);
    }
    __device__ static void started() { __cluster_barrier_arrive_relaxed(); }
    // The shared memory of a block that has not started may not be touched.
    __device__ static void wait_for_start() { __cluster_barrier_wait(); }
    __device__ static void meet() { __cluster_barrier_arrive(), __cluster_barrier_wait(); }
};

}  // namespace held

TOPK_HELD_KERNEL(topk_rows_128k, __cluster_dims__(8, 1, 1) __launch_bounds__(512, 2), 512, Cluster, true)
TOPK_HELD_KERNEL(topk_rows_1m, __cluster_dims__(8, 1, 1) __launch_bounds__(512, 1), 512, Cluster, false)
