// What absorbed attention is made of besides small matrix products, for one instruction set and compute type.
//
// Columns are (query, head) pairs: they lie in the lanes, so nothing is ever summed across lanes. Invariant: what
// happens to a column depends neither on its lane nor on the other columns.
#pragma once

#include <cstdint>

#include "isa.h"
#include "latent.h"

namespace longfill {

// Keys of a block: few enough that decoded rows, values, outputs and the next block's rows share the second cache.
constexpr std::int64_t kBlockKeys = 64;

constexpr std::int64_t kCacheLine = 64;

// Columns side by side in tiles: [tile][step][columns of the tile][depth], the last tile as narrow as it can be.
struct PackQueries {
  const char* const* columns;  // `count` rows of `width` values; null where a lane has no column
  std::int64_t count;          // a multiple of lanes
  std::int64_t width;
  bool bf16;
  char* out;
};

// Keys [first, last) of decoded rows as the right side of weights x values: [tile of values][step][values][depth].
struct PackValues {
  const char* rows;
  std::int64_t row_bytes;
  std::int64_t first;  // a multiple of depth
  std::int64_t last;   // a multiple of depth
  std::int64_t rank;   // a multiple of lanes
  char* out;
};

// One block of keys into the running softmax of every column. A score of -inf has the weight 0.
struct Softmax {
  const float* scores;  // [keys][columns], raw products
  std::int64_t columns;  // a multiple of lanes
  std::int64_t keys;
  float scale;
  float* largest;  // [columns] of scaled scores so far, in units of `nats`
  float* sums;     // [columns] of weights relative to `largest`
  float* factors;  // [columns], written: what earlier sums and outputs are multiplied by; 1 where `largest` stays
  char* weights;   // [columns][weight_keys], zeros behind the last key up to a whole step
  std::int64_t weight_bytes;  // between columns
};

// Cached rows to ask for, a cache line at a time, beside the work on those before them: requests that come faster than
// the machine keeps in flight hold it up.
class Prefetch {
 public:
  // `rows` may hold null.
  Prefetch(const std::uint8_t* const* rows, std::int64_t count, std::int64_t row_bytes)
      : row_(rows), end_(rows + count), row_bytes_(row_bytes) {}

  void line() {
    if (row_ == end_) return;
    if (*row_ != nullptr) __builtin_prefetch(*row_ + at_, 0, 2);
    at_ += kCacheLine;
    if (at_ < row_bytes_) return;
    ++row_;
    at_ = 0;
  }

 private:
  const std::uint8_t* const* row_;
  const std::uint8_t* const* end_;
  std::int64_t row_bytes_;
  std::int64_t at_ = 0;
};

struct AttentionSteps {
  int lanes;
  int vectors;  // of the widest tile
  int depth;    // values a step takes: 1 of fp32, 2 of bf16
  int value_bytes;
  float nats;  // a unit of `largest`
  void (*tile)(const TileArgs& args, Prefetch& next);
  void (*decode)(const LatentLayout& layout, const std::uint8_t* row, char* out);
  void (*pack_queries)(const PackQueries& args);
  void (*pack_values)(const PackValues& args);
  void (*softmax)(const Softmax& args);
  void (*rescale)(float* values, std::int64_t count, float factor);
  // `values * factor` as fp32, or as bf16 rounded to nearest even.
  void (*finish)(const float* values, std::int64_t count, float factor, bool bf16, char* out);
};

}  // namespace longfill
