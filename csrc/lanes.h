// fp32 lanes in the compiler's own vector type, as many as a register has, and the loads, stores and sums over rows.
//
// Internal linkage, as in score.h: each instruction set's file compiles its own copy. Invariant: nothing is fused or
// approximated and sums have the same order for every number of lanes, so every instruction set gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "score.h"

namespace longfill {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef std::uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef std::uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef std::uint8_t Chars __attribute__((vector_size(kLanes)));

struct Bf16 {
  std::uint16_t bits;
};

constexpr std::int32_t kMagnitude = 0x7fffffff;
constexpr std::int32_t kInfinity = 0x7f800000;  // magnitudes above it are NaN
constexpr std::int32_t kSign = INT32_MIN;

LONGFILL_INLINE Ints splat(std::int32_t value) { return Ints{} + value; }

LONGFILL_INLINE Words widened(Shorts v) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)v);  // the conversion below becomes two halves and a merge in GCC 12
#else
  return __builtin_convertvector(v, Words);
#endif
}

// Memory holds the values of one type; lanes are always fp32.
template <class T>
LONGFILL_INLINE Floats from_memory(const T* p);
template <>
LONGFILL_INLINE Floats from_memory(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <>
LONGFILL_INLINE Floats from_memory(const Bf16* p) {
  Shorts v;
  std::memcpy(&v, p, sizeof v);
  return (Floats)(widened(v) << 16);
}

// To the nearest value of T, ties to even, still as fp32; a NaN stays one.
template <class T>
LONGFILL_INLINE Floats rounded(Floats v);
template <>
LONGFILL_INLINE Floats rounded<float>(Floats v) {
  return v;
}
template <>
LONGFILL_INLINE Floats rounded<Bf16>(Floats v) {
  const Words bits = (Words)v;
  // Carries out of a NaN's mantissa would leave a number: it gets a high mantissa bit instead.
  const Words nearest = v != v ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
  return (Floats)(nearest & 0xffff0000u);
}

// Of values that are rounded to the memory's type already.
LONGFILL_INLINE void to_memory(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
LONGFILL_INLINE void to_memory(Bf16* p, Floats v) {
  const Shorts halves = __builtin_convertvector((Words)v >> 16, Shorts);
  std::memcpy(p, &halves, sizeof halves);
}

// How many of a vector's lanes hold values: all of them in a loop, fewer once behind it.
struct Whole {};
struct Part {
  std::int64_t count;
};

// body(first index, Whole or Part) for the values [0, n), a vector at a time.
template <class Body>
LONGFILL_INLINE void for_vectors(std::int64_t n, Body body) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Whole{});
  if (i < n) body(i, Part{n - i});
}

template <class T>
LONGFILL_INLINE Floats load(const T* p, Whole) {
  return from_memory(p);
}
// The lanes without a value are zero.
template <class T>
LONGFILL_INLINE Floats load(const T* p, Part part) {
  T few[kLanes] = {};
  for (std::int64_t i = 0; i < part.count; ++i) few[i] = p[i];
  return from_memory(few);
}

template <class T>
LONGFILL_INLINE void store(T* p, Floats v, Whole) {
  to_memory(p, v);
}
template <class T>
LONGFILL_INLINE void store(T* p, Floats v, Part part) {
  T few[kLanes];
  to_memory(few, v);
  for (std::int64_t i = 0; i < part.count; ++i) p[i] = few[i];
}

// The sum of term(first index, Whole or Part) over [0, n), in one fixed order: value i goes to running sum i % 64, then
// halves are added to halves. Lanes without a value must be zero.
template <class Term>
LONGFILL_INLINE float sum_over(std::int64_t n, Term term) {
  constexpr int sums = 64;
  constexpr int vectors = sums / kLanes;
  Floats sum[vectors] = {};
  std::int64_t i = 0;
  for (; i + sums <= n; i += sums)
    LONGFILL_UNROLL for (int v = 0; v < vectors; ++v) sum[v] += term(i + v * kLanes, Whole{});
  LONGFILL_UNROLL for (int v = 0; v < vectors; ++v, i += kLanes) {
    if (i + kLanes <= n) {
      sum[v] += term(i, Whole{});
    } else if (i < n) {
      sum[v] += term(i, Part{n - i});
    }
  }
  LONGFILL_UNROLL for (int half = vectors / 2; half > 0; half /= 2)
    LONGFILL_UNROLL for (int v = 0; v < half; ++v) sum[v] += sum[v + half];
  float lanes[kLanes];
  to_memory(lanes, sum[0]);
  LONGFILL_UNROLL for (int half = kLanes / 2; half > 0; half /= 2)
    LONGFILL_UNROLL for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

// Largest magnitude of a row as bits: as integers NaN lies above infinity, so a NaN is never lost.
LONGFILL_INLINE std::int32_t largest_magnitude(const float* x, std::int64_t n) {
  Ints most{};
  for_vectors(n, [&](std::int64_t i, auto some) {
    const Ints magnitude = (Ints)load(x + i, some) & kMagnitude;
    most = magnitude > most ? magnitude : most;
  });
  std::int32_t lanes[kLanes];
  std::memcpy(lanes, &most, sizeof lanes);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] = lanes[j + half] > lanes[j] ? lanes[j + half] : lanes[j];
  return lanes[0];
}

}  // namespace
}  // namespace longfill
