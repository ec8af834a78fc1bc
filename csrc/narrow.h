// Products with weights of few columns: each thread takes some rows through all of them.
//
// Where few panels read a row, packing all rows first costs as much as the products do. Here a group of rows is packed
// slice by slice, just before its products, while its next slice is on its way. Invariant: the chains are `linear`'s.
#pragma once

#include "matmul.h"

namespace longfill {

// For weights that the tiles read where they lie.
bool is_narrow(const Layout& weights);

void linear_narrow(const Isa& isa, const PackedMatrix& matrix, const Activations& x, std::int64_t rows,
                   const Output& out, int num_threads);
// The most bytes that `linear_narrow` allocates.
std::int64_t narrow_scratch_bytes(const Layout& weights, std::int64_t rows, int num_threads);

}  // namespace longfill
