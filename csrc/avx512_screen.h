// The screen with vpdpbusd: four products of bytes a lane and instruction, summed exactly in int32.
//
// Internal linkage, as in score.h; needs AVX-512 VNNI, VBMI and VBMI2. Blocked like score.h, and as free of
// consequences: what passes depends on the row, the key and the threshold alone.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "avx512_keys.h"
#include "score.h"
#include "screen.h"

namespace longfill {
namespace {

constexpr int kScreenChains = 8;   // rows times heads that share loaded keys
constexpr int kScreenVectors = 2;  // blocks at once
constexpr int kMaskWords = kScreenTileKeys / 64;

// What may pass, a bit a key.
struct ScreenMasks {
  std::uint64_t words[kScreenRows][kMaskWords];

  LONGFILL_INLINE void set(int row, int block, __mmask16 pass) {
    std::memcpy(reinterpret_cast<char*>(words[row]) + block * sizeof pass, &pass, sizeof pass);
  }
};

// GCC 12 spills arrays of accumulators around the intrinsic.
LONGFILL_INLINE void dot_bytes(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

void screen_pack_block(const std::uint8_t* const* rows, int dim, char* out, float* norms, float* errors) {
  const ByteTable magnitudes(screen_keys().magnitude);
  const ByteTable key_errors(screen_keys().error);
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(128));
  __m512i squares = _mm512_setzero_si512();
  __m512i error_squares = _mm512_setzero_si512();
  for (int d = 0; d < dim; d += 16) {
    __m512i bytes[4];
    load_keys_across(rows, d, bytes);
    LONGFILL_UNROLL for (int i = 0; i < 4; ++i) {
      const __m512i magnitude = magnitudes(bytes[i]);
      const __m512i error = key_errors(bytes[i]);
      dot_bytes(squares, magnitude, magnitude);
      dot_bytes(error_squares, error, error);
      const __m512i sum = _mm512_add_epi8(offset, magnitude);
      const __m512i value = _mm512_mask_sub_epi8(sum, _mm512_movepi8_mask(bytes[i]), offset, magnitude);
      _mm512_store_si512(out + (d / 4 + i) * 64, value);
    }
  }
  // Three roundings of 2^-24 each, and then some.
  const float up = 1.0f + 0x1p-20f;
  const auto root = [](__m512i sum, float unit) {
    return _mm512_mul_ps(_mm512_sqrt_ps(_mm512_cvtepi32_ps(sum)), _mm512_set1_ps(unit));
  };
  _mm512_store_ps(norms, root(squares, kKeyStep * up));
  _mm512_store_ps(errors, root(error_squares, kErrorUnit * up));
}

// total[row][vector] += factor * relu(integer dot) for heads [head, head + HEADS) of ROWS rows.
template <int ROWS, int HEADS, int VECTORS>
LONGFILL_INLINE void screen_heads(const ScreenArgs& a, int row, int head, const char* keys,
                                  __m512 (&total)[ROWS][VECTORS]) {
  const std::int64_t block_bytes = static_cast<std::int64_t>(a.dim) * kScreenLanes;
  const std::int64_t row_bytes = static_cast<std::int64_t>(a.heads) * a.dim;
  const std::int8_t* const queries = a.queries + row * row_bytes + static_cast<std::int64_t>(head) * a.dim;
  const std::int32_t* const offsets = a.offsets + static_cast<std::int64_t>(row) * a.heads + head;
  const float* const factors = a.factors + static_cast<std::int64_t>(row) * a.heads + head;
  __m512i dot[ROWS][HEADS][VECTORS];
  LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
    LONGFILL_UNROLL for (int h = 0; h < HEADS; ++h)
      LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) dot[r][h][v] = _mm512_set1_epi32(offsets[r * a.heads + h]);
  for (int d = 0; d < a.dim; d += 4) {
    __m512i k[VECTORS];
    LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v)
      k[v] = _mm512_load_si512(keys + v * block_bytes + d * kScreenLanes);
    LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
      LONGFILL_UNROLL for (int h = 0; h < HEADS; ++h) {
        std::int32_t four;
        std::memcpy(&four, queries + r * row_bytes + h * a.dim + d, sizeof four);
        const __m512i q = _mm512_set1_epi32(four);
        LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) dot_bytes(dot[r][h][v], k[v], q);
      }
  }
  LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
    LONGFILL_UNROLL for (int h = 0; h < HEADS; ++h) {
      const __m512 factor = _mm512_set1_ps(factors[r * a.heads + h]);
      LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) {
        const __m512 relu = _mm512_cvtepi32_ps(_mm512_max_epi32(dot[r][h][v], _mm512_setzero_si512()));
        total[r][v] = _mm512_fmadd_ps(factor, relu, total[r][v]);
      }
    }
}

