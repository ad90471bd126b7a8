// Vectors of floats in the compiler's own extension, so that one text serves every processor. Their width
// is the processor's: sums are added in an order that depends on the machine, but on nothing else.

#ifndef SPECJAX_KERNELS_VECTORS_H_
#define SPECJAX_KERNELS_VECTORS_H_

#include <cmath>
#include <cstdint>

namespace specjax {

#if defined(__AVX512VL__)
constexpr int kLanes = 8, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

typedef uint16_t Bfloat16;  // the upper half of a float

// The alignment is that of one element: rows start anywhere.
#define SPECJAX_VECTOR(Element) \
  __attribute__((vector_size(kLanes * sizeof(Element)), aligned(sizeof(Element)), may_alias))
typedef float Vector SPECJAX_VECTOR(float);
typedef int32_t Int32s SPECJAX_VECTOR(int32_t);
typedef uint32_t Uint32s SPECJAX_VECTOR(uint32_t);
typedef int16_t Int16s SPECJAX_VECTOR(int16_t);
typedef uint16_t Uint16s SPECJAX_VECTOR(uint16_t);
typedef int8_t Int8s SPECJAX_VECTOR(int8_t);
#undef SPECJAX_VECTOR

inline Vector Load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

inline Vector Load(const Bfloat16* from) {
  const Uint16s halves = *reinterpret_cast<const Uint16s*>(from);
  return reinterpret_cast<Vector>(__builtin_convertvector(halves, Uint32s) << 16);
}

inline Vector Load(const int8_t* from) {
  const Int8s bytes = *reinterpret_cast<const Int8s*>(from);
  Int32s words;
  for (int lane = 0; lane < kLanes; ++lane) words[lane] = bytes[lane];
  return __builtin_convertvector(words, Vector);
}

inline void Store(Vector v, float* to) { *reinterpret_cast<Vector*>(to) = v; }

inline float Widen(float value) { return value; }
inline float Widen(int8_t value) { return value; }
inline float Widen(Bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// a * b + c, rounded once where the processor can, on every call alike: left to itself the compiler fuses
// here and not there, and the same sum would have different bits in different blocks.
inline Vector MultiplyAdd(Vector a, Vector b, Vector c) {
#if defined(__clang__)
#if __has_builtin(__builtin_elementwise_fma)
  return __builtin_elementwise_fma(a, b, c);
#else
  return a * b + c;
#endif
#elif defined(__FP_FAST_FMAF)
  Vector sum;
  for (int lane = 0; lane < kLanes; ++lane) sum[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return sum;
#else
  return a * b + c;
#endif
}

// Adds halves to each other until one lane is left.
inline float Sum(Vector v) {
  float lanes[kLanes];
  Store(v, lanes);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// e^x for x up to 0, to about two units in the last place; 0 where it would be no normal number.
inline Vector Exp(Vector x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Vector shifted = x * 1.44269504f + shift;
  const Vector whole = shifted - shift;
  // x = whole * ln 2 + rest, with ln 2 in two parts, the first of few bits.
  const Vector rest = MultiplyAdd(whole, 2.12194440e-4f + Vector{}, MultiplyAdd(whole, -0.693359375f + Vector{}, x));
  Vector sum = 1.9875691500e-4f + Vector{};
  for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f, 1.0f, 1.0f})
    sum = MultiplyAdd(sum, rest, next + Vector{});
  const Int32s power = (reinterpret_cast<Int32s>(shifted) - 0x4b400000 + 127) << 23;
  const Int32s result = reinterpret_cast<Int32s>(sum * reinterpret_cast<Vector>(power));
  return reinterpret_cast<Vector>(result & ~(x < -87.0f));
}

}  // namespace specjax

#endif  // SPECJAX_KERNELS_VECTORS_H_
