// Bytes of a cached row to numbers, written once for every vector width. Internal linkage, as in score.h.
#pragma once

#include <cstring>

#include "latent.h"
#include "score.h"

namespace longfill {
namespace {

template <int LANES>
struct Vector {
  typedef float Floats __attribute__((vector_size(4 * LANES)));
  typedef std::int32_t Ints __attribute__((vector_size(4 * LANES)));
  typedef std::uint32_t Words __attribute__((vector_size(4 * LANES)));
  typedef std::uint16_t Halves __attribute__((vector_size(2 * LANES)));
  typedef std::uint8_t Bytes __attribute__((vector_size(LANES)));
};

template <class T>
LONGFILL_INLINE T load_as(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
LONGFILL_INLINE void store_as(void* p, const T& value) {
  std::memcpy(p, &value, sizeof value);
}

// `count` values from `in` to `out`, LANES at a time, `convert` taking a vector of In to one of Out.
template <class In, class Out, int LANES, class Convert>
LONGFILL_INLINE void convert_values(const std::uint8_t* in, std::int64_t count, char* out, const Convert& convert) {
  constexpr std::int64_t in_bytes = sizeof(In) / LANES;
  constexpr std::int64_t out_bytes = sizeof(Out) / LANES;
  std::int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store_as<Out>(out + i * out_bytes, convert(load_as<In>(in + i * in_bytes)));
  if (i == count) return;
  In last = {};
  std::memcpy(&last, in + i * in_bytes, static_cast<std::size_t>((count - i) * in_bytes));
  const Out converted = convert(last);
  std::memcpy(out + i * out_bytes, &converted, static_cast<std::size_t>((count - i) * out_bytes));
}

template <int LANES>
LONGFILL_INLINE typename Vector<LANES>::Floats widen_bf16(typename Vector<LANES>::Halves x) {
  return (typename Vector<LANES>::Floats)(__builtin_convertvector(x, typename Vector<LANES>::Words) << 16);
}

// Round to nearest even; a NaN keeps a mantissa bit.
template <int LANES>
LONGFILL_INLINE typename Vector<LANES>::Halves round_bf16(typename Vector<LANES>::Floats x) {
  using Words = typename Vector<LANES>::Words;
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words chosen = x == x ? rounded : ((bits >> 16) | 0x40u);
  return __builtin_convertvector(chosen, typename Vector<LANES>::Halves);
}

// e4m3: sign, 4 exponent bits (bias 7), 3 mantissa bits, no infinity.
template <int LANES>
LONGFILL_INLINE typename Vector<LANES>::Floats widen_e4m3(typename Vector<LANES>::Bytes x) {
  using Words = typename Vector<LANES>::Words;
  using Floats = typename Vector<LANES>::Floats;
  const Words bits = __builtin_convertvector(x, Words);
  const Words magnitude = bits & 0x7fu;
  const Words sign = (bits & 0x80u) << 24;
  const Words normal = (magnitude << 20) + (120u << 23);
  // With the exponent of the smallest normal and that value taken off again, the mantissa counts steps of 2^-9.
  const Floats small = (Floats)(normal + (1u << 23)) - 0.015625f;
  const Words finite = magnitude < 8u ? (Words)small : normal;
  return (Floats)((magnitude == 0x7fu ? Words{} + 0x7fc00000u : finite) | sign);
}

template <int LANES, class Out, class Narrow>
LONGFILL_INLINE void decode_latent(const LatentLayout& layout, const std::uint8_t* row, char* out,
                                   const Narrow& narrow) {
  using Floats = typename Vector<LANES>::Floats;
  using Halves = typename Vector<LANES>::Halves;
  using Bytes = typename Vector<LANES>::Bytes;
  constexpr std::int64_t out_bytes = sizeof(Out) / LANES;
  const auto e4m3_part = [&](const std::uint8_t* in, std::int64_t first, std::int64_t count, float scale) {
    convert_values<Bytes, Out, LANES>(in, count, out + first * out_bytes,
                                      [&](Bytes x) { return narrow(widen_e4m3<LANES>(x) * scale); });
  };
  const auto bf16_part = [&](const std::uint8_t* in, std::int64_t first, std::int64_t count) {
    convert_values<Halves, Out, LANES>(in, count, out + first * out_bytes,
                                       [&](Halves x) { return narrow(widen_bf16<LANES>(x)); });
  };
  switch (layout.format) {
    case LatentFormat::kFloat32:
      convert_values<Floats, Out, LANES>(row, layout.width(), out, narrow);
      return;
    case LatentFormat::kBfloat16:
      bf16_part(row, 0, layout.width());
      return;
    case LatentFormat::kFp8:
      e4m3_part(row, 0, layout.rank, layout.scale);
      e4m3_part(row + layout.rank, layout.rank, layout.rope_dim, layout.rope_scale);
      return;
    case LatentFormat::kFp8DsMla:
      for (std::int64_t group = 0; group < layout.scale_groups(); ++group) {
        const std::int64_t first = group * kScaleGroup;
        const std::int64_t count = layout.rank - first < kScaleGroup ? layout.rank - first : kScaleGroup;
        e4m3_part(row + first, first, count, load_as<float>(row + layout.rank + 4 * group));
      }
      bf16_part(row + layout.rank + 4 * layout.scale_groups(), layout.rank, layout.rope_dim);
      return;
  }
}

// fp32 [width], nothing written beyond.
template <int LANES>
void latent_to_fp32(const LatentLayout& layout, const std::uint8_t* row, char* out) {
  using Floats = typename Vector<LANES>::Floats;
  decode_latent<LANES, Floats>(layout, row, out, [](Floats x) { return x; });
}

// bf16 [width], rounded to nearest even where the format holds more.
template <int LANES>
void latent_to_bf16(const LatentLayout& layout, const std::uint8_t* row, char* out) {
  decode_latent<LANES, typename Vector<LANES>::Halves>(layout, row, out, round_bf16<LANES>);
}

}  // namespace
}  // namespace longfill
