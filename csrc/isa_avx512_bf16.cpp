// AVX-512 with the bf16 dot product: two products a lane and instruction, summed in fp32.
//
// e4m3 values are exact in bf16 and their products exact in fp32, so only the order of the sum differs from the fp32
// instruction sets.
#include <immintrin.h>

#include <cstring>

#include "attention_avx512_bf16.h"
#include "avx512_keys.h"
#include "avx512_screen.h"
#include "avx512_topk.h"
#include "convert.h"
#include "e4m3.h"
#include "linear_steps.h"
#include "rows_steps.h"
#include "score.h"
#include "tile.h"

namespace longfill {
namespace {

struct Avx512Bf16 {
  using Float = __m512;
  using Keys = __m512bh;
  static constexpr int lanes = 16;
  static constexpr int depth = 2;
  static constexpr std::size_t pair_bytes = 4;
  static constexpr std::size_t step_bytes = 64;
  static constexpr int accumulator_rows = 8;
  static constexpr int vectors = 2;
  static constexpr int tile_rows = 6;
  static constexpr int tile_vectors = 4;

  static LONGFILL_INLINE Float zero() { return _mm512_setzero_ps(); }
  static LONGFILL_INLINE Keys load_keys(const char* p) { return (__m512bh)_mm512_load_si512(p); }
  static LONGFILL_INLINE Keys broadcast(const char* p) {
    std::int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static LONGFILL_INLINE Float dot(Float sum, Keys q, Keys k) { return _mm512_dpbf16_ps(sum, q, k); }
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

// The order of four consecutive dims in packed queries and keys, which makes two pairs: it saves unpack_block two
// shuffles of four, and a dot product does not mind.
constexpr int kPairs[4] = {0, 2, 1, 3};

void pack_query(const float* values, std::int64_t count, char* out) {
  std::uint16_t* const packed = reinterpret_cast<std::uint16_t*>(out);
  for (std::int64_t i = 0; i < count; i += 4)
    for (int j = 0; j < 4; ++j) packed[i + j] = to_bf16(values[i + kPairs[j]]);
}

// The two bytes of every bf16 magnitude that e4m3 has.
struct Bf16Bytes {
  std::uint8_t low[128];
  std::uint8_t high[128];

  Bf16Bytes() {
    for (int byte = 0; byte < 128; ++byte) {
      low[byte] = static_cast<std::uint8_t>(e4m3.as_bf16[byte]);
      high[byte] = static_cast<std::uint8_t>(e4m3.as_bf16[byte] >> 8);
    }
  }
};

// [dim / 2][16 keys][2] bf16, pairs in the order of kPairs.
void unpack_block(const std::uint8_t* const* rows, int dim, char* out) {
  static const Bf16Bytes tables;
  const ByteTable low_table(tables.low);
  const ByteTable high_table(tables.high);
  const __m512i sign_bit = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i even = _mm512_set1_epi16(0x00ff);
  constexpr int kOrWithSign = 0xf8;    // a | (b & c)
  constexpr int kSelect = 0xca;        // a ? b : c, bit by bit
  for (int d = 0; d < dim; d += 16) {
    __m512i bytes[4];
    load_keys_across(rows, d, bytes);
    LONGFILL_UNROLL for (int i = 0; i < 4; ++i) {
      const __m512i low = low_table(bytes[i]);
      const __m512i high = _mm512_ternarylogic_epi32(high_table(bytes[i]), bytes[i], sign_bit, kOrWithSign);
      const __m512i first = _mm512_ternarylogic_epi32(even, low, _mm512_slli_epi16(high, 8), kSelect);
      const __m512i second = _mm512_ternarylogic_epi32(even, _mm512_srli_epi16(low, 8), high, kSelect);
      char* const pairs = out + (d / 2 + 2 * i) * Avx512Bf16::step_bytes;
      _mm512_store_si512(pairs, first);
      _mm512_store_si512(pairs + Avx512Bf16::step_bytes, second);
    }
  }
}

// The 128 magnitudes of e4m3 times one scale, as decode_to_bf16 rounds them; a value's sign comes back last.
struct ScaledTable {
  __m512i part[4];

  explicit ScaledTable(float scale) {
    using V = Vectors<16>;
    for (int i = 0; i < 4; ++i) {
      std::uint16_t rounded[32];
      for (int half = 0; half < 32; half += 16) {
        const auto value = V::load<V::Floats>(e4m3.as_float + 32 * i + half) * scale;
        V::store(rounded + half, __builtin_convertvector(V::rounded(value) >> 16, V::Halves));
      }
      part[i] = _mm512_loadu_si512(rounded);
    }
  }
};

// Bytes between what is decoded and what is fetched from memory meanwhile: a panel is read from one end to the other.
constexpr std::int64_t kAhead = 8192;

void decode_pairs(const DecodeArgs& a) {
  if (!a.one_scale) return decode_to_bf16<16>(a);
  const ScaledTable table(a.scales[0][0]);
  const __m512i sign_bit = _mm512_set1_epi16(static_cast<short>(0x8000));
  const __m512i upper_half = _mm512_set1_epi16(0x40);
  // Copies: a store through `out` might otherwise change them.
  const std::uint8_t* from = a.values;
  char* out = a.out;
  const std::int64_t value_stride = a.value_stride;
  const std::int64_t out_stride = a.out_stride;
  _Pragma("GCC unroll 4") for (std::int64_t s = a.steps; s > 0; --s, from += value_stride, out += out_stride) {
    __builtin_prefetch(from + kAhead);
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i small = _mm512_permutex2var_epi16(table.part[0], bytes, table.part[1]);
    const __m512i large = _mm512_permutex2var_epi16(table.part[2], bytes, table.part[3]);
    const __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(bytes, upper_half), small, large);
    // magnitude ^ (bytes << 8 & sign bit)
    const __m512i value = _mm512_ternarylogic_epi32(magnitude, _mm512_slli_epi16(bytes, 8), sign_bit, 0x78);
    _mm512_store_si512(out, value);
  }
}
constexpr AttentionSteps attention = attention_steps_bf16<Avx512Bf16, 16>();

}  // namespace

const Isa avx512_bf16_isa = {"avx512_bf16",     Avx512Bf16::lanes, 2,         pack_query,      unpack_block,
                             score<Avx512Bf16>, collect_avx512, keep_best<VectorSteps>, spin<Avx512Bf16>,
                             Avx512Bf16::lanes, Avx512Bf16::tile_vectors, tile_fp32_avx512, tile<Avx512Bf16>,
                      linear_steps<Avx512Bf16::lanes>(decode_pairs),
                             &attention_fp32_avx512, &attention, latent_to_fp32_avx512, latent_to_bf16_avx512, &row_steps, &kScreenAvx512, nullptr,
                      Avx512Bf16::tile_rows};

}  // namespace longfill
