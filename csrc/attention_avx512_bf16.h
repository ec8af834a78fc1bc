// AttentionSteps in bf16 with fp32 sums, for AVX-512. Internal linkage, as in score.h.
//
// Weights are powers of two of base-2 scores and are rounded to bf16; their sum is that of the rounded weights, so that
// they still add up to one.
#pragma once

#include <immintrin.h>

#include "attention_plain.h"
#include "e4m3.h"

namespace longfill {
namespace {

constexpr float kLog2e = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// The magnitudes of e4m3, times a scale, as bf16: 128 entries in four registers.
struct ScaledE4m3 {
  __m512i table[4];

  LONGFILL_INLINE explicit ScaledE4m3(float scale) {
    LONGFILL_UNROLL for (int i = 0; i < 4; ++i) table[i] = _mm512_loadu_si512(e4m3.as_bf16 + 32 * i);
    std::uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    const int exponent = static_cast<int>(bits >> 23) - 127;
    if ((bits & 0x807fffffu) == 0 && exponent >= -100 && exponent <= 100) {
      // A power of two that keeps every entry normal: added to the exponents of all but 0 and NaN.
      const __m512i step = _mm512_set1_epi16(static_cast<short>(exponent * 128));
      table[0] = _mm512_mask_add_epi16(table[0], 0xfffffffeu, table[0], step);
      table[1] = _mm512_add_epi16(table[1], step);
      table[2] = _mm512_add_epi16(table[2], step);
      table[3] = _mm512_mask_add_epi16(table[3], 0x7fffffffu, table[3], step);
    } else {
      multiply(scale);
    }
  }

  __attribute__((noinline)) void multiply(float scale) {
    std::uint16_t entries[128];
    for (int i = 0; i < 128; i += 16)
      store_as(entries + i, round_bf16<16>(load_as<Vector<16>::Floats>(e4m3.as_float + i) * scale));
    for (int i = 0; i < 4; ++i) table[i] = _mm512_loadu_si512(entries + 32 * i);
  }

  LONGFILL_INLINE __m512i operator()(__m256i values) const {
    const __m512i bytes = _mm512_cvtepu8_epi16(values);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
    // The index of vpermt2w is the low six bits; bit six picks the pair of tables.
    const __m512i small = _mm512_permutex2var_epi16(table[0], bytes, table[1]);
    const __m512i large = _mm512_permutex2var_epi16(table[2], bytes, table[3]);
    const __mmask32 is_large = _mm512_test_epi16_mask(bytes, _mm512_set1_epi16(0x40));
    return _mm512_xor_si512(_mm512_mask_blend_epi16(is_large, small, large), sign);
  }
};

LONGFILL_INLINE void e4m3_to_bf16(const std::uint8_t* in, std::int64_t count, float scale, char* out) {
  const ScaledE4m3 decode(scale);
  std::int64_t i = 0;
  for (; i + 32 <= count; i += 32)
    _mm512_storeu_si512(out + 2 * i, decode(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i))));
  if (i == count) return;
  const __mmask32 left = (1u << (count - i)) - 1;
  _mm512_mask_storeu_epi16(out + 2 * i, left, decode(_mm256_maskz_loadu_epi8(left, in + i)));
}

LONGFILL_INLINE void copy_bf16(const std::uint8_t* in, std::int64_t count, char* out) {
  std::int64_t i = 0;
  for (; i + 32 <= count; i += 32) _mm512_storeu_si512(out + 2 * i, _mm512_loadu_si512(in + 2 * i));
  if (i == count) return;
  const __mmask32 left = (1u << (count - i)) - 1;
  _mm512_mask_storeu_epi16(out + 2 * i, left, _mm512_maskz_loadu_epi16(left, in + 2 * i));
}

void latent_to_bf16_avx512(const LatentLayout& layout, const std::uint8_t* row, char* out) {
  switch (layout.format) {
    case LatentFormat::kFloat32:
      latent_to_bf16<16>(layout, row, out);
      return;
    case LatentFormat::kBfloat16:
      copy_bf16(row, layout.width(), out);
      return;
    case LatentFormat::kFp8:
      e4m3_to_bf16(row, layout.rank, layout.scale, out);
      e4m3_to_bf16(row + layout.rank, layout.rope_dim, layout.rope_scale, out + 2 * layout.rank);
      return;
    case LatentFormat::kFp8DsMla: {
      const std::uint8_t* const scales = row + layout.rank;
      for (std::int64_t first = 0; first < layout.rank; first += kScaleGroup) {
        const std::int64_t count = layout.rank - first < kScaleGroup ? layout.rank - first : kScaleGroup;
        e4m3_to_bf16(row + first, count, load_as<float>(scales + 4 * (first / kScaleGroup)), out + 2 * first);
      }
      copy_bf16(scales + 4 * layout.scale_groups(), layout.rope_dim, out + 2 * layout.rank);
      return;
    }
  }
}

// Sixteen rows of sixteen 32-bit values, rows become columns.
LONGFILL_INLINE void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  LONGFILL_UNROLL for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  LONGFILL_UNROLL for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  LONGFILL_UNROLL for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
    y[4 + i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
    y[8 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
    y[12 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
  }
  LONGFILL_UNROLL for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0x88);
    x[4 + i] = _mm512_shuffle_i32x4(y[4 + i], y[12 + i], 0x88);
    x[8 + i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0xdd);
    x[12 + i] = _mm512_shuffle_i32x4(y[4 + i], y[12 + i], 0xdd);
  }
}

