// When a piece of index_topk is screened: from what a screen let pass a little earlier in the same piece.
//
// Invariant: decides about time only. Every choice gives the same selection.
#pragma once

#include <cstdint>

namespace longfill {

enum class ScreenMode { kOff, kAuto, kOn };

// Of (row, key) pairs. Where the work is cut differently, a screen begins at other keys: only `pairs` stays the same.
struct ScreenCounts {
  std::int64_t pairs = 0;      // rows times the keys they see
  std::int64_t screened = 0;   // of them tested by the screen
  std::int64_t survivors = 0;  // of those scored exactly all the same

  void add(const ScreenCounts& other) {
    pairs += other.pairs;
    screened += other.screened;
    survivors += other.survivors;
  }
};

class ScreenChoice {
 public:
  enum class Step { kPlain, kProbe, kScreen };

  // Screens nothing before `first_key` keys of the piece: until then rows have no thresholds.
  ScreenChoice(ScreenMode mode, std::int64_t first_key, int heads, int dim);

  // What to do with the tile that follows `keys` keys of the piece. After a probe the tile is scored plainly.
  Step next(std::int64_t keys) const;
  // What a probe or a screened tile saw, up to and with `keys` keys of the piece.
  void saw(std::int64_t keys, std::int64_t tested, std::int64_t passed);

 private:
  ScreenMode mode_;
  std::int64_t next_probe_;
  double most_survivors_;
  bool screening_;
  std::int64_t tested_ = 0;
  std::int64_t passed_ = 0;
};

}  // namespace longfill
