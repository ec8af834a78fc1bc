// Appends a tile's scores to the candidates of their rows. Internal linkage, as in score.h.
#pragma once

#include "isa.h"

namespace longfill {
namespace {

// One key at a time; `row` has room for n more.
inline void append_each(const float* scores, std::int64_t n, std::int32_t first, float threshold, Candidates& row) {
  for (std::int64_t i = 0; i < n; ++i) {
    row.scores[row.count] = scores[i];
    row.positions[row.count] = first + static_cast<std::int32_t>(i);
    row.count += scores[i] > threshold;
  }
}

// `append(scores, n, first, threshold, row)` for every row of the group.
template <class Append>
inline void collect_rows(const CollectArgs& a, const Append& append) {
  for (int r = 0; r < a.rows; ++r) {
    Candidates row{a.candidate_scores + r * a.candidate_stride, a.candidate_positions + r * a.candidate_stride,
                   a.counts[r]};
    append(a.scores + r * a.score_stride, a.seen[r], a.first_position, a.thresholds[r], row);
    a.counts[r] = row.count;
  }
}

}  // namespace
}  // namespace longfill
