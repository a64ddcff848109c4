// Bins of equal width for the scores of a row. Follows topk_order.cu; topk_held.cu counts in them.
//
//     score      -2.9     0.7           1.8            2.9           4.0   4.4
//     bin           0     1 ............................. BINS - 1       BINS - 1       least 0.7, most 4.0
//
// A key's bin is a step of fma(x, scale, offset), which never falls as x rises: bins are right for any scale, and fine
// for one that comes from most of the row's scores.

namespace held {

constexpr int LOG2_BINS = 10, BINS = 1 << LOG2_BINS;
constexpr float BIN_0 = 2097152.0f;  // from 2^21 on floats are quarters: their bits end in bin * 4 + quarters

__device__ bool finite(float x) { return fabsf(x) < __uint_as_float(INF_BITS); }

// Bins of equal width, and which of their keys are in question: bottom <= fma(x, scale, offset) < top.
struct Bins {
    float scale, offset, bottom, top;

    __device__ Bins(float least, float most) : scale((BINS - 2) / (most - least)), offset(BIN_0 + 1 - least * scale) {}
    __device__ float step(float x) const { return fmaf(x, scale, offset); }
    // Whether the least of the warps' best scores lies above the lowest bins; false where there are no usable bounds.
    __device__ bool spread(float middle) const {
        return scale > 1e-30f && scale < 1e30f && finite(offset) && step(middle) >= BIN_0 + 2;
    }
    __device__ void look_at(int bin) {
        bottom = bin ? BIN_0 + bin : -__uint_as_float(INF_BITS);
        top = bin < BINS - 1 ? BIN_0 + (bin + 1) : __uint_as_float(FULL);
    }
    __device__ void look_at_all() {
        scale = 1, offset = 0, bottom = -__uint_as_float(INF_BITS), top = __uint_as_float(FULL);
    }
    __device__ bool reached(float x) const { return step(x) >= bottom; }
    __device__ bool holds(float x) const { return step(x) >= bottom && !(step(x) >= top); }
};

}  // namespace held
