// One instruction set's kernels as a table of functions, and the choice between them at run time.
//
// A file per instruction set fills the table; nothing else is compiled with special flags, so a build runs on any
// machine of its architecture. Invariant: the bits of a (row, key) score depend on that row, that key and the
// instruction set only, never on how many rows or keys share a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace longfill {

struct AttentionSteps;
struct LatentLayout;

// Rows against one packed key tile: scores[row][key] = scale[key] * sum over heads of w[row][head] * relu(q . k).
struct ScoreArgs {
  const char* queries;        // packed rows, each heads * dim values
  std::size_t query_stride;   // bytes between rows
  const float* weights;       // [rows][heads]
  std::int64_t weight_stride; // floats between rows
  const char* keys;           // packed blocks of `lanes` keys
  const float* scales;        // one a key
  float* scores;              // [rows][keys], room for whole blocks
  std::int64_t score_stride;  // floats between rows
  int rows;
  int heads;
  int dim;
  int blocks;
};

// Candidates of one row, in ascending order of position.
struct Candidates {
  float* scores;
  std::int32_t* positions;
  std::int64_t count;
};

// A tile's scores on their way into the candidates of their rows.
struct CollectArgs {
  const float* scores;
  std::int64_t score_stride;
  int rows;
  const std::int64_t* seen;  // [rows]: keys of the tile that each row sees
  std::int32_t first_position;
  // Row r's candidates start at `r * candidate_stride` and have room for a whole tile and 16 more.
  float* candidate_scores;
  std::int32_t* candidate_positions;
  std::int64_t candidate_stride;
  std::int64_t* counts;
  const float* thresholds;
};

// Bytes that will be read soon.
struct Fetch {
  const char* from = nullptr;
  std::int64_t bytes = 0;
};

// c[row][0, vectors * lanes) = or += sum over steps of a[row][step] * b[step]. A step is one value of float32, or a pair
// of bf16 values.
struct TileArgs {
  const char* a;           // rows of values, `a_stride` bytes apart
  std::int64_t a_stride;
  const char* b;           // packed: a step after the other, each `vectors` vectors; 64-byte aligned
  float* c;                // rows `c_stride` floats apart
  std::int64_t c_stride;
  std::int64_t steps;
  int rows;
  int vectors;             // 1 to `tile_vectors`
  bool accumulate;
  // Fetched beside the products of each group of rows: into L1, and into L2.
  Fetch next_rows;
  Fetch next_sums;
  Fetch later;
};

// How many of `left` rows make the next group, of at most `tile_rows`: the last two groups share theirs evenly, because
// the sums of a row or two are too few to keep the multiply-adds busy.
constexpr int group_rows(std::int64_t left, int tile_rows) {
  return static_cast<int>(left <= tile_rows ? left : left < 2 * tile_rows ? (left + 1) / 2 : tile_rows);
}

// One vector of fp8 weights over some steps that share their scales.
struct DecodeArgs {
  const std::uint8_t* values;  // a step's bytes: lanes, or lanes of pairs for bf16
  std::int64_t value_stride;   // bytes between steps
  const float* scales[2];      // one a lane, for the first and the second value of a pair
  bool one_scale;              // they are all the same
  bool round_bf16;             // fp32 only: round the scaled value to bf16
  char* out;
  std::int64_t out_stride;
  std::int64_t steps;
};

// What a product with packed weights does beside its multiply-adds.
struct LinearSteps {
  void (*widen)(const std::uint16_t* in, std::int64_t n, float* out);
  void (*narrow)(const float* in, std::int64_t n, std::uint16_t* out);
  // gate[i] = silu(gate[i]) * up[i]; both arrays have room for whole vectors.
  void (*swiglu)(float* gate, const float* up, std::int64_t n);
  // total[i] += in[i] * factor, the product rounded.
  void (*add_scaled)(const float* in, float factor, std::int64_t n, float* total);
  void (*decode_to_fp32)(const DecodeArgs& args);
  void (*decode_to_bf16)(const DecodeArgs& args);  // null where tile_bf16 is
};
struct RowSteps;  // rows.h
struct ScreenKernels;

struct Isa {
  const char* name;
  int lanes;           // keys in a packed block
  int bytes_per_value; // of packed queries and keys
  void (*pack_query)(const float* values, std::int64_t count, char* out);
  // `rows` holds `lanes` pointers to e4m3 keys of `dim` bytes (a multiple of 16).
  void (*unpack_block)(const std::uint8_t* const* rows, int dim, char* out);
  void (*score)(const ScoreArgs& args);
  // Append every key with a score above its row's threshold (so never NaN).
  void (*collect)(const CollectArgs& args);
  // Of more than k candidates keep the k best, ties to the lower position, and perhaps others up to `most`. Returns
  // the lowest score kept: at least k kept candidates reach it. `keys` is scratch for `count` numbers.
  float (*keep_best)(Candidates& row, std::int64_t k, std::int64_t most, std::int32_t* keys);
  // Run the multiply-add instruction of `score` from registers; returns the floating-point operations done.
  double (*spin)(std::int64_t iterations);
  // Small matrix products. A packed step holds `lanes` fp32 values a vector, or as many pairs of bf16. `tile_bf16` is
  // null where there is no such instruction: bf16 values are then widened to fp32, which is exact.
  int tile_lanes;
  int tile_vectors;
  void (*tile_fp32)(const TileArgs& args);
  void (*tile_bf16)(const TileArgs& args);
  LinearSteps linear;
  // `attention_bf16` is null where tile_bf16 is.
  const AttentionSteps* attention_fp32;
  const AttentionSteps* attention_bf16;
  // One cached row to `width` numbers, nothing written beyond them.
  void (*latent_to_fp32)(const LatentLayout& layout, const std::uint8_t* row, char* out);
  void (*latent_to_bf16)(const LatentLayout& layout, const std::uint8_t* row, char* out);
  const RowSteps* rows;
  const ScreenKernels* screen;  // null where there is none
  // As unpack_block, from keys of `dim` floats; null where the kernels of `with_float_keys` are another set's.
  void (*transpose_block)(const std::uint8_t* const* rows, int dim, char* out);
  int tile_rows;  // that tile_fp32 and tile_bf16 take as one group
};

// Every instruction set of this build that this machine runs, best first; the portable one is always last.
const std::vector<const Isa*>& supported_isas();
// The one called `name`; throws std::invalid_argument where the build or the machine lacks it.
const Isa& isa_named(const std::string& name);

// The same instruction set for index keys that are stored as floats: they are scored in fp32, and not screened.
Isa with_float_keys(const Isa& isa);

extern const Isa portable_isa;
#ifdef LONGFILL_X86
extern const Isa avx2_isa;
extern const Isa avx512_isa;
void tile_fp32_avx512(const TileArgs& args);
extern const AttentionSteps attention_fp32_avx512;
void latent_to_fp32_avx512(const LatentLayout& layout, const std::uint8_t* row, char* out);
#endif
#ifdef LONGFILL_AVX512_BF16
extern const Isa avx512_bf16_isa;
#endif

}  // namespace longfill
