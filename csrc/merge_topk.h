// The exact top-k of rows whose keys lie in several shards, from each shard's own best.
//
// Invariant: the result is what one selection over all keys would give: highest scores, ties to the lower position.
#pragma once

#include <cstdint>

#include "index_topk.h"

namespace longfill {

// [rows][entries]: the shards' candidates side by side; a negative position, or a score of NaN or -inf, is none.
struct ShardCandidates {
  const float* scores;
  std::int64_t score_stride;
  const std::int32_t* positions;  // best in few ascending runs; no position twice
  std::int64_t position_stride;
  std::int64_t entries;
};

// Writes `out.positions`; `out.scores` is not read.
void merge_topk(const Isa& isa, const ShardCandidates& candidates, std::int64_t rows, const Selection& out,
                int num_threads);
// The most bytes that it allocates, for any rows.
std::int64_t merge_topk_scratch_bytes(std::int64_t entries, int num_threads);

}  // namespace longfill
