// Packing into fp32 tiles for the instruction sets without a bf16 dot product. Internal linkage, as in score.h.
#pragma once

#include <cstring>

#include "e4m3.h"
#include "isa.h"

namespace longfill {
namespace {

void pack_query_fp32(const float* values, std::int64_t count, char* out) {
  std::memcpy(out, values, static_cast<std::size_t>(count) * sizeof(float));
}

// [dim][LANES] floats.
template <int LANES>
void unpack_block_fp32(const std::uint8_t* const* rows, int dim, char* out) {
  float* const tile = reinterpret_cast<float*>(out);
  for (int lane = 0; lane < LANES; ++lane) {
    const std::uint8_t* const row = rows[lane];
    for (int d = 0; d < dim; ++d) tile[d * LANES + lane] = e4m3.as_float[row[d]];
  }
}

// The same from keys of `dim` floats.
template <int LANES>
void transpose_block(const std::uint8_t* const* rows, int dim, char* out) {
  float* const tile = reinterpret_cast<float*>(out);
  for (int lane = 0; lane < LANES; ++lane) {
    for (int d = 0; d < dim; ++d) std::memcpy(tile + d * LANES + lane, rows[lane] + 4 * d, sizeof(float));
  }
}

}  // namespace
}  // namespace longfill
