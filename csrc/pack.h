// Weights in the order in which the small products read them, written once at load.
//
// A matrix of n columns (outputs) and k rows (inputs) lies in panels of `tile_lanes * tile_vectors` columns, the last
// one of as many whole vectors as it needs. A panel is step after step: one input (`depth` 1, products in fp32) or a
// pair of them (`depth` 2, the bf16 instruction), for each column of the panel. What is left of the last step and the
// last vector holds zeros. Invariant: the packed values are the stored ones, bit for bit; fp8 stays a byte a value.
#pragma once

#include <cstdint>

#include "isa.h"

namespace longfill {

enum class Format { kFloat32, kBfloat16, kFp8 };

std::int64_t bytes_per_value(Format format);

// Where a packed matrix keeps what.
struct Layout {
  Format format;
  std::int64_t n;
  std::int64_t k;
  int lanes;
  int panel_vectors;
  int depth;
  std::int64_t item_bytes;

  // `compute_bf16`: for the bf16 instruction, which `isa` may lack.
  Layout(const Isa& isa, Format format, bool compute_bf16, std::int64_t n, std::int64_t k);

  std::int64_t steps() const { return (k + depth - 1) / depth; }
  std::int64_t panel_columns() const { return static_cast<std::int64_t>(lanes) * panel_vectors; }
  std::int64_t panels() const { return (n + panel_columns() - 1) / panel_columns(); }
  std::int64_t columns(std::int64_t panel) const;
  int vectors(std::int64_t panel) const;
  std::int64_t vector_bytes() const { return lanes * depth * item_bytes; }
  std::int64_t panel_offset(std::int64_t panel) const { return panel * steps() * panel_vectors * vector_bytes(); }
  std::int64_t bytes() const { return steps() * ((n + lanes - 1) / lanes) * vector_bytes(); }
};

// A packed matrix and what its values mean.
struct PackedMatrix {
  Layout layout;
  const char* data;  // 64-byte aligned
  bool round_bf16;   // values belong to a bf16 model: fp8 times its scale is rounded to bf16
  // fp8: the scale of (input i, output o) is scale[o / block_n * scale_stride + i / block_k].
  const float* scale = nullptr;
  std::int64_t scale_stride = 0;
  std::int64_t block_n = 1;
  std::int64_t block_k = 1;
  const float* bias = nullptr;  // one an output
};

// Element (output o, input i) of the source lies at `data + o * n_stride + i * k_stride` bytes.
void pack(const Layout& layout, const char* data, std::int64_t n_stride, std::int64_t k_stride, char* out,
          int num_threads);

// Values of outputs [first, last) in fp32, as the products use them: out[o - first][i], rows of k.
void unpack(const PackedMatrix& matrix, std::int64_t first, std::int64_t last, float* out, int num_threads);

}  // namespace longfill
