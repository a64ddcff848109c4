// As much of CUDA C++ as the sources of top-k need, on a CPU: their kernels run thread by thread, so that what they
// select can be tested without a GPU. emulated_cuda.py puts this file before the source and calls it.
//
//     thread 0    -----| waits                 |---| waits          each has a stack of its own and runs until it must
//     thread 1         |---------| waits           |------|         wait for others; who runs next is drawn. So atomic
//     thread 2                   |-------------|          |---      operations are whole, and a missing barrier shows.
//
// A collective of a warp needs all 32 lanes. The blocks of a cluster run together, and see each other's shared memory,
// which holds garbage when a block begins; clusters (or blocks that are none) run one by one, in an order that is drawn
// too. Some warps or blocks stay behind for a while. The process ends where all threads wait, where a score outside the
// given ones is read, and where a block reaches for the memory of one that has not begun.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
using std::max;
using std::min;

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct Index { int x; };
inline Index threadIdx, blockIdx;
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {

constexpr size_t STACK = (32 << 10) + 576;  // no power of two: else stacks would share a few lines of the cache
constexpr size_t MOST_THREADS = 8 * 512, SHARED = 128 << 10;

// A place where `size` threads meet; `turn` goes up when the last of them comes.
struct Meeting {
    int size = 0, came = 0;
    long turn = 0;
};

struct Warp {
    Meeting meeting{32};
    unsigned given[2][32];
};

struct Block {
    int index;
    bool begun = false;
    Meeting meeting;
    std::vector<Warp> warps;
    alignas(16) char shared[SHARED];
};

struct Thread {
    int index;
    Block* block;
    Warp* warp;
    Meeting* waits_for = nullptr;
    long turn = 0;
    bool begun = false, done = false;
    ucontext_t first;
    jmp_buf place;
};

inline Thread* now;
inline std::unique_ptr<Block[]> cluster;
inline Meeting cluster_meeting;
inline jmp_buf scheduler;
inline void (*call_kernel)(void*);
inline void* call;
inline const float *scores_begin, *scores_end;

inline void meet(Meeting& meeting) {
    if (++meeting.came == meeting.size) {
        meeting.came = 0, ++meeting.turn;
        return;
    }
    now->waits_for = &meeting, now->turn = meeting.turn;
    if (_setjmp(now->place) == 0) _longjmp(scheduler, 1);
}

// What each lane of a warp gives, seen by all. Two places alternate: a late lane still reads the one before.
inline const unsigned* give(unsigned value) {
    unsigned* given = now->warp->given[now->warp->meeting.turn % 2];
    given[now->index % 32] = value;
    meet(now->warp->meeting);
    return given;
}

inline void begin() {
    call_kernel(call);
    now->done = true;
    _longjmp(scheduler, 1);
}

inline void resume(Thread& thread) {
    now = &thread, threadIdx.x = thread.index, blockIdx.x = thread.block->index, thread.waits_for = nullptr;
    if (_setjmp(scheduler)) return;
    if (thread.begun) _longjmp(thread.place, 1);
    thread.begun = true, setcontext(&thread.first);
}

inline void run_cluster(int first, int num_blocks, int num_threads, std::mt19937& random) {
    static const std::unique_ptr<char[]> stacks(new char[STACK * MOST_THREADS]);
    std::vector<Thread> threads(num_blocks * num_threads);
    std::vector<Thread*> left;
    cluster.reset(new Block[num_blocks]);
    cluster_meeting = {num_blocks * num_threads};
    for (Thread& thread : threads) {
        Block& block = cluster[left.size() / num_threads];
        thread.index = left.size() % num_threads, thread.block = &block;
        if (thread.index == 0) {
            block.index = first + left.size() / num_threads;
            block.meeting = {num_threads}, block.warps.resize(num_threads / 32);
        }
        thread.warp = &block.warps[thread.index / 32];
        getcontext(&thread.first);
        thread.first.uc_stack.ss_sp = stacks.get() + STACK * left.size();
        thread.first.uc_stack.ss_size = STACK;
        makecontext(&thread.first, begin, 0);
        left.push_back(&thread);
    }
    unsigned late = random();  // warps, or blocks, that stay behind for a while, however far the others get
    bool late_blocks = num_blocks > 1;
    while (!left.empty()) {
        std::shuffle(left.begin(), left.end(), random);
        bool all_wait = true, moved = false;
        for (Thread* thread : left) {
            if (thread->waits_for && thread->waits_for->turn == thread->turn) continue;
            all_wait = false;
            int place = late_blocks ? thread->block->index : thread->warp - thread->block->warps.data();
            if (late >> place % 32 & 1) continue;
            if (!thread->block->begun) {
                auto memory = (unsigned*)thread->block->shared;
                std::generate(memory, memory + SHARED / sizeof(unsigned), std::ref(random));
            }
            thread->block->begun = moved = true, resume(*thread);
        }
        if (all_wait) fprintf(stderr, "block %d: all threads wait\n", blockIdx.x), abort();
        if (!moved || random() % 16 == 0) late = random(), late_blocks = num_blocks > 1 && random() % 2;
        left.erase(std::remove_if(left.begin(), left.end(), [](Thread* t) { return t->done; }), left.end());
    }
}

// sizes: blocks, blocks a cluster, threads a block, seed. arguments: an address for each, as the driver takes them.
template <class... A, size_t... I>
void run(void (*kernel)(A...), void** arguments, const int* sizes, std::index_sequence<I...>) {
    auto with_arguments = [&] { kernel(*(A*)arguments[I]...); };
    call = &with_arguments, call_kernel = [](void* of) { (*(decltype(with_arguments)*)of)(); };
    std::mt19937 random(sizes[3]);
    std::vector<int> order(sizes[0] / sizes[1]);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (int i : order) run_cluster(i * sizes[1], sizes[1], sizes[2], random);
}
template <class... A>
void run(void (*kernel)(A...), void** arguments, const int* sizes) {
    run(kernel, arguments, sizes, std::index_sequence_for<A...>());
}

template <class To, class From>
To same_bits(From value) {
    To to;
    memcpy(&to, &value, sizeof to);
    return to;
}

template <class Fold>
unsigned fold(unsigned value, Fold with) {
    const unsigned* given = give(value);
    return std::accumulate(given + 1, given + 32, given[0], with);
}

}  // namespace emulated

