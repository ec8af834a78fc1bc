// Scores of packed rows against packed keys, written once for every vector type.
//
// Everything here has internal linkage: each instruction set's file gets its own copy, compiled with its own flags.
// Invariant: one chain of multiply-adds over the whole of `dim` per (row, head, key), then heads in ascending order,
// in every blocking below.
#pragma once

#include "isa.h"

#define LONGFILL_INLINE inline __attribute__((always_inline))
#define LONGFILL_UNROLL _Pragma("GCC unroll 16")

namespace longfill {
namespace {

// total[row][vector] += w * relu(q . k) for heads [head, head + HEADS) of ROWS rows.
template <class V, int ROWS, int HEADS, int VECTORS>
LONGFILL_INLINE void add_heads(const ScoreArgs& a, int row, int head, const char* keys,
                               typename V::Float (&total)[ROWS][VECTORS]) {
  const int steps = a.dim / V::depth;
  const std::size_t block_bytes = static_cast<std::size_t>(steps) * V::step_bytes;
  const char* const queries = a.queries + row * a.query_stride + static_cast<std::size_t>(head) * steps * V::pair_bytes;
  const std::size_t head_bytes = static_cast<std::size_t>(steps) * V::pair_bytes;
  typename V::Float dot[ROWS][HEADS][VECTORS];
  LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
    LONGFILL_UNROLL for (int h = 0; h < HEADS; ++h)
      LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) dot[r][h][v] = V::zero();
  for (int s = 0; s < steps; ++s) {
    typename V::Keys k[VECTORS];
    LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) k[v] = V::load_keys(keys + v * block_bytes + s * V::step_bytes);
    LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
      LONGFILL_UNROLL for (int h = 0; h < HEADS; ++h) {
        const typename V::Keys q = V::broadcast(queries + r * a.query_stride + h * head_bytes + s * V::pair_bytes);
        LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) dot[r][h][v] = V::dot(dot[r][h][v], q, k[v]);
      }
  }
  LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
    LONGFILL_UNROLL for (int h = 0; h < HEADS; ++h) {
      const float w = a.weights[(row + r) * a.weight_stride + head + h];
      LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) total[r][v] = V::weigh(total[r][v], w, dot[r][h][v]);
    }
}

template <class V, int ROWS, int VECTORS>
LONGFILL_INLINE void write_scores(const ScoreArgs& a, int row, int block,
                                  const typename V::Float (&total)[ROWS][VECTORS]) {
  LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
    LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) {
      const int key = (block + v) * V::lanes;
      V::store_scaled(a.scores + (row + r) * a.score_stride + key, total[r][v], a.scales + key);
    }
}

template <class V>
LONGFILL_INLINE const char* block_at(const ScoreArgs& a, int block) {
  return a.keys + static_cast<std::size_t>(block) * (a.dim / V::depth) * V::step_bytes;
}

// All heads of ROWS rows at once against the blocks from `block` on.
template <class V, int ROWS, int HEADS, int VECTORS>
LONGFILL_INLINE void score_few_heads(const ScoreArgs& a, int row, int block = 0) {
  for (; block + VECTORS <= a.blocks; block += VECTORS) {
    typename V::Float total[ROWS][VECTORS];
    LONGFILL_UNROLL for (int r = 0; r < ROWS; ++r)
      LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) total[r][v] = V::zero();
    add_heads<V, ROWS, HEADS, VECTORS>(a, row, 0, block_at<V>(a, block), total);
    write_scores<V, ROWS, VECTORS>(a, row, block, total);
  }
  if constexpr (VECTORS > 1) score_few_heads<V, ROWS, HEADS, VECTORS / 2>(a, row, block);
}

