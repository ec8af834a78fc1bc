// The Python face, a file for each group of kernels. Every function checks what could read or write outside its tensors,
// then runs without the interpreter lock.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace longfill {

void bind_index(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_bench(nanobind::module_& m);

}  // namespace longfill
