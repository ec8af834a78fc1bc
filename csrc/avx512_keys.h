// Sixteen paged e4m3 keys side by side: lane l of a vector holds four consecutive bytes of key l.
//
// Internal linkage, as in score.h; needs AVX-512 VBMI.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "score.h"

namespace longfill {
namespace {

// 16 bytes of each of four keys, a 128-bit lane each. Masked broadcasts from memory spare the shuffle units.
LONGFILL_INLINE __m512i load_four_keys(const std::uint8_t* const* rows, int d) {
  const auto part = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + d));
  };
  __m512i keys = _mm512_castsi128_si512(part(0));
  keys = _mm512_mask_broadcast_i32x4(keys, 0x00f0, part(4));
  keys = _mm512_mask_broadcast_i32x4(keys, 0x0f00, part(8));
  return _mm512_mask_broadcast_i32x4(keys, 0xf000, part(12));
}

// out[i]: bytes [d + 4 i, d + 4 i + 4) of each of the sixteen keys.
LONGFILL_INLINE void load_keys_across(const std::uint8_t* const* rows, int d, __m512i (&out)[4]) {
  const __m512i k0 = load_four_keys(rows, d);
  const __m512i k1 = load_four_keys(rows + 1, d);
  const __m512i k2 = load_four_keys(rows + 2, d);
  const __m512i k3 = load_four_keys(rows + 3, d);
  const __m512i low01 = _mm512_unpacklo_epi32(k0, k1);
  const __m512i high01 = _mm512_unpackhi_epi32(k0, k1);
  const __m512i low23 = _mm512_unpacklo_epi32(k2, k3);
  const __m512i high23 = _mm512_unpackhi_epi32(k2, k3);
  out[0] = _mm512_unpacklo_epi64(low01, low23);
  out[1] = _mm512_unpackhi_epi64(low01, low23);
  out[2] = _mm512_unpacklo_epi64(high01, high23);
  out[3] = _mm512_unpackhi_epi64(high01, high23);
}

// A byte for each of the 128 magnitudes of e4m3.
struct ByteTable {
  __m512i low;
  __m512i high;

  LONGFILL_INLINE explicit ByteTable(const std::uint8_t* entries)
      : low(_mm512_loadu_si512(entries)), high(_mm512_loadu_si512(entries + 64)) {}
  // The sign bit is no part of the index.
  LONGFILL_INLINE __m512i operator()(__m512i e4m3_bytes) const {
    return _mm512_permutex2var_epi8(low, e4m3_bytes, high);
  }
};

}  // namespace
}  // namespace longfill
