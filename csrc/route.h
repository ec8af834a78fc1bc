// The choice of experts: router scores, groups of experts, the best k of a row and their weights.
//
// The rule is that of `reference.linear.route`: ties go to the lower id, and a NaN counts as the best score, as in
// torch's sort. Invariant: a row's choice depends on its logits alone.
#pragma once

#include "matmul.h"

namespace longfill {

enum class Scoring { kSigmoid, kSoftmax };
enum class GroupValue { kNone, kBestTwo, kBest };

struct Choice {
  Scoring scoring;
  std::int64_t k;
  std::int64_t groups;
  std::int64_t kept_groups;
  GroupValue group_value;
  bool normalise;
  float scale;
};

// ids and weights are [rows][k], ids ascending in a row. `bias` (one an expert, or null) steers the choice, not the
// weights; the router's logits are computed in fp32.
void route(const Isa& isa, const PackedMatrix& router, const float* bias, const Choice& choice, const Activations& x,
           std::int64_t rows, std::int64_t* ids, float* weights, int num_threads);
// The most bytes that `route` allocates.
std::int64_t route_scratch_bytes(const Isa& isa, const Layout& router, std::int64_t rows, int num_threads);

}  // namespace longfill
