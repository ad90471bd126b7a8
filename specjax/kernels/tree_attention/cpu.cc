// Attention of a few nodes to the cached prefix and their own ancestors, in float32. Slots that a node does
// not see are not read, so a long cache costs nothing until it is filled. A node's result does not depend,
// to the bit, on the other nodes or rows.

#include <cmath>
#include <limits>
#include <vector>

#include "claimed_chunks.h"

namespace ffi = xla::ffi;

namespace specjax {
namespace {

struct Problem {
  const float *queries, *keys, *values;
  const int32_t* length;
  const bool* mask;
  float* out;
  int64_t nodes, query_heads, kv_heads, head_dim, slots, scratch;
};

float Dot(const float* a, const float* b, int64_t size) {
  Vector sums = {};
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) sums += Load(a + k) * Load(b + k);
  float sum = Sum(sums);
  for (; k < size; ++k) sum += a[k] * b[k];
  return sum;
}

// All queries of one node that share one head of one row.
void Node(const Problem& p, int64_t row, int64_t node, int64_t kv_head) {
  const int64_t group = p.query_heads / p.kv_heads, dim = p.head_dim;
  const float* keys = p.keys + (row * p.kv_heads + kv_head) * p.slots * dim;
  const float* values = p.values + (row * p.kv_heads + kv_head) * p.slots * dim;
  const bool* mask = p.mask + (row * p.nodes + node) * p.scratch;
  const int64_t first = (row * p.nodes + node) * p.query_heads + kv_head * group;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));

  const int64_t length = std::clamp<int64_t>(p.length[row], 0, p.slots);
  std::vector<int32_t> seen;
  seen.reserve(length + p.scratch);
  for (int64_t s = 0; s < length; ++s) seen.push_back(s);
  for (int64_t j = 0; j < p.scratch && length + j < p.slots; ++j)
    if (mask[j]) seen.push_back(length + j);

  std::vector<float> weights(seen.size());
  for (int64_t query = first; query < first + group; ++query) {
    const float* q = p.queries + query * dim;
    float* out = p.out + query * dim;
    float highest = -std::numeric_limits<float>::infinity(), total = 0;
    for (size_t i = 0; i < seen.size(); ++i) {
      weights[i] = Dot(q, keys + seen[i] * dim, dim) * scale;
      highest = std::max(highest, weights[i]);
    }
    std::fill(out, out + dim, 0.0f);
    for (size_t i = 0; i < seen.size(); ++i) {
      const float weight = std::exp(weights[i] - highest);
      const float* value = values + seen[i] * dim;
      total += weight;
      for (int64_t k = 0; k < dim; ++k) out[k] += weight * value[k];
    }
    for (int64_t k = 0; k < dim; ++k) out[k] /= total;
  }
}

ffi::Error TreeAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::Buffer<ffi::F32> keys,
                         ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> length,
                         ffi::Buffer<ffi::PRED> mask, ffi::ResultBuffer<ffi::F32> out) {
  const auto qs = queries.dimensions(), ks = keys.dimensions(), vs = values.dimensions();
  const auto ls = length.dimensions(), ms = mask.dimensions(), os = out->dimensions();
  if (qs.size() != 4 || ks.size() != 3 || vs.size() != 3 || ls.size() != 1 || ms.size() != 3 || os.size() != 4)
    return ffi::Error::InvalidArgument(
        "tree_attention takes queries [B, N, Hq, D], keys and values [B * H, S, D], length [B], mask [B, N, M]");
  const int64_t batch = qs[0], kv_heads = batch ? ks[0] / batch : 0;
  bool fits = batch > 0 && ks[0] % batch == 0 && kv_heads > 0 && qs[2] % kv_heads == 0 && ks[2] == qs[3];
  fits = fits && ls[0] == batch && ms[0] == batch && ms[1] == qs[1];
  for (int i = 0; i < 3; ++i) fits = fits && ks[i] == vs[i];
  for (int i = 0; i < 4; ++i) fits = fits && qs[i] == os[i];
  if (!fits) return ffi::Error::InvalidArgument("tree_attention: the shapes of its arguments do not fit");
  const Problem p = {queries.typed_data(), keys.typed_data(), values.typed_data(), length.typed_data(),
                     mask.typed_data(), out->typed_data(), qs[1], qs[2], kv_heads, qs[3], ks[1], ms[2]};
  ForEachChunk(pool, batch * p.nodes * kv_heads, [p](int64_t i) {
    const int64_t node = i / p.kv_heads;
    Node(p, node / p.nodes, node % p.nodes, i % p.kv_heads);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_tree_attention, specjax::TreeAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
