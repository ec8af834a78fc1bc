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

// Asks for some of the bytes at every step, so that they arrive evenly beside the products.
class Stream {
 public:
  // Without any, `idle` is asked for again and again, which costs less than a branch.
  LONGFILL_INLINE Stream(const Fetch& fetch, std::int64_t steps, const char* idle)
      : from_(fetch.bytes > 0 ? fetch.from : idle), rate_((fetch.bytes + steps - 1) / steps) {}
  LONGFILL_INLINE const char* at(std::int64_t step) const { return from_ + step * rate_; }

 private:
  const char* from_;
  std::int64_t rate_;
};

template <class V, int ROWS, int VECTORS>
LONGFILL_INLINE void tile_group(const TileArgs& t, int row) {
  constexpr int kIntoL1 = 3;
  constexpr int kIntoL2 = 2;
  const Stream rows(t.next_rows, t.steps, t.a);
  const Stream sums(t.next_sums, t.steps, t.a);
  const Stream later(t.later, t.steps, t.a);
  tile_rows<V, ROWS, VECTORS>(t, row, [&](std::int64_t step) {
    __builtin_prefetch(rows.at(step), 0, kIntoL1);
    __builtin_prefetch(sums.at(step), 1, kIntoL1);
    __builtin_prefetch(later.at(step), 0, kIntoL2);
  });
}

template <class V, int VECTORS, int ROWS = V::tile_rows>
LONGFILL_INLINE void tile_group_of(int rows, const TileArgs& t, int row) {
  if (rows == ROWS) return tile_group<V, ROWS, VECTORS>(t, row);
  if constexpr (ROWS > 1) tile_group_of<V, VECTORS, ROWS - 1>(rows, t, row);
}

template <class V, int VECTORS>
void tile_of_width(const TileArgs& t) {
  for (int row = 0; row < t.rows;) {
    const int rows = group_rows(t.rows - row, V::tile_rows);
    tile_group_of<V, VECTORS>(rows, t, row);
    row += rows;
  }
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
