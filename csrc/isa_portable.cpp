// Four lanes of the compiler's own vector type: NEON on arm64, SSE2 on x86-64, plain code elsewhere.
#include <cstring>

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

struct Portable {
  typedef float Float __attribute__((vector_size(16)));
  using Keys = Float;
  static constexpr int lanes = 4;
  static constexpr int depth = 1;             // values of `dim` a step consumes
  static constexpr std::size_t pair_bytes = 4;  // of one query for a step
  static constexpr std::size_t step_bytes = 16; // of one key block for a step
  static constexpr int accumulator_rows = 4;
  static constexpr int vectors = 2;
  static constexpr int tile_rows = 4;
  static constexpr int tile_vectors = 2;

  static Float zero() { return Float{0, 0, 0, 0}; }
  static Keys load_keys(const char* p) {
    Keys k;
    std::memcpy(&k, p, sizeof k);
    return k;
  }
  static Keys broadcast(const char* p) {
    float q;
    std::memcpy(&q, p, sizeof q);
    return Keys{q, q, q, q};
  }
  static Float dot(Float sum, Keys q, Keys k) { return sum + q * k; }
  // A NaN compares false and stays.
  static Float weigh(Float total, float w, Float dot) { return total + w * (dot < 0.0f ? zero() : dot); }
  static void store_scaled(float* out, Float total, const float* scales) {
    Float s;
    std::memcpy(&s, scales, sizeof s);
    s *= total;
    std::memcpy(out, &s, sizeof s);
  }
  static Float load(const float* p) {
    Float f;
    std::memcpy(&f, p, sizeof f);
    return f;
  }
  static void store(float* p, Float f) { std::memcpy(p, &f, sizeof f); }
};

void collect(const CollectArgs& args) { collect_rows(args, append_each); }

constexpr AttentionSteps attention = attention_steps_fp32<Portable, 8>();

}  // namespace

const Isa portable_isa = {"portable",      Portable::lanes, 4,
                          pack_query_fp32, unpack_block_fp32<Portable::lanes>,
                          score<Portable>, collect,         keep_best<PlainSteps>,
                          spin<Portable>,  Portable::lanes,  Portable::tile_vectors, tile<Portable>,  nullptr,
                      linear_steps<Portable::lanes>(nullptr),
                          &attention,      nullptr,         latent_to_fp32<Portable::lanes>,
                          latent_to_bf16<Portable::lanes>, &row_steps, nullptr, transpose_block<Portable::lanes>,
                      Portable::tile_rows};

}  // namespace longfill
