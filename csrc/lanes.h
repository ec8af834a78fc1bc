// Sixteen fp32 lanes in the compiler's own vector type, with the loads, stores and roundings that rows need.
//
// Internal linkage, as in score.h: each instruction set's file compiles its own copy, in as many registers as sixteen
// lanes take there. Invariant: nothing is fused or approximated, so every instruction set gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "score.h"

namespace longfill {
namespace {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef std::uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef std::uint8_t Chars __attribute__((vector_size(kLanes)));

struct Bf16 {
  std::uint16_t bits;
};

constexpr std::int32_t kMagnitude = 0x7fffffff;
constexpr std::int32_t kInfinity = 0x7f800000;  // magnitudes above it are NaN
constexpr std::int32_t kSign = INT32_MIN;

LONGFILL_INLINE Ints splat(std::int32_t value) { return Ints{} + value; }

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
  return (Floats)(__builtin_convertvector(v, Ints) << 16);
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
  const Ints bits = (Ints)v;
  // Carries out of a NaN's mantissa would leave a number: it gets a high mantissa bit instead.
  const Ints nearest = (bits & kMagnitude) > kInfinity ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
  return (Floats)(nearest & ~0xffff);
}

LONGFILL_INLINE void to_memory(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
LONGFILL_INLINE void to_memory(Bf16* p, Floats v) {
  const Shorts halves = __builtin_convertvector((Ints)rounded<Bf16>(v) >> 16, Shorts);
  std::memcpy(p, &halves, sizeof halves);
}

// Fewer than sixteen values; the other lanes are zero. Out of line: whole vectors are what the loops are made for.
template <class T>
__attribute__((noinline)) void load_few(const T* p, std::int64_t count, Floats* out) {
  T few[kLanes] = {};
  for (std::int64_t i = 0; i < count; ++i) few[i] = p[i];
  *out = from_memory(few);
}
template <class T>
__attribute__((noinline)) void store_few(T* p, const Floats* v, std::int64_t count) {
  T few[kLanes];
  to_memory(few, *v);
  for (std::int64_t i = 0; i < count; ++i) p[i] = few[i];
}

// The next sixteen values, or the `left` that there are.
template <class T>
LONGFILL_INLINE Floats load(const T* p, std::int64_t left) {
  if (left >= kLanes) return from_memory(p);
  Floats v;
  load_few(p, left, &v);
  return v;
}
template <class T>
LONGFILL_INLINE void store(T* p, Floats v, std::int64_t left) {
  if (left >= kLanes) return to_memory(p, v);
  store_few(p, &v, left);
}

// A sum over a row in one fixed order: value i goes to lane i % 64, then halves are added to halves.
struct Sum {
  static constexpr int kVectors = 4;
  static constexpr int kValues = kVectors * kLanes;
  Floats lanes[kVectors] = {};

  LONGFILL_INLINE float total() const {
    float t[kLanes];
    to_memory(t, (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]));
    for (int width = kLanes / 2; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) t[i] += t[i + width];
    return t[0];
  }
};

// The sum of term(first index, values left) over [0, n), whose lanes beyond the values must be zero.
template <class Term>
LONGFILL_INLINE float sum_over(std::int64_t n, Term term) {
  Sum sum;
  std::int64_t i = 0;
  for (; i + Sum::kValues <= n; i += Sum::kValues)
    LONGFILL_UNROLL for (int v = 0; v < Sum::kVectors; ++v) sum.lanes[v] += term(i + v * kLanes, std::int64_t{kLanes});
  LONGFILL_UNROLL for (int v = 0; v < Sum::kVectors; ++v)
    if (i + v * kLanes < n) sum.lanes[v] += term(i + v * kLanes, n - i - v * kLanes);
  return sum.total();
}

// Largest magnitude of a row as bits: as integers NaN lies above infinity, so a NaN is never lost.
LONGFILL_INLINE std::int32_t largest_magnitude(const float* x, std::int64_t n) {
  Ints most{};
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Ints magnitude = (Ints)load(x + i, n - i) & kMagnitude;
    most = magnitude > most ? magnitude : most;
  }
  std::int32_t m[kLanes];
  std::memcpy(m, &most, sizeof m);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) m[i] = m[i + width] > m[i] ? m[i + width] : m[i];
  return m[0];
}

}  // namespace
}  // namespace longfill
