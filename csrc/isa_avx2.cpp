// AVX2 with fused multiply-add: eight fp32 lanes.
#include <immintrin.h>

#include "attention_plain.h"
#include "collect.h"
#include "linear_steps.h"
#include "rows_steps.h"
#include "score.h"
#include "tile.h"
#include "topk.h"
#include "unpack.h"

namespace longfill {
namespace {

struct Avx2 {
  using Float = __m256;
  using Keys = __m256;
  static constexpr int lanes = 8;
  static constexpr int depth = 1;
  static constexpr std::size_t pair_bytes = 4;
  static constexpr std::size_t step_bytes = 32;
  static constexpr int accumulator_rows = 4;
  static constexpr int vectors = 2;
  static constexpr int tile_rows = 6;
  static constexpr int tile_vectors = 2;

  static LONGFILL_INLINE Float zero() { return _mm256_setzero_ps(); }
  static LONGFILL_INLINE Keys load_keys(const char* p) { return _mm256_load_ps(reinterpret_cast<const float*>(p)); }
  static LONGFILL_INLINE Keys broadcast(const char* p) {
    return _mm256_broadcast_ss(reinterpret_cast<const float*>(p));
  }
  static LONGFILL_INLINE Float dot(Float sum, Keys q, Keys k) { return _mm256_fmadd_ps(q, k, sum); }
  // max returns its second operand where either is NaN, so a NaN stays.
  static LONGFILL_INLINE Float weigh(Float total, float w, Float dot) {
    return _mm256_fmadd_ps(_mm256_set1_ps(w), _mm256_max_ps(zero(), dot), total);
  }
  static LONGFILL_INLINE void store_scaled(float* out, Float total, const float* scales) {
    _mm256_store_ps(out, _mm256_mul_ps(total, _mm256_load_ps(scales)));
  }
  static LONGFILL_INLINE Float load(const float* p) { return _mm256_loadu_ps(p); }
  static LONGFILL_INLINE void store(float* p, Float f) { _mm256_storeu_ps(p, f); }
};

inline void append_vectors(const float* scores, std::int64_t n, std::int32_t first, float threshold, Candidates& row) {
  const __m256 bound = _mm256_set1_ps(threshold);
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    int mask = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_load_ps(scores + i), bound, _CMP_GT_OQ));
    for (; mask != 0; mask &= mask - 1, ++row.count) {
      const int lane = __builtin_ctz(mask);
      row.scores[row.count] = scores[i + lane];
      row.positions[row.count] = first + static_cast<std::int32_t>(i) + lane;
    }
  }
  append_each(scores + i, n - i, first + static_cast<std::int32_t>(i), threshold, row);
}

void collect(const CollectArgs& args) { collect_rows(args, append_vectors); }

constexpr AttentionSteps attention = attention_steps_fp32<Avx2, 12>();

}  // namespace

const Isa avx2_isa = {"avx2",      Avx2::lanes, 4,         pack_query_fp32, unpack_block_fp32<Avx2::lanes>,
                      score<Avx2>, collect,     keep_best<PlainSteps>, spin<Avx2>,
                      Avx2::lanes,  Avx2::tile_vectors, tile<Avx2>, nullptr,
                      linear_steps<Avx2::lanes>(nullptr),
                      &attention,   nullptr,     latent_to_fp32<Avx2::lanes>, latent_to_bf16<Avx2::lanes>, &row_steps, nullptr, transpose_block<Avx2::lanes>,
                      Avx2::tile_rows};

}  // namespace longfill