// Rows [row, row + ROWS) against blocks [block, block + VECTORS), HEADS of their heads at a time.
template <int ROWS, int HEADS, int VECTORS>
LONGFILL_INLINE void screen_blocks(const ScreenArgs& a, int row, int block, ScreenMasks& masks) {
  const char* const keys = a.keys + static_cast<std::int64_t>(block) * a.dim * kScreenLanes;
  const int key = block * kScreenLanes;
  __m512 total[ROWS][VECTORS];
  LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
    LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) {
      const __m512 norm = _mm512_load_ps(a.norms + key + 16 * v);
      const __m512 error = _mm512_load_ps(a.errors + key + 16 * v);
      const __m512 by_error = _mm512_mul_ps(_mm512_set1_ps(a.error_weights[row + r]), error);
      total[r][v] = _mm512_fmadd_ps(_mm512_set1_ps(a.norm_weights[row + r]), norm, by_error);
    }
  int head = 0;
  for (; head + HEADS <= a.heads; head += HEADS) screen_heads<ROWS, HEADS, VECTORS>(a, row, head, keys, total);
  if constexpr (ROWS == 1 && HEADS > 1) {
    for (; head < a.heads; ++head) screen_heads<ROWS, 1, VECTORS>(a, row, head, keys, total);
  }
  LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
    LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) {
      const __m512 bound = _mm512_mul_ps(total[r][v], _mm512_load_ps(a.scales + key + 16 * v));
      // "Not at most": a NaN passes.
      const __mmask16 pass = _mm512_cmp_ps_mask(bound, _mm512_set1_ps(a.thresholds[row + r]), _CMP_NLE_UQ);
      masks.set(row + r, block + v, pass);
    }
}

template <int ROWS, int HEADS>
LONGFILL_INLINE void screen_rows(const ScreenArgs& a, int row, int blocks, ScreenMasks& masks) {
  int block = 0;
  for (; block + kScreenVectors <= blocks; block += kScreenVectors)
    screen_blocks<ROWS, HEADS, kScreenVectors>(a, row, block, masks);
  for (; block < blocks; ++block) screen_blocks<ROWS, HEADS, 1>(a, row, block, masks);
}

template <int HEADS = kScreenChains>
void screen_masks(const ScreenArgs& a, int blocks, ScreenMasks& masks) {
  if constexpr (HEADS > 1) {
    if (a.heads < HEADS) return screen_masks<HEADS - 1>(a, blocks, masks);
  }
  constexpr int rows_together = kScreenChains / HEADS;
  int row = 0;
  // More heads than HEADS only where that is kScreenChains, and then rows_together is 1.
  for (; row + rows_together <= a.rows; row += rows_together) screen_rows<rows_together, HEADS>(a, row, blocks, masks);
  for (; row < a.rows; ++row) screen_rows<1, HEADS>(a, row, blocks, masks);
}

void screen_test(const ScreenArgs& a) {
  std::uint8_t numbers[64];
  for (int i = 0; i < 64; ++i) numbers[i] = static_cast<std::uint8_t>(i);
  const __m512i lanes = _mm512_loadu_si512(numbers);
  ScreenMasks masks;
  screen_masks(a, static_cast<int>((a.seen[a.rows - 1] + kScreenLanes - 1) / kScreenLanes), masks);
  for (int r = 0; r < a.rows; ++r) {
    const std::int64_t visible = a.seen[r];
    std::int64_t count = 0;
    for (std::int64_t first = 0; first < visible; first += 64) {
      std::uint64_t passed = masks.words[r][first / 64];
      if (visible - first < 64) passed &= (std::uint64_t{1} << (visible - first)) - 1;
      const __m512i keys = _mm512_add_epi8(lanes, _mm512_set1_epi8(static_cast<char>(first)));
      _mm512_storeu_si512(a.survivors + r * kSurvivorStride + count, _mm512_maskz_compress_epi8(passed, keys));
      count += __builtin_popcountll(passed);
    }
    a.counts[r] = static_cast<std::int32_t>(count);
  }
}

constexpr ScreenKernels kScreenAvx512 = {screen_pack_block, screen_test};

}  // namespace
}  // namespace longfill
