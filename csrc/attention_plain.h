// AttentionSteps in fp32, written once for every vector type. Internal linkage, as in score.h.
#pragma once

#include <limits>

#include "attention_steps.h"
#include "latent_decode.h"
#include "tile.h"
#include "vmath.h"

namespace longfill {
namespace {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

template <class V, int ROWS, int VECTORS>
LONGFILL_INLINE int prefetching_rows(const TileArgs& args, Prefetch& next) {
  constexpr int kSteps = ROWS * VECTORS > 16 ? 2 : 1;
  int row = 0;
  for (; row + ROWS <= args.rows; row += ROWS) {
    Prefetch lines = next;
    tile_rows<V, ROWS, VECTORS>(args, row, [&](std::int64_t step) {
      if (step % kSteps == 0) lines.line();
    });
    next = lines;
  }
  return row;
}

// `tile`, prefetching, and with more rows at a time where it is narrow: a product waits for the one before it in its
// chain.
template <class V, int NARROW_ROWS>
void attention_tile(const TileArgs& args, Prefetch& next) {
  int row = 0;
  if (args.vectors == V::tile_vectors) {
    row = prefetching_rows<V, V::tile_rows, V::tile_vectors>(args, next);
  } else if (args.vectors == 1) {
    row = prefetching_rows<V, NARROW_ROWS, 1>(args, next);
  }
  TileArgs rest = args;
  rest.a += row * args.a_stride;
  rest.c += row * args.c_stride;
  rest.rows -= row;
  if (rest.rows > 0) tile<V>(rest);
}

template <class V>
void pack_queries(const PackQueries& p) {
  constexpr std::int64_t widest = V::lanes * V::tile_vectors;
  float* out = reinterpret_cast<float*>(p.out);
  for (std::int64_t first = 0; first < p.count; first += widest) {
    const std::int64_t columns = p.count - first < widest ? p.count - first : widest;
    for (std::int64_t c = 0; c < columns; ++c) {
      const char* const column = p.columns[first + c];
      for (std::int64_t x = 0; x < p.width; ++x) {
        float value = 0.0f;
        if (column != nullptr && p.bf16) {
          const std::uint32_t bits = static_cast<std::uint32_t>(load_as<std::uint16_t>(column + 2 * x)) << 16;
          std::memcpy(&value, &bits, sizeof value);
        } else if (column != nullptr) {
          value = load_as<float>(column + 4 * x);
        }
        out[x * columns + c] = value;
      }
    }
    out += p.width * columns;
  }
}

template <class V>
void pack_values(const PackValues& p) {
  constexpr std::int64_t widest = V::lanes * V::tile_vectors;
  using Floats = typename Vector<V::lanes>::Floats;
  float* tile = reinterpret_cast<float*>(p.out);
  for (std::int64_t first = 0; first < p.rank; first += widest) {
    const std::int64_t values = p.rank - first < widest ? p.rank - first : widest;
    for (std::int64_t key = p.first; key < p.last; ++key) {
      const float* const row = reinterpret_cast<const float*>(p.rows + key * p.row_bytes) + first;
      for (std::int64_t x = 0; x < values; x += V::lanes)
        store_as<Floats>(tile + key * values + x, load_as<Floats>(row + x));
    }
    tile += kBlockKeys * values;
  }
}

template <class V>
void softmax(const Softmax& s) {
  using Floats = typename Vector<V::lanes>::Floats;
  for (std::int64_t c = 0; c < s.columns; c += V::lanes) {
    const Floats before = load_as<Floats>(s.largest + c);
    Floats largest = before;
    for (std::int64_t key = 0; key < s.keys; ++key) {
      const Floats score = load_as<Floats>(s.scores + key * s.columns + c) * s.scale;
      largest = score > largest ? score : largest;
    }
    const Floats none = Floats{} + kNoScore;
    const Floats base = largest == none ? Floats{} : largest;
    const Floats factor = largest == before ? Floats{} + 1.0f : vexp(before - base);
    Floats sum = load_as<Floats>(s.sums + c) * factor;
    for (std::int64_t key = 0; key < s.keys; ++key) {
      const Floats weight = vexp(load_as<Floats>(s.scores + key * s.columns + c) * s.scale - base);
      sum += weight;
      for (int lane = 0; lane < V::lanes; ++lane)
        reinterpret_cast<float*>(s.weights + (c + lane) * s.weight_bytes)[key] = weight[lane];
    }
    store_as<Floats>(s.largest + c, largest);
    store_as<Floats>(s.sums + c, sum);
    store_as<Floats>(s.factors + c, factor);
  }
}

template <class V>
void rescale(float* values, std::int64_t count, float factor) {
  using Floats = typename Vector<V::lanes>::Floats;
  for (std::int64_t i = 0; i < count; i += V::lanes) store_as<Floats>(values + i, load_as<Floats>(values + i) * factor);
}

template <class V>
void finish(const float* values, std::int64_t count, float factor, bool bf16, char* out) {
  using Floats = typename Vector<V::lanes>::Floats;
  const auto* const in = reinterpret_cast<const std::uint8_t*>(values);
  // A key that is not seen adds +0, which turns a -0 into +0: every result is made to look as if it had met one.
  const auto scaled = [&](Floats x) { return x * factor + 0.0f; };
  if (bf16) {
    convert_values<Floats, typename Vector<V::lanes>::Halves, V::lanes>(
        in, count, out, [&](Floats x) { return round_bf16<V::lanes>(scaled(x)); });
  } else {
    convert_values<Floats, Floats, V::lanes>(in, count, out, scaled);
  }
}

template <class V, int NARROW_ROWS>
constexpr AttentionSteps attention_steps_fp32() {
  return {V::lanes,
          V::tile_vectors,
          1,
          4,
          1.0f,
          attention_tile<V, NARROW_ROWS>,
          latent_to_fp32<V::lanes>,
          pack_queries<V>,
          pack_values<V>,
          softmax<V>,
          rescale<V>,
          finish<V>};
}

}  // namespace
}  // namespace longfill
