// Rounding to float8_e4m3fn (4 exponent bits, bias 7; 3 mantissa bits; no infinity) and its power-of-two scales.
//
// Internal linkage, as in score.h. Invariant: to nearest, ties to even, for every fp32 value, subnormal results
// included; beyond 448, infinity too, saturates; a NaN stays NaN.
#pragma once

#include "lanes.h"

namespace longfill {
namespace {

constexpr std::int32_t kE4m3Max = 0x43e00000;        // 448
constexpr std::int32_t kE4m3MinNormal = 0x3c800000;  // 2^-6
// Added to a smaller value, this leaves the multiple of 2^-9 (the subnormal step) nearest to it in the last bits.
constexpr float kSubnormalShift = 0x1p14f;
constexpr std::int32_t kSubnormalShiftBits = 0x46800000;

// Three bits of mantissa, to nearest; the low 20 bits are left over.
LONGFILL_INLINE Ints three_bits(Ints magnitude) { return magnitude + 0x7ffff + ((magnitude >> 20) & 1); }

LONGFILL_INLINE Ints limited(Ints magnitude) { return magnitude < kE4m3Max ? magnitude : splat(kE4m3Max); }

LONGFILL_INLINE Chars e4m3_bytes(Floats x) {
  const Ints magnitude = (Ints)x & kMagnitude;
  const Ints within = limited(magnitude);
  const Ints normal = (three_bits(within) >> 20) - ((127 - 7) << 3);
  const Ints subnormal = (Ints)((Floats)within + kSubnormalShift) - kSubnormalShiftBits;
  const Ints finite = within < kE4m3MinNormal ? subnormal : normal;
  const Ints byte = magnitude > kInfinity ? splat(0x7f) : finite;
  return __builtin_convertvector(byte | (((Ints)x >> 24) & 0x80), Chars);
}

// The same values as fp32.
LONGFILL_INLINE Floats e4m3_values(Floats x) {
  const Ints magnitude = (Ints)x & kMagnitude;
  const Ints within = limited(magnitude);
  const Ints normal = three_bits(within) & ~0xfffff;
  const Ints subnormal = (Ints)(((Floats)within + kSubnormalShift) - kSubnormalShift);
  const Ints finite = within < kE4m3MinNormal ? subnormal : normal;
  return (Floats)((magnitude > kInfinity ? magnitude : finite) | ((Ints)x & kSign));
}

// Smallest power of two `s` with max(amax, floor) / s <= 448, and 1 where amax is not finite. `floor` is positive and
// normal after the division.
LONGFILL_INLINE float pow2_scale(std::int32_t amax_bits, float floor) {
  if (amax_bits >= kInfinity) return 1.0f;
  float amax;
  std::memcpy(&amax, &amax_bits, sizeof amax);
  const float quotient = (amax < floor ? floor : amax) / 448.0f;
  std::int32_t bits;
  std::memcpy(&bits, &quotient, sizeof bits);
  bits = (bits + 0x7fffff) & kInfinity;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

LONGFILL_INLINE void store_bytes(std::uint8_t* p, Chars bytes, Whole) { std::memcpy(p, &bytes, sizeof bytes); }
LONGFILL_INLINE void store_bytes(std::uint8_t* p, Chars bytes, Part part) {
  for (std::int64_t i = 0; i < part.count; ++i) p[i] = bytes[i];
}

// Multiplying by the inverse of a power of two is as exact as dividing by it.
LONGFILL_INLINE void quantise(const float* x, std::int64_t n, float scale, std::uint8_t* out) {
  const float inverse = 1.0f / scale;
  for_vectors(n, [&](std::int64_t i, auto some) {
    store_bytes(out + i, e4m3_bytes(load(x + i, some) * inverse), some);
  });
}

// The same in place and as fp32 values, without the scale.
LONGFILL_INLINE void quantise_values(float* x, std::int64_t n, float scale) {
  const float inverse = 1.0f / scale;
  for_vectors(n, [&](std::int64_t i, auto some) { store(x + i, e4m3_values(load(x + i, some) * inverse), some); });
}

}  // namespace
}  // namespace longfill
