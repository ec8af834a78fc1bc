// Absorbed MLA over paged latent rows: selected ones (sparse) or a causal range (dense).
//
// Invariant: keys come in blocks of a fixed size, counted from a row's first selected entry or from position 0, so the
// bits of a (row, head) depend on its query, its keys, the instruction set and the compute type alone; and a dense row
// has the bits of a sparse one that selects its whole range in order.
#pragma once

#include <cstdint>

#include "isa.h"
#include "latent.h"

namespace longfill {

// bf16 products are taken where queries are bf16, keys lose nothing by it and the machine has the instruction.
bool computes_in_bf16(const Isa& isa, bool bf16_queries, LatentFormat format);

struct AttentionShape {
  std::int64_t heads;
  std::int64_t rank;
  std::int64_t rope_dim;
};

// [rows][heads][values] of bf16 or fp32; strides in bytes.
struct AttentionQueries {
  const char* data;
  std::int64_t row_stride;
  std::int64_t head_stride;
  bool bf16;
};

struct AttentionOutputs {
  char* data;
  std::int64_t row_stride;
  std::int64_t head_stride;
  bool bf16;
  float* lse;  // [rows][heads], rows `lse_stride` floats apart; null where nobody asks
  std::int64_t lse_stride;
};

struct AttentionCall {
  AttentionShape shape;
  AttentionQueries queries;
  AttentionOutputs out;
  std::int64_t num_rows;
  float scale;  // positive
  bool bf16;    // computes_in_bf16
};

// int32 [rows][k]; a negative entry selects nothing.
struct SelectedKeys {
  const std::int32_t* positions;
  std::int64_t stride;
  std::int64_t k;
};

// Both throw std::invalid_argument for a position or page that does not exist; the outputs are then undefined.
void sparse_mla(const Isa& isa, const AttentionCall& call, const LatentRows& keys, const SelectedKeys& selected,
                int num_threads);
// Row i sees the first visible[i] keys; the counts never fall from one row to the next.
void dense_mla(const Isa& isa, const AttentionCall& call, const LatentRows& keys, const std::int64_t* visible,
               int num_threads);

// The most bytes that either allocates, for any rows and contexts.
std::int64_t attention_scratch_bytes(const Isa& isa, const AttentionShape& shape, int num_threads);

}  // namespace longfill
