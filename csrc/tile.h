// Small matrix products, written once for every vector type: what linear, experts and attention are made of.
//
// Internal linkage, as in score.h. Invariant: c[r][j] is one chain of multiply-adds over the steps in ascending order,
// in every blocking below, so cutting a sum into calls that accumulate changes no bit of it.
#pragma once

#include "isa.h"
#include "score.h"

namespace longfill {
namespace {

// `beside(step)` runs beside the products of every step.
template <class V, int ROWS, int VECTORS, class Beside>
LONGFILL_INLINE void tile_rows(const TileArgs& t, int row, const Beside& beside) {
  const char* const a = t.a + row * t.a_stride;
  float* const c = t.c + row * t.c_stride;
  typename V::Float sum[ROWS][VECTORS];
  LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
    LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v)
      sum[r][v] = t.accumulate ? V::load(c + r * t.c_stride + v * V::lanes) : V::zero();
  const char* b = t.b;
  for (std::int64_t s = 0; s < t.steps; ++s, b += VECTORS * V::step_bytes) {
    typename V::Keys column[VECTORS];
    LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) column[v] = V::load_keys(b + v * V::step_bytes);
    LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r) {
      const typename V::Keys x = V::broadcast(a + r * t.a_stride + s * V::pair_bytes);
      LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) sum[r][v] = V::dot(sum[r][v], x, column[v]);
    }
    beside(s);
  }
  LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
    LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) V::store(c + r * t.c_stride + v * V::lanes, sum[r][v]);
}

template <class V, int ROWS, int VECTORS>
LONGFILL_INLINE void tile_rows(const TileArgs& t, int row) {
  tile_rows<V, ROWS, VECTORS>(t, row, [](std::int64_t) {});
}

// The rows left over after whole groups; `left` <= LEFT.
template <class V, int VECTORS, int LEFT>
LONGFILL_INLINE void tile_last_rows(const TileArgs& t, int row, int left) {
  if constexpr (LEFT > 0) {
    if (left == LEFT) {
      tile_rows<V, LEFT, VECTORS>(t, row);
    } else {
      tile_last_rows<V, VECTORS, LEFT - 1>(t, row, left);
    }
  }
}

template <class V, int VECTORS>
void tile_of_width(const TileArgs& t) {
  int row = 0;
  for (; row + V::tile_rows <= t.rows; row += V::tile_rows) tile_rows<V, V::tile_rows, VECTORS>(t, row);
  tile_last_rows<V, VECTORS, V::tile_rows - 1>(t, row, t.rows - row);
}

template <class V, int VECTORS = V::tile_vectors>
void tile(const TileArgs& t) {
  if constexpr (VECTORS > 1) {
    if (t.vectors < VECTORS) return tile<V, VECTORS - 1>(t);
  }
  tile_of_width<V, VECTORS>(t);
}

}  // namespace
}  // namespace longfill
