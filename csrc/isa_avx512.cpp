// AVX-512 without bf16: sixteen fp32 lanes.
#include <immintrin.h>

#include "attention_plain.h"
#include "avx512_topk.h"
#include "linear_steps.h"
#include "rows_steps.h"
#include "score.h"
#include "tile.h"
#include "unpack.h"

namespace longfill {
namespace {

struct Avx512 {
  using Float = __m512;
  using Keys = __m512;
  static constexpr int lanes = 16;
  static constexpr int depth = 1;
  static constexpr std::size_t pair_bytes = 4;
  static constexpr std::size_t step_bytes = 64;
  static constexpr int accumulator_rows = 8;
  static constexpr int vectors = 2;
  static constexpr int tile_rows = 6;
  static constexpr int tile_vectors = 4;

  static LONGFILL_INLINE Float zero() { return _mm512_setzero_ps(); }
  static LONGFILL_INLINE Keys load_keys(const char* p) { return _mm512_load_ps(p); }
  static LONGFILL_INLINE Keys broadcast(const char* p) { return _mm512_set1_ps(*reinterpret_cast<const float*>(p)); }
  static LONGFILL_INLINE Float dot(Float sum, Keys q, Keys k) { return _mm512_fmadd_ps(q, k, sum); }
  // max returns its second operand where either is NaN, so a NaN stays.
  static LONGFILL_INLINE Float weigh(Float total, float w, Float dot) {
    return _mm512_fmadd_ps(_mm512_set1_ps(w), _mm512_max_ps(zero(), dot), total);
  }
  static LONGFILL_INLINE void store_scaled(float* out, Float total, const float* scales) {
    _mm512_store_ps(out, _mm512_mul_ps(total, _mm512_load_ps(scales)));
  }
  static LONGFILL_INLINE Float load(const float* p) { return _mm512_loadu_ps(p); }
  static LONGFILL_INLINE void store(float* p, Float f) { _mm512_storeu_ps(p, f); }
};

}  // namespace

void tile_fp32_avx512(const TileArgs& args) { tile<Avx512>(args); }
const AttentionSteps attention_fp32_avx512 = attention_steps_fp32<Avx512, 16>();
void latent_to_fp32_avx512(const LatentLayout& layout, const std::uint8_t* row, char* out) {
  latent_to_fp32<Avx512::lanes>(layout, row, out);
}

const Isa avx512_isa = {"avx512",      Avx512::lanes,  4,         pack_query_fp32, unpack_block_fp32<Avx512::lanes>,
                        score<Avx512>, collect_avx512, keep_best<VectorSteps>, spin<Avx512>,
                        Avx512::lanes,  Avx512::tile_vectors, tile_fp32_avx512, nullptr,
                      linear_steps<Avx512::lanes>(nullptr),
                        &attention_fp32_avx512, nullptr, latent_to_fp32_avx512, latent_to_bf16<Avx512::lanes>, &row_steps, nullptr, transpose_block<Avx512::lanes>,
                      Avx512::tile_rows};

}  // namespace longfill
