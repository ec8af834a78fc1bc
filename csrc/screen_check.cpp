#include "screen_check.h"

#include <algorithm>

#include "screen_scratch.h"

namespace longfill {

void screen_check(const Isa& isa, const ScreenCheck& check, std::uint8_t* passed) {
  Tiling tiling(isa, check.heads, check.dim, 1);
  tiling.block_rows = 1;
  tiling.tile_keys = kScreenTileKeys;
  Carver measure(nullptr);
  ScreenScratch(measure, tiling, check.heads, check.dim);
  const Bytes bytes = allocate(measure.used());
  Carver carver(bytes.get());
  ScreenScratch c(carver, tiling, check.heads, check.dim);

  const std::uint8_t* keys[kScreenTileKeys];
  for (int i = 0; i < kScreenTileKeys; ++i) keys[i] = check.keys + std::min(i, check.num_keys - 1) * check.dim;
  c.pack_tile(*isa.screen, keys, check.scales, check.num_keys, check.dim);
  const std::int64_t row_values = static_cast<std::int64_t>(check.heads) * check.dim;
  std::fill(passed, passed + static_cast<std::int64_t>(check.rows) * check.num_keys, std::uint8_t{0});
  const std::int64_t seen = check.num_keys;
  for (std::int64_t r = 0; r < check.rows; ++r) {
    c.pack_row(0, check.queries + r * row_values, check.weights + r * check.heads, check.heads, check.dim);
    c.error_weights[0] *= check.bound_factor;
    c.norm_weights[0] *= check.bound_factor;
    isa.screen->test(c.arguments(0, 1, check.thresholds + r, &seen, check.heads, check.dim));
    for (std::int32_t i = 0; i < c.survivor_counts[0]; ++i) passed[r * check.num_keys + c.survivors[i]] = 1;
  }
}

}  // namespace longfill
