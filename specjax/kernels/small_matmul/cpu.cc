// y[n, o] = sum_k x[n, k] * w[o, k] in float32 for a few rows x: every weight is read from memory once for
// up to 8 of them. A row's sums are added in an order that does not depend on the other rows.

#include "claimed_chunks.h"

namespace ffi = xla::ffi;

namespace specjax {
namespace {

constexpr int64_t kMaxRows = 8;
constexpr int64_t kChunk = 96;  // outputs that a thread takes at a time

struct Problem {
  const float* x;
  const float* w;
  float* y;
  int64_t rows, in_size, out_size;
};

// Dot products of kRows rows of x with kOuts rows of w from `out` on. Accumulators stay in registers.
template <int kRows, int kOuts>
void Block(const Problem& p, const float* x, float* y, int64_t out) {
  const float* w = p.w + out * p.in_size;
  Vector sums[kOuts][kRows] = {};
  int64_t k = 0;
  for (; k + kLanes <= p.in_size; k += kLanes) {
    Vector inputs[kRows];
    for (int n = 0; n < kRows; ++n) inputs[n] = Load(x + n * p.in_size + k);
    for (int o = 0; o < kOuts; ++o) {
      const float* weights = w + o * p.in_size + k;
      __builtin_prefetch(weights + kOuts * p.in_size);
      const Vector weight = Load(weights);
      for (int n = 0; n < kRows; ++n) sums[o][n] += weight * inputs[n];
    }
  }
  for (int o = 0; o < kOuts; ++o) {
    for (int n = 0; n < kRows; ++n) {
      float sum = Sum(sums[o][n]);
      for (int64_t rest = k; rest < p.in_size; ++rest) sum += x[n * p.in_size + rest] * w[o * p.in_size + rest];
      y[n * p.out_size + out + o] = sum;
    }
  }
}

template <int kRows>
void Outputs(const Problem& p, int64_t first_row, int64_t begin, int64_t end) {
  constexpr int kOuts = kRows <= 3 ? 4 : kRows <= 6 ? 2 : 1;
  const float* x = p.x + first_row * p.in_size;
  float* y = p.y + first_row * p.out_size;
  int64_t out = begin;
  for (; out + kOuts <= end; out += kOuts) Block<kRows, kOuts>(p, x, y, out);
  for (; out < end; ++out) Block<kRows, 1>(p, x, y, out);
}

void Chunk(const Problem& p, int64_t begin, int64_t end) {
  for (int64_t row = 0; row < p.rows; row += kMaxRows) {
    switch (std::min(kMaxRows, p.rows - row)) {
      case 1: Outputs<1>(p, row, begin, end); break;
      case 2: Outputs<2>(p, row, begin, end); break;
      case 3: Outputs<3>(p, row, begin, end); break;
      case 4: Outputs<4>(p, row, begin, end); break;
      case 5: Outputs<5>(p, row, begin, end); break;
      case 6: Outputs<6>(p, row, begin, end); break;
      case 7: Outputs<7>(p, row, begin, end); break;
      default: Outputs<8>(p, row, begin, end); break;
    }
  }
}

ffi::Error SmallMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w,
                       ffi::ResultBuffer<ffi::F32> y) {
  const auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions();
  if (xs.size() != 2 || ws.size() != 2 || ys.size() != 2)
    return ffi::Error::InvalidArgument("small_matmul takes x [N, I], w [O, I] and gives y [N, O]");
  if (xs[1] != ws[1] || ys[0] != xs[0] || ys[1] != ws[0])
    return ffi::Error::InvalidArgument("small_matmul: the shapes of x [N, I], w [O, I], y [N, O] do not fit");
  const Problem problem = {x.typed_data(), w.typed_data(), y->typed_data(), xs[0], xs[1], ws[0]};
  ForEachChunk(pool, (ws[0] + kChunk - 1) / kChunk, [problem](int64_t i) {
    Chunk(problem, i * kChunk, std::min((i + 1) * kChunk, problem.out_size));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_small_matmul, specjax::SmallMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
