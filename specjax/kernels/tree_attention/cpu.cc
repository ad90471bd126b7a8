// Attention of a few nodes to the cached prefix and their own ancestors, with float32 sums over a cache in
// float32 or bfloat16. Slots that a node does not see are not read, so a long cache costs nothing until it is
// filled. A node's result does not depend, to the bit, on the other nodes or rows.

#include <limits>
#include <vector>

#include "claimed_chunks.h"
#include "vectors.h"

namespace ffi = xla::ffi;

namespace specjax {
namespace {

template <typename Element>
struct Problem {
  const float* queries;
  const Element *keys, *values;
  const int32_t* length;
  const bool* mask;
  float* out;
  int64_t nodes, query_heads, kv_heads, head_dim, slots, scratch;
};

template <typename Element>
float Dot(const float* a, const Element* b, int64_t size) {
  Vector sums = {};
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) sums = MultiplyAdd(Load(a + k), Load(b + k), sums);
  float sum = Sum(sums);
  for (; k < size; ++k) sum += a[k] * Widen(b[k]);
  return sum;
}

template <typename Element>
void AddTimes(float weight, const Element* value, float* out, int64_t size) {
  const Vector weights = weight + Vector{};
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) Store(MultiplyAdd(weights, Load(value + k), Load(out + k)), out + k);
  for (; k < size; ++k) out[k] += weight * Widen(value[k]);
}

// All queries of one node that share one head of one row.
template <typename Element>
void Node(const Problem<Element>& p, int64_t row, int64_t node, int64_t kv_head) {
  const int64_t group = p.query_heads / p.kv_heads, dim = p.head_dim;
  const Element* keys = p.keys + (row * p.kv_heads + kv_head) * p.slots * dim;
  const Element* values = p.values + (row * p.kv_heads + kv_head) * p.slots * dim;
  const bool* mask = p.mask + (row * p.nodes + node) * p.scratch;
  const int64_t first = (row * p.nodes + node) * p.query_heads + kv_head * group;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));

  const int64_t length = std::clamp<int64_t>(p.length[row], 0, p.slots);
  std::vector<int64_t> seen;
  seen.reserve(length + p.scratch);
  for (int64_t s = 0; s < length; ++s) seen.push_back(s);
  for (int64_t j = 0; j < p.scratch && length + j < p.slots; ++j)
    if (mask[j]) seen.push_back(length + j);

  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const size_t padded = (seen.size() + kLanes - 1) / kLanes * kLanes;
  std::vector<float> weights(padded, kNothing);
  for (int64_t query = first; query < first + group; ++query) {
    const float* q = p.queries + query * dim;
    float* out = p.out + query * dim;
    float highest = kNothing;
    for (size_t i = 0; i < seen.size(); ++i) {
      weights[i] = Dot(q, keys + seen[i] * dim, dim) * scale;
      highest = std::max(highest, weights[i]);
    }
    Vector totals = {};
    for (size_t i = 0; i < padded; i += kLanes) {
      const Vector part = Exp(Load(&weights[i]) - highest);
      Store(part, &weights[i]);
      totals += part;
    }
    std::fill(out, out + dim, 0.0f);
    for (size_t i = 0; i < seen.size(); ++i) AddTimes(weights[i], values + seen[i] * dim, out, dim);
    std::fill(weights.begin() + seen.size(), weights.end(), kNothing);
    const float total = Sum(totals);
    for (int64_t k = 0; k < dim; ++k) out[k] /= total;
  }
}

template <typename Element>
ffi::Error Run(ffi::ThreadPool& pool, const Problem<Element>& p, int64_t batch) {
  if (!IsAligned(p.queries) || !IsAligned(p.keys) || !IsAligned(p.values) || !IsAligned(p.length) ||
      !IsAligned(p.out))
    return ffi::Error::InvalidArgument("tree_attention: a buffer is not aligned to its elements");
  ForEachChunk(pool, batch * p.nodes * p.kv_heads, [p](int64_t i) {
    const int64_t node = i / p.kv_heads;
    Node(p, node / p.nodes, node % p.nodes, i % p.kv_heads);
  });
  return ffi::Error::Success();
}

ffi::Error TreeAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::AnyBuffer keys,
                         ffi::AnyBuffer values, ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::PRED> mask,
                         ffi::ResultBuffer<ffi::F32> out) {
  const auto qs = queries.dimensions(), ks = keys.dimensions(), vs = values.dimensions();
  const auto ls = length.dimensions(), ms = mask.dimensions(), os = out->dimensions();
  if (qs.size() != 4 || ks.size() != 3 || vs.size() != 3 || ls.size() != 1 || ms.size() != 3 || os.size() != 4)
    return ffi::Error::InvalidArgument(
        "tree_attention takes queries [B, N, Hq, D], keys and values [B * H, S, D], length [B], mask [B, N, M]");
  if (qs[0] < 1 || qs[1] < 1 || qs[2] < 1 || qs[3] < 1)
    return ffi::Error::InvalidArgument("tree_attention takes at least one row, node, head and dimension");
  const int64_t batch = qs[0], kv_heads = ks[0] / batch;
  bool fits = ks[0] % batch == 0 && kv_heads > 0 && qs[2] % kv_heads == 0 && ks[2] == qs[3];
  fits = fits && ls[0] == batch && ms[0] == batch && ms[1] == qs[1];
  for (int i = 0; i < 3; ++i) fits = fits && ks[i] == vs[i];
  for (int i = 0; i < 4; ++i) fits = fits && qs[i] == os[i];
  if (!fits) return ffi::Error::InvalidArgument("tree_attention: the shapes of its arguments do not fit");
  const auto run = [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    const Problem<Element> problem = {
        queries.typed_data(), static_cast<const Element*>(keys.untyped_data()),
        static_cast<const Element*>(values.untyped_data()), length.typed_data(), mask.typed_data(),
        out->typed_data(), qs[1], qs[2], kv_heads, qs[3], ks[1], ms[2]};
    return Run(pool, problem, batch);
  };
  if (keys.element_type() == ffi::F32 && values.element_type() == ffi::F32) return run(static_cast<float*>(nullptr));
  if (keys.element_type() == ffi::BF16 && values.element_type() == ffi::BF16)
    return run(static_cast<Bfloat16*>(nullptr));
  return ffi::Error::InvalidArgument("tree_attention takes keys and values both in float32 or both in bfloat16");
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_tree_attention, specjax::TreeAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
