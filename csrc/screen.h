// A certified screen before the exact scores: int8 approximations with a bound that no exact score exceeds.
//
// Invariant: a key that `test` drops has a score, as the exact kernel rounds it, no greater than its row's threshold,
// so the exact kernel would not have kept it either. How the bound comes about stands in screen.cpp.
#pragma once

#include <cstdint>

namespace longfill {

constexpr int kScreenLanes = 16;
constexpr int kScreenRows = 8;
constexpr int kScreenTileKeys = 256;                  // at most: a byte names each
constexpr int kSurvivorStride = kScreenTileKeys + 64;  // with room for a whole store past the last

// Rows against one packed key tile.
struct ScreenArgs {
  const std::int8_t* queries;    // [rows][heads][dim]
  const std::int32_t* offsets;   // [rows][heads]: what makes up for the keys' offset of 128
  const float* factors;          // [rows][heads]: of an integer dot product, weight included
  const float* error_weights;    // [rows]: of a key's error, NaN where a row has no bound
  const float* norm_weights;     // [rows]: of a key's norm
  const float* thresholds;       // [rows]
  const char* keys;              // [blocks][dim / 4][16 keys][4]: 128 + integer
  const float* norms;            // of the integer keys, one a key
  const float* errors;           // of them against the true ones, NaN where a key has no bound
  const float* scales;
  std::uint8_t* survivors;       // [rows][kSurvivorStride]: keys that may pass the threshold, ascending
  std::int32_t* counts;          // [rows]: how many
  const std::int64_t* seen;      // [rows]: keys of the tile that each row sees, at least 1, ascending
  int rows;                      // at most kScreenRows
  int heads;
  int dim;
};

// An instruction set's screen; its blocks hold 16 keys.
struct ScreenKernels {
  // `rows` holds 16 pointers to e4m3 keys of `dim` bytes.
  void (*pack_block)(const std::uint8_t* const* rows, int dim, char* out, float* norms, float* errors);
  void (*test)(const ScreenArgs& args);
};

// Integer keys are e4m3 values over this step, at most 127; their errors are counted in 1/32 and rounded up.
constexpr float kKeyStep = 3.5f;
constexpr float kErrorUnit = 1.0f / 32.0f;

struct ScreenKeyTables {
  std::uint8_t magnitude[128];  // by the magnitude bits of e4m3
  std::uint8_t error[128];      // at most 127
};
const ScreenKeyTables& screen_keys();

// What `test` needs of one row. Invariant: `error_weight` and `norm_weight` cover every rounding of both kernels.
struct ScreenRow {
  std::int8_t* query;     // [heads][dim]
  std::int32_t* offsets;  // [heads]
  float* factors;         // [heads]
  float error_weight;
  float norm_weight;
};

// `queries` fp32 [heads][dim], `weights` [heads]. A row with values that the bound does not cover (see screen.cpp) gets
// NaN as its weights: all its keys pass.
void pack_screen_row(const float* queries, const float* weights, int heads, int dim, ScreenRow& row);

// Whether a key's scale is one that the bound covers.
bool screened_scale(float scale);

}  // namespace longfill
