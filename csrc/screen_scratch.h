// What one thread screens in: a tile of integer keys, its rows' integer queries, and survivors that wait to be scored.
//
// Invariant: sized by Tiling alone.
#pragma once

#include <cstdint>
#include <limits>

#include "memory.h"
#include "screen.h"
#include "tiling.h"

namespace longfill {

// Survivors of a row are scored so many at a time, in order of position.
constexpr int kPendingKeys = 2 * kScreenLanes;
static_assert(kScreenTileKeys >= kMaxTileKeys && kScreenRows >= kGroupRows, "a screen takes what index_topk cuts");

struct ScreenScratch {
  char* tile;
  float* norms;
  float* errors;
  float* scales;
  std::int8_t* queries;
  std::int32_t* offsets;
  float* factors;
  float* error_weights;
  float* norm_weights;
  std::uint8_t* survivors;  // [kScreenRows][kSurvivorStride]
  std::int32_t* survivor_counts;
  // [rows][kPendingKeys]
  const std::uint8_t** pending_keys;
  float* pending_scales;
  std::int32_t* pending_positions;
  std::int32_t* pending;  // how many, by row
  std::int64_t packed_rows = 0;

  ScreenScratch(Carver& carver, const Tiling& tiling, int heads, int dim) {
    const std::int64_t rows = tiling.block_rows;
    tile = carver.take<char>(static_cast<std::int64_t>(tiling.tile_keys) * dim);
    norms = carver.take<float>(tiling.tile_keys);
    errors = carver.take<float>(tiling.tile_keys);
    scales = carver.take<float>(tiling.tile_keys);
    queries = carver.take<std::int8_t>(rows * heads * dim);
    offsets = carver.take<std::int32_t>(rows * heads);
    factors = carver.take<float>(rows * heads);
    error_weights = carver.take<float>(rows);
    norm_weights = carver.take<float>(rows);
    survivors = carver.take<std::uint8_t>(kScreenRows * kSurvivorStride);
    survivor_counts = carver.take<std::int32_t>(kScreenRows);
    pending_keys = carver.take<const std::uint8_t*>(rows * kPendingKeys);
    pending_scales = carver.take<float>(rows * kPendingKeys);
    pending_positions = carver.take<std::int32_t>(rows * kPendingKeys);
    pending = carver.take<std::int32_t>(rows);
  }

  void pack_row(std::int64_t r, const float* query, const float* weights, int heads, int dim) {
    ScreenRow row{queries + r * heads * dim, offsets + r * heads, factors + r * heads, 0.0f, 0.0f};
    pack_screen_row(query, weights, heads, dim, row);
    error_weights[r] = row.error_weight;
    norm_weights[r] = row.norm_weight;
  }

  // `keys` are filled up to a whole block.
  void pack_tile(const ScreenKernels& kernels, const std::uint8_t* const* keys, const float* key_scales,
                 std::int64_t count, int dim) {
    for (std::int64_t i = 0; i < count; i += kScreenLanes)
      kernels.pack_block(keys + i, dim, tile + i * dim, norms + i, errors + i);
    for (std::int64_t i = 0; i < count; ++i) {
      const bool bounded = screened_scale(key_scales[i]);
      scales[i] = bounded ? key_scales[i] : 1.0f;
      if (!bounded) errors[i] = std::numeric_limits<float>::quiet_NaN();
    }
  }

  // Rows [r, r + count), each of which sees so many keys of the tile.
  ScreenArgs arguments(std::int64_t r, std::int64_t count, const float* thresholds, const std::int64_t* seen,
                       int heads, int dim) const {
    return {queries + r * heads * dim, offsets + r * heads, factors + r * heads, error_weights + r, norm_weights + r,
            thresholds, tile, norms, errors, scales, survivors, survivor_counts, seen, static_cast<int>(count), heads,
            dim};
  }
};

}  // namespace longfill
