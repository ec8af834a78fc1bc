// How index_topk's work is cut: sizes of tiles and pieces. Nothing here changes a bit of any result.
#pragma once

#include <cstdint>
#include <vector>

#include "index_topk.h"

namespace longfill {

constexpr int kMaxTileKeys = 256;
constexpr int kGroupRows = 8;  // rows scored by one call; their scores stay in L1

// Sizes fixed by the shapes of the model, never by the context.
struct Tiling {
  int tile_keys;                // keys unpacked at once
  int few_rows_tile_keys;       // where that few rows use them that the next ones would arrive in bursts
  std::int64_t block_rows;      // rows that share an unpacked tile
  std::int64_t candidate_room;   // candidates a row may hold before it is cut back
  std::int64_t kept_candidates;  // to at most so many
  std::int64_t screened_room;    // the room before a screen: what a threshold lags behind survives there

  Tiling(const Isa& isa, int heads, int dim, std::int64_t k);
  // With room for one more tile and for whole-vector stores past it.
  std::int64_t candidate_stride() const { return candidate_room + tile_keys + 16; }
};

// Rows of one ScoredRows against a range of keys: what one thread does at a time.
struct Piece {
  ScoredRows rows;
  std::int64_t first_key;
  std::int64_t last_key;  // exclusive
  std::int64_t partial;   // first row of its slot in the partial results; -1: the result is final
};

struct Plan {
  std::vector<Piece> pieces;                // largest first
  std::vector<std::vector<Piece>> merges;   // pieces with the same rows, in order of keys
  std::int64_t partial_rows = 0;
  int num_threads = 1;
};

Plan make_plan(const Tiling& tiling, const std::vector<ScoredRows>& rows, int heads, int dim, int num_threads);

// Bounds on what a plan for that many threads asks for, whatever the rows and contexts.
std::int64_t most_parts(int num_threads);  // of one block
std::int64_t most_partial_rows(const Tiling& tiling, int num_threads);

}  // namespace longfill
