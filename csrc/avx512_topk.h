// The 16-lane forms of collect.h and topk.h. Internal linkage, as in score.h.
#pragma once

#include <immintrin.h>

#include "collect.h"
#include "topk.h"

namespace longfill {
namespace {

constexpr int kFew = 4;  // keys that are faster appended one by one

inline __mmask16 lanes_below(std::int64_t n) {
  return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1);
}

inline void append_lanes(Candidates& row, __mmask16 mask, __m512 scores, __m512i positions) {
  // Compress in registers and store whole vectors: compressing to memory is microcoded on some machines.
  _mm512_storeu_ps(row.scores + row.count, _mm512_maskz_compress_ps(mask, scores));
  _mm512_storeu_si512(row.positions + row.count, _mm512_maskz_compress_epi32(mask, positions));
  row.count += __builtin_popcount(mask);
}

inline __m512i positions_from(std::int32_t first) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_epi32(_mm512_set1_epi32(first), lanes);
}

inline void append_vectors(const float* scores, std::int64_t n, std::int32_t first, float threshold, Candidates& row) {
  const __m512 bound = _mm512_set1_ps(threshold);
  std::int64_t i = 0;
  // Nearly all of a long context is below the threshold: one branch for 64 keys.
  for (; i + 64 <= n; i += 64) {
    __mmask16 lanes[4];
    for (int v = 0; v < 4; ++v) lanes[v] = _mm512_cmp_ps_mask(_mm512_load_ps(scores + i + 16 * v), bound, _CMP_GT_OQ);
    const __mmask16 any = _kor_mask16(_kor_mask16(lanes[0], lanes[1]), _kor_mask16(lanes[2], lanes[3]));
    if (_kortestz_mask16_u8(any, any) != 0) continue;
    std::uint64_t above = 0;
    for (int v = 0; v < 4; ++v) above |= static_cast<std::uint64_t>(lanes[v]) << (16 * v);
    if (__builtin_popcountll(above) > kFew) {
      for (int v = 0; v < 4; ++v) {
        const std::int64_t at = i + 16 * v;
        append_lanes(row, lanes[v], _mm512_load_ps(scores + at), positions_from(first + static_cast<std::int32_t>(at)));
      }
      continue;
    }
    for (; above != 0; above &= above - 1, ++row.count) {
      const std::int64_t at = i + __builtin_ctzll(above);
      row.scores[row.count] = scores[at];
      row.positions[row.count] = first + static_cast<std::int32_t>(at);
    }
  }
  for (; i < n; i += 16) {
    const __mmask16 valid = lanes_below(n - i);
    const __m512 values = _mm512_load_ps(scores + i);
    const __mmask16 above = _mm512_mask_cmp_ps_mask(valid, values, bound, _CMP_GT_OQ);
    if (above != 0) append_lanes(row, above, values, positions_from(first + static_cast<std::int32_t>(i)));
  }
}

void collect_avx512(const CollectArgs& args) { collect_rows(args, append_vectors); }

// The lowest `n` set bits of `mask`.
inline __mmask16 first_set(__mmask16 mask, std::int64_t n) {
  unsigned rest = mask;
  for (std::int64_t i = 0; i < n && rest != 0; ++i) rest &= rest - 1;
  return static_cast<__mmask16>(mask & ~rest);
}

struct VectorSteps {
  static Range order(const float* scores, std::int64_t count, std::int32_t* keys) {
    __m512i low = _mm512_set1_epi32(0x7fffffff);
    __m512i high = _mm512_set1_epi32(-0x7fffffff);
    for (std::int64_t i = 0; i < count; i += 16) {
      const __mmask16 valid = lanes_below(count - i);
      const __m512i bits = _mm512_castps_si512(_mm512_add_ps(_mm512_loadu_ps(scores + i), _mm512_setzero_ps()));
      const __m512i flips = _mm512_and_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(0x7fffffff));
      const __m512i key = _mm512_xor_si512(bits, flips);
      // Past the end lies the lowest number: no cut counts it.
      _mm512_storeu_si512(keys + i, _mm512_mask_blend_epi32(valid, _mm512_set1_epi32(-0x7fffffff - 1), key));
      low = _mm512_mask_min_epi32(low, valid, low, key);
      high = _mm512_mask_max_epi32(high, valid, high, key);
    }
    return {_mm512_reduce_min_epi32(low), _mm512_reduce_max_epi32(high)};
  }

  static std::int64_t count_from(const std::int32_t* keys, std::int64_t count, std::int32_t lowest) {
    const __m512i bound = _mm512_set1_epi32(lowest);
    const __m512i one = _mm512_set1_epi32(1);
    __m512i found[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    std::int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
      for (int v = 0; v < 2; ++v) {
        const __mmask16 above = _mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys + i + 16 * v), bound);
        found[v] = _mm512_mask_add_epi32(found[v], above, found[v], one);
      }
    }
    for (; i < count; i += 16) {
      const __mmask16 above = _mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys + i), bound);
      found[0] = _mm512_mask_add_epi32(found[0], above, found[0], one);
    }
    return _mm512_reduce_add_epi32(_mm512_add_epi32(found[0], found[1]));
  }

  static std::int32_t keep(Candidates& row, const std::int32_t* keys, std::int32_t cut, std::int64_t ties) {
    const __m512i bound = _mm512_set1_epi32(cut);
    __m512i lowest = _mm512_set1_epi32(0x7fffffff);
    const std::int64_t count = row.count;
    row.count = 0;
    // In place: what is written never passes what was read.
    for (std::int64_t i = 0; i < count; i += 16) {
      const __m512i key = _mm512_loadu_si512(keys + i);
      const __mmask16 above = _mm512_cmpgt_epi32_mask(key, bound);
      __mmask16 equal = _mm512_cmpeq_epi32_mask(key, bound);
      if (__builtin_popcount(equal) > ties) equal = first_set(equal, ties);
      ties -= __builtin_popcount(equal);
      const __mmask16 kept = above | equal;
      lowest = _mm512_mask_min_epi32(lowest, kept, lowest, key);
      append_lanes(row, kept, _mm512_loadu_ps(row.scores + i), _mm512_loadu_si512(row.positions + i));
    }
    return _mm512_reduce_min_epi32(lowest);
  }
};

}  // namespace
}  // namespace longfill
