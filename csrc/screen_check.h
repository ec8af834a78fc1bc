// The screen by itself, for tests: whether it lets a key pass at a given threshold, and with its bound made smaller.
#pragma once

#include <cstdint>

#include "isa.h"

namespace longfill {

struct ScreenCheck {
  const float* queries;  // [rows][heads][dim]
  const float* weights;  // [rows][heads]
  const std::uint8_t* keys;  // e4m3 [num_keys][dim]
  const float* scales;       // [num_keys]
  const float* thresholds;   // [rows]
  int rows;
  int heads;
  int dim;
  int num_keys;        // at most kScreenTileKeys
  float bound_factor;  // 1 is the true bound; less must be caught by whoever compares with exact scores
};

// passed[row * num_keys + key]: 1 where the key may exceed the row's threshold.
void screen_check(const Isa& isa, const ScreenCheck& check, std::uint8_t* passed);

}  // namespace longfill
