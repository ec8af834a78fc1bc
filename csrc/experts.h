// SwiGLU blocks, alone and as a mixture of experts.
//
// Invariant: a row's experts are added in ascending order of their ids, in fp32, then the shared one; a row is rounded
// once. Experts run one after the other, each spread over the threads.
#pragma once

#include <vector>

#include "matmul.h"

namespace longfill {

// Gate and up read the same rows; down reads what they make.
struct Mlp {
  const PackedMatrix* gate;
  const PackedMatrix* up;
  const PackedMatrix* down;
};

// out = down(silu(gate x) * up x), the middle rounded to the element of x.
void mlp(const Isa& isa, const Mlp& weights, const Activations& x, std::int64_t rows, const Output& out,
         int num_threads);
// The most bytes that `mlp` allocates.
std::int64_t mlp_scratch_bytes(const Isa& isa, const Mlp& weights, std::int64_t rows, int num_threads);

struct Routes {
  const std::int64_t* ids;  // [rows][k], ascending in a row, no id twice
  const float* weights;     // [rows][k]
  std::int64_t k;
};

// `shared`, if not null, is added with weight 1; `width` is that of a row of the output.
void experts(const Isa& isa, const std::vector<Mlp>& weights, const Mlp* shared, const Routes& routes,
             const Activations& x, std::int64_t rows, std::int64_t width, const Output& out, int num_threads);
// The most bytes that `experts` allocates for so many rows, whichever experts they choose.
std::int64_t experts_scratch_bytes(const Isa& isa, const std::vector<Mlp>& weights, const Mlp* shared, std::int64_t k,
                                   std::int64_t rows, std::int64_t width, int num_threads);

// Outputs of experts that were computed elsewhere.
struct ExpertOutputs {
  const float* values;  // rows `stride` floats apart
  std::int64_t stride;
  const std::int64_t* slots;  // [rows][k]: where a row's outputs stand, in ascending order of its experts
  const float* weights;       // [rows][k]
  std::int64_t k;
  const float* shared;  // [rows], `shared_stride` floats apart; null without one
  std::int64_t shared_stride;
};

// The sum that `experts` forms of them, bit for bit.
void fold_experts(const Isa& isa, const ExpertOutputs& outputs, std::int64_t rows, std::int64_t width,
                  const Output& out, int num_threads);

}  // namespace longfill
