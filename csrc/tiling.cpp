#include "tiling.h"

#include <algorithm>
#include <cmath>

namespace longfill {
namespace {

constexpr std::int64_t kTileBytes = 32 << 10;    // of keys: they stream from L2, a few KB at a time
constexpr std::int64_t kFewRowsTileBytes = 8 << 10;
constexpr std::int64_t kQueryBytes = 512 << 10;  // of packed rows: half of a common L2
constexpr std::int64_t kCandidateBytes = 4 << 20;
constexpr std::int64_t kMaxBlockRows = 256;
constexpr std::int64_t kPiecesPerThread = 3;
constexpr std::int64_t kMinSplitKeys = 2048;
constexpr double kMacsPerThread = 4e6;  // below it a thread costs more to start than it saves

std::int64_t clamp(std::int64_t value, std::int64_t low, std::int64_t high) {
  return std::max(low, std::min(value, high));
}

}  // namespace

Tiling::Tiling(const Isa& isa, int heads, int dim, std::int64_t k) {
  const std::int64_t key_bytes = static_cast<std::int64_t>(dim) * isa.bytes_per_value;
  tile_keys = static_cast<int>(clamp(kTileBytes / key_bytes / 64 * 64, 32, kMaxTileKeys));
  few_rows_tile_keys = static_cast<int>(clamp(kFewRowsTileBytes / key_bytes / 32 * 32, 32, tile_keys));
  candidate_room = k + std::max<std::int64_t>(k, 192);
  kept_candidates = k + k / 4;
  screened_room = k + std::max<std::int64_t>(k / 8, 32);
  const std::int64_t by_queries = kQueryBytes / (heads * key_bytes);
  const std::int64_t by_candidates = kCandidateBytes / (candidate_stride() * 8);
  block_rows = clamp(std::min(by_queries, by_candidates) / kGroupRows * kGroupRows, kGroupRows, kMaxBlockRows);
}

namespace {

double macs_of(const ScoredRows& rows, int heads, int dim) {
  return static_cast<double>(rows.num_rows) * static_cast<double>(rows.keys()) * heads * dim;
}

std::vector<Piece> split_keys(const Tiling& tiling, const ScoredRows& block, std::int64_t splits, Plan& plan) {
  const std::int64_t keys = block.keys();
  const std::int64_t tiles = (keys + tiling.tile_keys - 1) / tiling.tile_keys;
  std::vector<Piece> parts;
  for (std::int64_t part = 0; part < splits; ++part) {
    const std::int64_t first = tiles * part / splits * tiling.tile_keys;
    const std::int64_t last = std::min(tiles * (part + 1) / splits * tiling.tile_keys, keys);
    parts.push_back({block, first, last, plan.partial_rows});
    plan.partial_rows += block.num_rows;
  }
  return parts;
}

}  // namespace

Plan make_plan(const Tiling& tiling, const std::vector<ScoredRows>& rows, int heads, int dim, int num_threads) {
  std::vector<ScoredRows> blocks;
  double macs = 0;
  for (const ScoredRows& r : rows) {
    for (std::int64_t first = 0; first < r.num_rows; first += tiling.block_rows) {
      const std::int64_t count = std::min(tiling.block_rows, r.num_rows - first);
      blocks.push_back(r.part(first, count));
      macs += macs_of(blocks.back(), heads, dim);
    }
  }
  Plan plan;
  plan.num_threads = static_cast<int>(clamp(static_cast<std::int64_t>(macs / kMacsPerThread), 1, num_threads));
  const double macs_per_piece = macs / static_cast<double>(kPiecesPerThread * plan.num_threads);
  for (const ScoredRows& block : blocks) {
    const std::int64_t keys = block.keys();
    if (keys == 0) {
      plan.pieces.push_back({block, 0, 0, -1});
      continue;
    }
    const auto wanted = static_cast<std::int64_t>(std::ceil(macs_of(block, heads, dim) / macs_per_piece));
    const std::int64_t most = plan.num_threads == 1 ? 1 : std::max<std::int64_t>(1, keys / kMinSplitKeys);
    const std::int64_t splits = clamp(wanted, 1, most);
    if (splits == 1) {
      plan.pieces.push_back({block, 0, keys, -1});
      continue;
    }
    std::vector<Piece> parts = split_keys(tiling, block, splits, plan);
    plan.pieces.insert(plan.pieces.end(), parts.begin(), parts.end());
    plan.merges.push_back(std::move(parts));
  }
  std::stable_sort(plan.pieces.begin(), plan.pieces.end(), [](const Piece& a, const Piece& b) {
    return a.rows.num_rows * (a.last_key - a.first_key) > b.rows.num_rows * (b.last_key - b.first_key);
  });
  return plan;
}

// Only blocks above an even share are split, and there are fewer of those than shares: a block of `x` shares takes at
// most x + 1 parts.
std::int64_t most_partial_rows(const Tiling& tiling, int num_threads) {
  return num_threads == 1 ? 0 : 2 * most_parts(num_threads) * tiling.block_rows;
}

std::int64_t most_parts(int num_threads) { return num_threads == 1 ? 0 : kPiecesPerThread * num_threads + 1; }

}  // namespace longfill
