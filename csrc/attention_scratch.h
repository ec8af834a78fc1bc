// What a thread of attention works in: sized by shapes alone, never by the context. Internal linkage, as in score.h.
#pragma once

#include <cstdint>

#include "attention.h"
#include "attention_steps.h"
#include "memory.h"

namespace longfill {
namespace {

constexpr std::int64_t kMaxColumns = 64;

std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Widths {
  std::int64_t columns;       // room for so many, a multiple of lanes
  std::int64_t row_values;    // of a decoded row, padded to whole cache lines
  std::int64_t value_values;  // of its latent part, padded to whole vectors

  Widths(const AttentionSteps& steps, const AttentionShape& shape)
      : columns(round_up(kMaxColumns, steps.lanes)),
        row_values(round_up(shape.rank + shape.rope_dim, kCacheLine / steps.value_bytes)),
        value_values(round_up(shape.rank, steps.lanes)) {}
};

// What one thread works in.
struct Scratch {
  char* queries;
  char* rows;
  char* values;
  char* weights;
  float* scores;
  float* outputs;
  float* largest;
  float* sums;
  float* factors;

  Scratch(Carver& carver, const AttentionSteps& steps, const AttentionShape& shape) {
    const Widths widths(steps, shape);
    queries = carver.take<char>(widths.columns * widths.row_values * steps.value_bytes);
    rows = carver.take<char>(kBlockKeys * widths.row_values * steps.value_bytes);
    values = carver.take<char>(kBlockKeys * widths.value_values * steps.value_bytes);
    weights = carver.take<char>(widths.columns * kBlockKeys * steps.value_bytes);
    scores = carver.take<float>(kBlockKeys * widths.columns);
    outputs = carver.take<float>(widths.columns * widths.value_values);
    largest = carver.take<float>(widths.columns);
    sums = carver.take<float>(widths.columns);
    factors = carver.take<float>(widths.columns);
  }
};

// The rows of one block, null where an entry selects nothing; `count` ends with the last that selects something.
struct Block {
  const std::uint8_t* rows[kBlockKeys];
  std::int64_t count = 0;
  std::int64_t missing = 0;
};

}  // namespace
}  // namespace longfill
