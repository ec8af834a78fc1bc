// What the threads of index_topk work in. Invariant: sized by Tiling and the thread count alone.
#pragma once

#include <cstdint>
#include <optional>

#include "isa.h"
#include "memory.h"
#include "screen_choice.h"
#include "screen_scratch.h"
#include "tiling.h"

namespace longfill {

// What one thread works in.
struct Scratch {
  char* queries;
  char* tile;
  float* tile_scales;
  float* tile_scores;
  float* candidate_scores;
  std::int32_t* candidate_positions;
  std::int32_t* sort_keys;
  std::int64_t* counts;
  float* thresholds;
  const std::uint8_t** tile_keys;  // where each of the tile lies
  std::optional<ScreenScratch> screen;
  ScreenCounts counted;

  Scratch(Carver& carver, const Isa& isa, const Tiling& tiling, int heads, int dim, bool screened) {
    const std::int64_t value_bytes = isa.bytes_per_value;
    const std::int64_t candidates = tiling.block_rows * tiling.candidate_stride();
    queries = carver.take<char>(tiling.block_rows * heads * dim * value_bytes);
    tile = carver.take<char>(tiling.tile_keys * dim * value_bytes);
    tile_scales = carver.take<float>(tiling.tile_keys);
    tile_scores = carver.take<float>(static_cast<std::int64_t>(kGroupRows) * tiling.tile_keys);
    candidate_scores = carver.take<float>(candidates);
    candidate_positions = carver.take<std::int32_t>(candidates);
    sort_keys = carver.take<std::int32_t>(tiling.candidate_stride());
    counts = carver.take<std::int64_t>(tiling.block_rows);
    thresholds = carver.take<float>(tiling.block_rows);
    tile_keys = carver.take<const std::uint8_t*>(kMaxTileKeys);
    if (screened) screen.emplace(carver, tiling, heads, dim);
  }
};

// Selections over parts of the keys, k entries a row; shorter rows say how many.
struct Partials {
  float* scores;
  std::int32_t* positions;
  std::int64_t* counts;

  Partials(Carver& carver, std::int64_t rows, std::int64_t k)
      : scores(carver.take<float>(rows * k)),
        positions(carver.take<std::int32_t>(rows * k)),
        counts(carver.take<std::int64_t>(rows)) {}
};

// Where one thread brings a row's partial selections together.
struct MergeRoom {
  float* scores;
  std::int32_t* positions;
  std::int32_t* sort_keys;

  MergeRoom(Carver& carver, std::int64_t entries)
      : scores(carver.take<float>(entries + 16)),
        positions(carver.take<std::int32_t>(entries + 16)),
        sort_keys(carver.take<std::int32_t>(entries + 16)) {}
};

}  // namespace longfill