template <class V, int HEADS>
void score_heads(const ScoreArgs& a) {
  constexpr int rows_together = V::accumulator_rows / HEADS;
  constexpr int lone_vectors = HEADS * 2 <= V::accumulator_rows ? 2 * V::vectors : V::vectors;
  int row = 0;
  if constexpr (rows_together > 1) {
    for (; row + rows_together <= a.rows; row += rows_together)
      score_few_heads<V, rows_together, HEADS, V::vectors>(a, row);
  }
  for (; row < a.rows; ++row) score_few_heads<V, 1, HEADS, lone_vectors>(a, row);
}

// The heads left over after whole blocks of them; `left` < accumulator_rows.
template <class V, int VECTORS, int LEFT = V::accumulator_rows - 1>
LONGFILL_INLINE void add_last_heads(const ScoreArgs& a, int row, int head, int left, const char* keys,
                                    typename V::Float (&total)[1][VECTORS]) {
  if constexpr (LEFT > 0) {
    if (left == LEFT) {
      add_heads<V, 1, LEFT, VECTORS>(a, row, head, keys, total);
    } else {
      add_last_heads<V, VECTORS, LEFT - 1>(a, row, head, left, keys, total);
    }
  }
}

template <class V, int VECTORS>
LONGFILL_INLINE void score_block_of_many_heads(const ScoreArgs& a, int row, int block) {
  constexpr int together = V::accumulator_rows;
  const char* const keys = block_at<V>(a, block);
  typename V::Float total[1][VECTORS];
  LONGFILL_UNROLL for (int v = 0; v < VECTORS; ++v) total[0][v] = V::zero();
  int head = 0;
  for (; head + together <= a.heads; head += together) add_heads<V, 1, together, VECTORS>(a, row, head, keys, total);
  add_last_heads<V, VECTORS>(a, row, head, a.heads - head, keys, total);
  write_scores<V, 1, VECTORS>(a, row, block, total);
}

template <class V>
void score_many_heads(const ScoreArgs& a) {
  for (int row = 0; row < a.rows; ++row) {
    int block = 0;
    for (; block + V::vectors <= a.blocks; block += V::vectors) score_block_of_many_heads<V, V::vectors>(a, row, block);
    for (; block < a.blocks; ++block) score_block_of_many_heads<V, 1>(a, row, block);
  }
}

template <class V, int HEADS = V::accumulator_rows>
void score(const ScoreArgs& a) {
  if constexpr (HEADS > 0) {
    if (a.heads == HEADS) {
      score_heads<V, HEADS>(a);
    } else if (HEADS == V::accumulator_rows && a.heads > HEADS) {
      score_many_heads<V>(a);
    } else {
      score<V, HEADS - 1>(a);
    }
  }
}

// Independent chains of `dot` that never leave the registers: the ceiling that `score` is measured against.
template <class V>
double spin(std::int64_t iterations) {
  constexpr int chains = V::accumulator_rows * V::vectors;
  alignas(64) char ones[V::step_bytes];
  for (std::size_t i = 0; i < sizeof ones; ++i) ones[i] = 0x3f;
  const typename V::Keys a = V::load_keys(ones);
  typename V::Float sum[chains];
  // Start values that the compiler cannot know to be equal: it would merge the chains.
  volatile float start = 1.0f;
  LONGFILL_UNROLL for (int c = 0; c < chains; ++c) sum[c] = V::weigh(V::zero(), start, V::dot(V::zero(), a, a));
  for (std::int64_t i = 0; i < iterations; ++i) {
    LONGFILL_UNROLL for (int c = 0; c < chains; ++c) sum[c] = V::dot(sum[c], a, a);
  }
  typename V::Float total = sum[0];
  LONGFILL_UNROLL for (int c = 1; c < chains; ++c) total = V::weigh(total, 1.0f, sum[c]);
  alignas(64) float out[V::lanes];
  alignas(64) float scales[V::lanes] = {};
  V::store_scaled(out, total, scales);
  volatile float sink = out[0];
  (void)sink;
  return 2.0 * V::lanes * V::depth * chains * static_cast<double>(iterations);
}

}  // namespace
}  // namespace longfill
