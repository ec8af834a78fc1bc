// Elementary functions on the compiler's vector types, of any width. Internal linkage, as in score.h.
//
// Invariant: every lane takes the same plain operations, none of them fused, so a value's bits depend neither on its
// lane nor on the width of the vector nor on the instruction set.
#pragma once

#include "score.h"

namespace longfill {
namespace {

// e^x to within 2 units in the last place, subnormal results included; 0 for -inf, inf for what overflows, NaN for NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2 (two-part reduction after Cody and Waite, 1980), a polynomial in r, and 2^n as
// two factors, because n reaches 128 and -150.
template <class F>
LONGFILL_INLINE F vexp(F x) {
  using Ints = decltype(x < x);
  // At these bounds the result has long overflowed or become zero. A NaN compares false and stays.
  x = x > 89.0f ? F{} + 89.0f : x;
  x = x < -104.0f ? F{} - 104.0f : x;
  const F shift = F{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const F shifted = x * 1.44269504f + shift;
  const F n = shifted - shift;
  const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints power = (Ints)shifted - (Ints)shift;
  const Ints half = power >> 1;
  return p * (F)((half + 127) << 23) * (F)((power - half + 127) << 23);
}

}  // namespace
}  // namespace longfill
