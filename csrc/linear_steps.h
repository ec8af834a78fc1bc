// What a product does beside its multiply-adds, for every width of vector: conversions, fp8 decoding, SwiGLU.
//
// Internal linkage, as in score.h. Invariant: a value's bits do not depend on its place in a row; nothing is fused.
#pragma once

#include <cstring>

#include "isa.h"
#include "vmath.h"

namespace longfill {
namespace {

template <int LANES>
struct Vectors {
  typedef float Floats __attribute__((vector_size(LANES * 4)));
  typedef std::uint32_t Words __attribute__((vector_size(LANES * 4)));
  typedef std::uint16_t Halves __attribute__((vector_size(LANES * 2)));
  typedef std::uint8_t Octets __attribute__((vector_size(LANES)));

  template <class V>
  static LONGFILL_INLINE V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  template <class V>
  static LONGFILL_INLINE void store(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
  }

  // The upper halves hold the value rounded to nearest even; a NaN stays one.
  static LONGFILL_INLINE Words rounded(Floats value) {
    const Words bits = (Words)value;
    return value == value ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
  }
  static LONGFILL_INLINE Floats round_to_bf16(Floats value) { return (Floats)(rounded(value) & 0xffff0000u); }

  // e4m3 in the low byte of each word: its exponent and mantissa moved into a float's are the value times 2^-120.
  static LONGFILL_INLINE Floats from_e4m3(Words byte) {
    const Words magnitude = byte & 0x7f;
    const Floats value = (Floats)(magnitude << 20) * 0x1p120f;
    return (Floats)((magnitude == 0x7f ? Words{} + 0x7fc00000u : (Words)value) | (byte & 0x80) << 24);
  }
};

template <int LANES>
void widen(const std::uint16_t* in, std::int64_t n, float* out) {
  using V = Vectors<LANES>;
  using Words = typename V::Words;
  std::int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    V::store(out + i, __builtin_convertvector(V::template load<typename V::Halves>(in + i), Words) << 16);
  for (; i < n; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(in[i]) << 16;
    std::memcpy(out + i, &bits, sizeof bits);
  }
}

template <int LANES>
void narrow(const float* in, std::int64_t n, std::uint16_t* out) {
  using V = Vectors<LANES>;
  using Halves = typename V::Halves;
  std::int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    V::store(out + i, __builtin_convertvector(V::rounded(V::template load<typename V::Floats>(in + i)) >> 16, Halves));
  if (i == n) return;
  typename V::Floats rest{};
  std::memcpy(&rest, in + i, static_cast<std::size_t>(n - i) * sizeof(float));
  const Halves last = __builtin_convertvector(V::rounded(rest) >> 16, Halves);
  std::memcpy(out + i, &last, static_cast<std::size_t>(n - i) * sizeof(std::uint16_t));
}

// Both arrays have room for whole vectors.
template <int LANES>
void swiglu(float* gate, const float* up, std::int64_t n) {
  using V = Vectors<LANES>;
  using Floats = typename V::Floats;
  for (std::int64_t i = 0; i < n; i += LANES) {
    const Floats g = V::template load<Floats>(gate + i);
    V::store(gate + i, g / (1.0f + vexp(-g)) * V::template load<Floats>(up + i));
  }
}

template <int LANES>
void add_scaled(const float* in, float factor, std::int64_t n, float* total) {
  using V = Vectors<LANES>;
  using Floats = typename V::Floats;
  std::int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    V::store(total + i, V::template load<Floats>(total + i) + V::template load<Floats>(in + i) * factor);
  for (; i < n; ++i) total[i] += in[i] * factor;
}

template <int LANES>
void decode_to_fp32(const DecodeArgs& a) {
  using V = Vectors<LANES>;
  const auto scale = V::template load<typename V::Floats>(a.scales[0]);
  for (std::int64_t s = 0; s < a.steps; ++s) {
    const auto bytes = V::template load<typename V::Octets>(a.values + s * a.value_stride);
    const auto value = V::from_e4m3(__builtin_convertvector(bytes, typename V::Words)) * scale;
    V::store(a.out + s * a.out_stride, a.round_bf16 ? V::round_to_bf16(value) : value);
  }
}

// Pairs of bf16, whatever the scales of a pair's columns.
template <int LANES>
void decode_to_bf16(const DecodeArgs& a) {
  using V = Vectors<LANES>;
  const auto scale0 = V::template load<typename V::Floats>(a.scales[0]);
  const auto scale1 = V::template load<typename V::Floats>(a.scales[1]);
  for (std::int64_t s = 0; s < a.steps; ++s) {
    const auto bytes = V::template load<typename V::Halves>(a.values + s * a.value_stride);
    const auto pair = __builtin_convertvector(bytes, typename V::Words);
    const auto low = V::rounded(V::from_e4m3(pair & 0xff) * scale0) >> 16;
    const auto high = V::rounded(V::from_e4m3(pair >> 8) * scale1) & 0xffff0000u;
    V::store(a.out + s * a.out_stride, low | high);
  }
}

template <int LANES>
constexpr LinearSteps linear_steps(void (*to_bf16)(const DecodeArgs&)) {
  return {widen<LANES>, narrow<LANES>, swiglu<LANES>, add_scaled<LANES>, decode_to_fp32<LANES>, to_bf16};
}

}  // namespace
}  // namespace longfill
