// The lightning indexer over a paged key cache, fused with the exact top-k.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "isa.h"
#include "screen_choice.h"

namespace longfill {

// Rows of one request, none of which sees fewer keys than the one before: row first_row + i sees keys [0, visible(i)).
struct ScoredRows {
  std::int64_t first_row;
  std::int64_t num_rows;
  std::int64_t first_position;  // of rows at consecutive positions, each of which sees itself; else unused
  const std::int64_t* counts;   // [num_rows] keys that each row sees; null for consecutive rows
  const std::int64_t* pages;    // page table; covers keys()

  std::int64_t visible(std::int64_t i) const { return counts == nullptr ? first_position + i + 1 : counts[i]; }
  std::int64_t keys() const { return num_rows == 0 ? 0 : visible(num_rows - 1); }
  // The first row that sees `key`; num_rows where none does.
  std::int64_t first_that_sees(std::int64_t key) const {
    if (counts != nullptr) return std::upper_bound(counts, counts + num_rows, key) - counts;
    return std::clamp<std::int64_t>(key - first_position, 0, num_rows);
  }
  ScoredRows part(std::int64_t first, std::int64_t rows) const {
    return {first_row + first, rows, first_position + first, counts == nullptr ? nullptr : counts + first, pages};
  }
};

struct PagedKeys {
  // e4m3, or floats for `with_float_keys`: key (page, slot) at page * value_page_stride + slot * value_slot_stride.
  const std::uint8_t* values;
  std::int64_t value_page_stride;
  std::int64_t value_slot_stride;
  const float* scales;  // strides below in floats; null where every scale is 1
  std::int64_t scale_page_stride;
  std::int64_t scale_slot_stride;
  std::int64_t page_size;
};

struct IndexShape {
  int heads;
  int dim;  // a multiple of 16
  std::int64_t k;
};

struct IndexInputs {
  const float* queries;  // [rows][heads * dim], rows `query_stride` floats apart
  std::int64_t query_stride;
  const float* weights;  // [rows][heads], rows `weight_stride` floats apart
  std::int64_t weight_stride;
  int heads;
  int dim;
  PagedKeys keys;
};

struct Selection {
  std::int32_t* positions;  // [rows][k]: ascending, -1 where fewer keys count
  std::int64_t position_stride;
  float* scores;  // [rows][k] scores of those positions, -inf in the padding; null where nobody asks
  std::int64_t score_stride;
  std::int64_t k;
};

// A screen changes no bit of the result. An instruction set without one is never screened.
ScreenCounts index_topk(const Isa& isa, const IndexInputs& inputs, const std::vector<ScoredRows>& rows,
                        const Selection& out, ScreenMode screen, int num_threads);

// The most bytes that index_topk allocates, for any rows and contexts.
std::int64_t index_topk_scratch_bytes(const Isa& isa, const IndexShape& shape, ScreenMode screen, int num_threads);

}  // namespace longfill