#define SHARED_MEMORY (emulated::now->block->shared)

inline void __syncthreads() { emulated::meet(emulated::now->block->meeting); }
inline void __cluster_barrier_arrive() {}
inline void __cluster_barrier_arrive_relaxed() {}
inline void __cluster_barrier_wait() { emulated::meet(emulated::cluster_meeting); }
inline unsigned __clusterRelativeBlockRank() { return emulated::now->block - emulated::cluster.get(); }
inline void* __cluster_map_shared_rank(const void* at, unsigned rank) {
    emulated::Block& block = emulated::cluster[rank];
    if (!block.begun) fprintf(stderr, "block %d: block %d has not begun\n", blockIdx.x, block.index), abort();
    return block.shared + ((const char*)at - SHARED_MEMORY);
}
inline void __threadfence() {}
inline unsigned __ballot_sync(unsigned, bool says) {
    const unsigned* given = emulated::give(says);
    unsigned all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= given[lane] << lane;
    return all;
}
template <class T> T __shfl_sync(unsigned, T value, int lane) { return (T)emulated::give((unsigned)value)[lane]; }
template <class T> T __shfl_up_sync(unsigned, T value, int step) {
    int lane = threadIdx.x % 32;
    return (T)emulated::give((unsigned)value)[lane < step ? lane : lane - step];
}
template <class T> T __reduce_add_sync(unsigned, T value) { return (T)emulated::fold(value, std::plus<unsigned>()); }
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    return emulated::fold(value, [](unsigned a, unsigned b) { return min(a, b); });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return emulated::fold(value, [](unsigned a, unsigned b) { return max(a, b); });
}
template <class T> T atomicAdd(T* at, T value) { return std::exchange(*at, *at + value); }
template <class T> T atomicAnd(T* at, T value) { return std::exchange(*at, *at & value); }
template <class T> T atomicOr(T* at, T value) { return std::exchange(*at, *at | value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs((int)bits); }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline unsigned __float_as_uint(float x) { return emulated::same_bits<unsigned>(x); }
inline float __uint_as_float(unsigned bits) { return emulated::same_bits<float>(bits); }
template <class T> T __ldcg(const T* at) { return *at; }
template <class T> T __ldg(const T* at) {
    if ((const float*)at < emulated::scores_begin || (const float*)(at + 1) > emulated::scores_end) {
        fprintf(stderr, "block %d: a read %td scores from the first\n", blockIdx.x,
                (const float*)at - emulated::scores_begin), abort();
    }
    return *at;
}

extern "C" void may_read(const float* begin, const float* end) {
    emulated::scores_begin = begin, emulated::scores_end = end;
}