// Queries in bf16 only, of an even width.
template <class V>
void pack_queries_bf16(const PackQueries& p) {
  constexpr std::int64_t widest = V::lanes * V::tile_vectors;
  const std::int64_t steps = p.width / 2;
  char* out = p.out;
  for (std::int64_t first = 0; first < p.count; first += widest) {
    const std::int64_t columns = p.count - first < widest ? p.count - first : widest;
    for (std::int64_t c = 0; c < columns; c += 16) {
      for (std::int64_t s = 0; s < steps; s += 16) {
        const std::int64_t n = steps - s < 16 ? steps - s : 16;
        const auto here = static_cast<__mmask16>((1u << n) - 1);
        __m512i x[16];
        LONGFILL_UNROLL for (int i = 0; i < 16; ++i) {
          const char* const column = p.columns[first + c + i];
          x[i] = column == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi32(here, column + 4 * s);
        }
        transpose(x);
        for (std::int64_t i = 0; i < n; ++i) _mm512_store_si512(out + ((s + i) * columns + c) * 4, x[i]);
      }
    }
    out += steps * columns * 4;
  }
}

// Values of two keys side by side.
template <class V>
void pack_values_bf16(const PackValues& p) {
  constexpr std::int64_t widest = V::lanes * V::tile_vectors;
  alignas(64) static constexpr std::uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (std::int64_t first = 0; first < p.rank; first += widest) {
    const std::int64_t values = p.rank - first < widest ? p.rank - first : widest;
    char* const tile = p.out + first * kBlockKeys * 2;
    for (std::int64_t key = p.first; key < p.last; key += 2) {
      const char* const row = p.rows + key * p.row_bytes + first * 2;
      char* const out = tile + key * values * 2;
      for (std::int64_t x = 0; x < values; x += 32) {
        const __m512i even = _mm512_load_si512(row + 2 * x);
        const __m512i odd = _mm512_load_si512(row + p.row_bytes + 2 * x);
        _mm512_store_si512(out + 4 * x, _mm512_permutex2var_epi16(even, low, odd));
        if (x + 16 < values) _mm512_store_si512(out + 4 * x + 64, _mm512_permutex2var_epi16(even, high, odd));
      }
    }
  }
}

// 2^x for x <= 0 or NaN, to about 1e-6: the result is rounded to bf16.
LONGFILL_INLINE __m512 exp2_below(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);  // the second operand where one is NaN
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.3333558e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// Sixteen columns' weights of two keys, paired, and their rounded values added to the sums.
LONGFILL_INLINE __m512i weigh_pair(__m512 even, __m512 odd, __m512& sum) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd)), 16);
  sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
  sum = _mm512_add_ps(sum, _mm512_castsi512_ps(high));
  return _mm512_or_si512(low, high);
}

void softmax_bf16(const Softmax& s) {
  const __m512 scale = _mm512_set1_ps(s.scale * kLog2e);
  const __m512 none = _mm512_set1_ps(kNoScore);
  for (std::int64_t c = 0; c < s.columns; c += 16) {
    const float* const scores = s.scores + c;
    __m512 largest_score = none;
    for (std::int64_t key = 0; key < s.keys; ++key)
      largest_score = _mm512_max_ps(_mm512_load_ps(scores + key * s.columns), largest_score);
    const __m512 before = _mm512_load_ps(s.largest + c);
    const __m512 largest = _mm512_max_ps(_mm512_mul_ps(largest_score, scale), before);
    const __mmask16 has_keys = _mm512_cmp_ps_mask(largest, none, _CMP_NEQ_UQ);
    const __m512 base = _mm512_maskz_mov_ps(has_keys, largest);
    const __mmask16 grew = _mm512_cmp_ps_mask(largest, before, _CMP_NEQ_UQ);
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 factor = _mm512_mask_mov_ps(one, grew, exp2_below(_mm512_sub_ps(before, base)));
    __m512 sum = _mm512_mul_ps(_mm512_load_ps(s.sums + c), factor);
    const auto weight = [&](std::int64_t key) __attribute__((always_inline)) {
      return exp2_below(_mm512_fmsub_ps(_mm512_load_ps(scores + key * s.columns), scale, base));
    };
    for (std::int64_t first = 0; first < s.keys; first += 32) {
      __m512i pairs[16];
      if (first + 32 <= s.keys) {
        LONGFILL_UNROLL for (int i = 0; i < 16; ++i)
          pairs[i] = weigh_pair(weight(first + 2 * i), weight(first + 2 * i + 1), sum);
      } else {
        for (int i = 0; i < 16; ++i) {
          const std::int64_t key = first + 2 * i;
          const __m512 even = key < s.keys ? weight(key) : _mm512_setzero_ps();
          const __m512 odd = key + 1 < s.keys ? weight(key + 1) : _mm512_setzero_ps();
          pairs[i] = weigh_pair(even, odd, sum);
        }
      }
      transpose(pairs);
      char* const out = s.weights + c * s.weight_bytes + first * 2;
      LONGFILL_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(out + i * s.weight_bytes, pairs[i]);
    }
    _mm512_store_ps(s.largest + c, largest);
    _mm512_store_ps(s.sums + c, sum);
    _mm512_store_ps(s.factors + c, factor);
  }
}

template <class V, int NARROW_ROWS>
constexpr AttentionSteps attention_steps_bf16() {
  return {V::lanes,
          V::tile_vectors,
          2,
          2,
          kLn2,
          attention_tile<V, NARROW_ROWS>,
          latent_to_bf16_avx512,
          pack_queries_bf16<V>,
          pack_values_bf16<V>,
          softmax_bf16,
          rescale<V>,
          finish<V>};
}

}  // namespace
}  // namespace longfill
