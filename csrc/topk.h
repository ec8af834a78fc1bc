// Streaming exact top-k of one row: candidates above a threshold (collect.h), cut back when their buffer fills.
//
// Internal linkage, as in score.h. Invariants: candidates stay in ascending order of position, and since keys arrive
// in that order, a later score that equals the k-th best loses the tie; so `>` against the k-th best is exact.
#pragma once

#include <cstring>

#include "isa.h"

namespace longfill {
namespace {

// The order of floats as integers; adding zero makes -0 equal to +0. Candidates are never NaN.
inline std::int32_t order_key(float score) {
  const float value = score + 0.0f;
  std::int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float score_of(std::int32_t key) {
  const std::int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  float score;
  std::memcpy(&score, &bits, sizeof score);
  return score;
}

struct Range {
  std::int32_t low;
  std::int32_t high;
};

// The steps of keep_best in plain code.
struct PlainSteps {
  static Range order(const float* scores, std::int64_t count, std::int32_t* keys) {
    Range range{0x7fffffff, -0x7fffffff};
    for (std::int64_t i = 0; i < count; ++i) {
      keys[i] = order_key(scores[i]);
      range.low = keys[i] < range.low ? keys[i] : range.low;
      range.high = keys[i] > range.high ? keys[i] : range.high;
    }
    return range;
  }

  static std::int64_t count_from(const std::int32_t* keys, std::int64_t count, std::int32_t lowest) {
    std::int32_t found = 0;
    for (std::int64_t i = 0; i < count; ++i) found += keys[i] >= lowest;
    return found;
  }

  // Keep what lies above the cut and the first `ties` that equal it, in order; returns the lowest key kept.
  static std::int32_t keep(Candidates& row, const std::int32_t* keys, std::int32_t cut, std::int64_t ties) {
    std::int64_t kept = 0;
    std::int32_t lowest = 0x7fffffff;
    for (std::int64_t i = 0; i < row.count; ++i) {
      const bool tie = keys[i] == cut;
      const bool keep = keys[i] > cut || (tie && ties > 0);
      row.scores[kept] = row.scores[i];
      row.positions[kept] = row.positions[i];
      lowest = keep && keys[i] < lowest ? keys[i] : lowest;
      kept += keep;
      ties -= tie;
    }
    row.count = kept;
    return lowest;
  }
};

struct Cut {
  std::int32_t lowest;    // keys at or above it: at least k
  std::int64_t at_least;  // how many
};

// A cut with k to `most` keys or, where ties forbid that, the largest with at least k: bisection over the bits of the
// answer, so that the cost is nearly the same for every distribution.
template <class Steps>
inline Cut find_cut(const std::int32_t* keys, std::int64_t count, Range range, std::int64_t k, std::int64_t most) {
  Cut cut{range.low, count};
  std::int64_t too_high = static_cast<std::int64_t>(range.high) + 1;
  while (cut.at_least > most && too_high - cut.lowest > 1) {
    const auto middle = static_cast<std::int32_t>(cut.lowest + (too_high - cut.lowest) / 2);
    const std::int64_t found = Steps::count_from(keys, count, middle);
    if (found >= k) {
      cut = {middle, found};
    } else {
      too_high = middle;
    }
  }
  return cut;
}

template <class Steps>
float keep_best(Candidates& row, std::int64_t k, std::int64_t most, std::int32_t* keys) {
  const Range range = Steps::order(row.scores, row.count, keys);
  const Cut cut = find_cut<Steps>(keys, row.count, range, k, most);
  // Too many only where the cut is a score that several share; the places left are theirs.
  const std::int64_t ties =
      cut.at_least > most ? k - Steps::count_from(keys, row.count, cut.lowest + 1) : cut.at_least;
  return score_of(Steps::keep(row, keys, cut.lowest, ties));
}

}  // namespace
}  // namespace longfill
