#include "screen_choice.h"

#include <algorithm>

namespace longfill {
namespace {

// Long enough that a few tiles which resemble a row's query do not end a screen.
constexpr std::int64_t kMinProbeKeys = 2048;
constexpr std::int64_t kWindowPairs = 1 << 20;

// The share of survivors at which the screen and the plain kernel take the same time, from the cycles of each: half
// the multiply-adds for the test, and for a survivor about two plain scores and the gathering of its key.
double break_even(int heads, int dim) {
  const double plain = static_cast<double>(heads) * dim / 64 + 0.8;
  const double test = static_cast<double>(heads) * dim / 128 + 0.5;
  const double survivor = 2 * plain + 0.15 * dim + 4;
  return (plain - test) / survivor;
}

}  // namespace

ScreenChoice::ScreenChoice(ScreenMode mode, std::int64_t first_key, int heads, int dim)
    : mode_(mode),
      next_probe_(first_key),
      most_survivors_(break_even(heads, dim)),
      screening_(mode == ScreenMode::kOn) {}

ScreenChoice::Step ScreenChoice::next(std::int64_t keys) const {
  if (mode_ == ScreenMode::kOff || keys < next_probe_) return Step::kPlain;
  return screening_ ? Step::kScreen : Step::kProbe;
}

void ScreenChoice::saw(std::int64_t keys, std::int64_t tested, std::int64_t passed) {
  if (mode_ == ScreenMode::kOn) return;
  tested_ += tested;
  passed_ += passed;
  if (screening_ && tested_ < kWindowPairs) return;
  screening_ = static_cast<double>(passed_) <= most_survivors_ * static_cast<double>(tested_);
  // Thresholds rise with the logarithm of the keys, so asking so often is enough.
  if (!screening_) next_probe_ = keys + std::max(keys / 4, kMinProbeKeys);
  tested_ = passed_ = 0;
}

}  // namespace longfill
