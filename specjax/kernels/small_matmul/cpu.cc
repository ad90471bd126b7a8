// y[n, o] = sum_k x[n, k] * w[o, k] (* scale[o]) in float32, for weights in float32, bfloat16 or int8. Every
// weight is read from memory once: for up to 8 rows together, and for more of them from the cache. A sum is
// added in an order that does not depend on the other rows and outputs, nor on how many there are.

#include "claimed_chunks.h"
#include "vectors.h"

namespace ffi = xla::ffi;

namespace specjax {
namespace {

// Every sum has two chains of additions: one alone would wait for itself.
constexpr int kChains = 2, kStep = kChains * kLanes;
constexpr int kMaxRows = 6;  // of a block: with them and both chains the sums fill the registers
constexpr bool kHasMany = kRegisters == 32;
constexpr int kMaxRowsAlone = kHasMany ? 8 : 6;  // of one block without others, all the work beside the reading
constexpr int kOutsInCache = kHasMany ? 2 : 1;  // computed together where their weights are cached
constexpr int64_t kAhead = 4096;  // bytes of weights asked for before they are needed
constexpr int64_t kMinChunk = 16, kMaxChunk = 96;  // outputs that a thread takes at a time

template <typename Weight>
struct Problem {
  const float* x;
  const Weight* w;
  const float* scale;  // nullptr: all are 1
  float* y;
  int64_t rows, in_size, out_size;
};

// Adds the products of the vectors at `k`.
template <int kRows, int kOuts, typename Weight>
inline void Add(Vector (&sums)[kOuts][kRows], const float* x, const Weight* w, int64_t in_size, int64_t k) {
  Vector inputs[kRows];
#pragma GCC unroll 8
  for (int n = 0; n < kRows; ++n) inputs[n] = Load(x + n * in_size + k);
#pragma GCC unroll 8
  for (int o = 0; o < kOuts; ++o) {
    const Vector weight = Load(w + o * in_size + k);
#pragma GCC unroll 8
    for (int n = 0; n < kRows; ++n) sums[o][n] = MultiplyAdd(weight, inputs[n], sums[o][n]);
  }
}

// Dot products of kRows rows of x with kOuts rows of w. One row of w alone comes from memory, which is fastest
// read in one go.
template <int kRows, int kOuts, typename Weight>
void Block(const float* x, const Weight* w, int64_t in_size, const float* scale, float* y, int64_t out_size) {
  Vector even[kOuts][kRows] = {}, odd[kOuts][kRows] = {};
  int64_t k = 0;
#pragma GCC unroll 1
  for (; k + kStep <= in_size; k += kStep) {
    // With more to compute for each weight, the processor alone does not look far enough ahead.
    if (kOuts == 1 && kRows > 2) __builtin_prefetch(reinterpret_cast<const char*>(w + k) + kAhead, 0, 2);
    Add<kRows, kOuts>(even, x, w, in_size, k);
    Add<kRows, kOuts>(odd, x, w, in_size, k + kLanes);
  }
  if (k + kLanes <= in_size) {
    Add<kRows, kOuts>(even, x, w, in_size, k);
    k += kLanes;
  }
#pragma GCC unroll 8
  for (int o = 0; o < kOuts; ++o) {
#pragma GCC unroll 8
    for (int n = 0; n < kRows; ++n) {
      float sum = Sum(even[o][n] + odd[o][n]);
      for (int64_t rest = k; rest < in_size; ++rest) sum += x[n * in_size + rest] * Widen(w[o * in_size + rest]);
      y[n * out_size + o] = scale ? sum * scale[o] : sum;
    }
  }
}

template <int kRows, int kOuts, typename Weight>
void Outputs(const Problem<Weight>& p, int64_t row, int64_t begin, int64_t end) {
  const auto block = [&](auto* function, int64_t out) {
    const float* scale = p.scale ? p.scale + out : nullptr;
    float* y = p.y + row * p.out_size + out;
    function(p.x + row * p.in_size, p.w + out * p.in_size, p.in_size, scale, y, p.out_size);
  };
  int64_t out = begin;
  for (; out + kOuts <= end; out += kOuts) block(&Block<kRows, kOuts, Weight>, out);
  for (; out < end; ++out) block(&Block<kRows, 1, Weight>, out);
}

template <int kOuts, typename Weight>
void Rows(const Problem<Weight>& p, int64_t row, int64_t size, int64_t begin, int64_t end) {
  static_assert(kMaxRows <= kMaxRowsAlone && kMaxRowsAlone <= 8);
  switch (size) {
    case 1: return Outputs<1, kOuts>(p, row, begin, end);
    case 2: return Outputs<2, kOuts>(p, row, begin, end);
    case 3: return Outputs<3, kOuts>(p, row, begin, end);
    case 4: return Outputs<4, kOuts>(p, row, begin, end);
    case 5: return Outputs<5, kOuts>(p, row, begin, end);
    case 6: return Outputs<6, kOuts>(p, row, begin, end);
    case 7: return Outputs<7, kOuts>(p, row, begin, end);
    default: return Outputs<8, kOuts>(p, row, begin, end);
  }
}

// Outputs from `begin` to `end` of all rows, in blocks of nearly equal size.
template <typename Weight>
void Chunk(const Problem<Weight>& p, int64_t begin, int64_t end) {
  int64_t row = 0, blocks = p.rows <= kMaxRowsAlone ? 1 : (p.rows + kMaxRows - 1) / kMaxRows;
  for (; blocks > 0; --blocks) {
    const int64_t size = (p.rows - row + blocks - 1) / blocks;
    row == 0 ? Rows<1>(p, row, size, begin, end) : Rows<kOutsInCache>(p, row, size, begin, end);
    row += size;
  }
}

template <typename Weight>
ffi::Error Run(ffi::ThreadPool& pool, const ffi::Buffer<ffi::F32>& x, const Weight* w, const float* scale,
               ffi::ResultBuffer<ffi::F32>& y) {
  const Problem<Weight> problem = {x.typed_data(),      w, scale, y->typed_data(), x.dimensions()[0],
                                   x.dimensions()[1], y->dimensions()[1]};
  if (!IsAligned(problem.x) || !IsAligned(w) || !IsAligned(scale) || !IsAligned(problem.y))
    return ffi::Error::InvalidArgument("small_matmul: a buffer is not aligned to its elements");
  // Every thread gets several chunks.
  const int64_t share = problem.out_size / (4 * std::max<int64_t>(pool.num_threads(), 1));
  const int64_t chunk = std::clamp(share, kMinChunk, kMaxChunk);
  ForEachChunk(pool, (problem.out_size + chunk - 1) / chunk, [problem, chunk](int64_t i) {
    Chunk(problem, i * chunk, std::min((i + 1) * chunk, problem.out_size));
  });
  return ffi::Error::Success();
}

// An error where x [N, I], w [O, I] and y [N, O] do not fit each other.
ffi::Error Check(ffi::AnyBuffer::Dimensions x, ffi::AnyBuffer::Dimensions w, ffi::AnyBuffer::Dimensions y) {
  if (x.size() != 2 || w.size() != 2 || y.size() != 2)
    return ffi::Error::InvalidArgument("small_matmul takes x [N, I], w [O, I] and gives y [N, O]");
  if (x[1] != w[1] || y[0] != x[0] || y[1] != w[0])
    return ffi::Error::InvalidArgument("small_matmul: the shapes of x [N, I], w [O, I], y [N, O] do not fit");
  if (x[0] < 1 || x[1] < 1 || w[0] < 1)
    return ffi::Error::InvalidArgument("small_matmul takes at least one row, input and output");
  return ffi::Error::Success();
}

ffi::Error SmallMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                       ffi::ResultBuffer<ffi::F32> y) {
  if (ffi::Error error = Check(x.dimensions(), w.dimensions(), y->dimensions()); error.failure()) return error;
  if (w.element_type() == ffi::F32) return Run(pool, x, static_cast<const float*>(w.untyped_data()), nullptr, y);
  if (w.element_type() == ffi::BF16)
    return Run(pool, x, static_cast<const Bfloat16*>(w.untyped_data()), nullptr, y);
  return ffi::Error::InvalidArgument("small_matmul takes weights in float32 or bfloat16, or int8 with a scale");
}

ffi::Error ScaledMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> w,
                        ffi::Buffer<ffi::F32> scale, ffi::ResultBuffer<ffi::F32> y) {
  if (ffi::Error error = Check(x.dimensions(), w.dimensions(), y->dimensions()); error.failure()) return error;
  if (scale.dimensions().size() != 1 || scale.dimensions()[0] != w.dimensions()[0])
    return ffi::Error::InvalidArgument("small_matmul: the shapes of w [O, I] and scale [O] do not fit");
  return Run(pool, x, w.typed_data(), scale.typed_data(), y);
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_small_matmul, specjax::SmallMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_scaled_matmul, specjax::ScaledMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
