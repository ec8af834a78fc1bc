// What the bindings of products share: packed weights as Python objects, and the checks of arrays.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bind.h"
#include "experts.h"

namespace nb = nanobind;

namespace longfill {

using Bytes1 = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::device::cpu>;
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using FloatsOut2 = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using Longs2 = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::device::cpu>;
using LongsOut2 = nb::ndarray<std::int64_t, nb::ndim<2>, nb::device::cpu>;
using Any2 = nb::ndarray<nb::ndim<2>, nb::device::cpu>;
using Any3 = nb::ndarray<nb::ndim<3>, nb::device::cpu>;

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

template <class Array>
inline std::int64_t size(const Array& array, std::size_t dimension) {
  return static_cast<std::int64_t>(array.shape(dimension));
}

template <class Array>
bool adjacent(const Array& array, std::size_t dimension) {
  return array.stride(dimension) == 1 || array.shape(dimension) <= 1;
}

template <class Array>
bool contiguous(const Array& array) {
  return adjacent(array, 1) && (array.shape(0) <= 1 || array.stride(0) == size(array, 1));
}

inline Format format_named(const std::string& name) {
  if (name == "float32") return Format::kFloat32;
  if (name == "bfloat16") return Format::kBfloat16;
  require(name == "fp8", "a weight's format is float32, bfloat16 or fp8, not " + name);
  return Format::kFp8;
}

template <class Array>
inline Element element_of(const Array& array, const char* name) {
  const nb::dlpack::dtype type = array.dtype();
  const bool one = type.lanes == 1;
  if (one && type.bits == 32 && type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float))
    return Element::kFloat32;
  const bool bf16 = type.bits == 16 && type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat);
  require(one && bf16, std::string(name) + " must be float32 or bfloat16");
  return Element::kBfloat16;
}

// Of a weight's sides: its bytes are then counted in 64 bits without a wrap.
constexpr std::int64_t kMostSize = std::int64_t{1} << 29;

inline Layout checked_layout(const Isa& isa, const std::string& format, bool bf16, std::int64_t n, std::int64_t k) {
  require(n >= 1 && k >= 1, "a weight needs at least one input and one output");
  require(n <= kMostSize && k <= kMostSize, "a weight has at most 2^29 inputs and outputs");
  const Layout layout(isa, format_named(format), bf16, n, k);
  require(!(layout.format == Format::kFloat32 && bf16), "float32 weights are for products in float32");
  return layout;
}

// One or more matrices of a kind, `stride` bytes apart; holds on to the arrays that it reads.
struct Weight {
  const Isa& isa;
  PackedMatrix matrix;
  std::int64_t count;
  std::int64_t stride;
  Bytes1 data;
  std::optional<Floats2> scale;
  std::optional<Floats1> bias;
};

inline std::int64_t matrix_stride(const Layout& layout) {
  const auto align = static_cast<std::int64_t>(kAlign);
  return (layout.bytes() + align - 1) / align * align;
}

inline Activations rows_of(const Any2& x, std::int64_t width, const char* name) {
  const Element element = element_of(x, name);
  require(size(x, 1) == width && adjacent(x, 1),
          std::string(name) + " must be [rows, " + std::to_string(width) + "] with contiguous rows");
  return {static_cast<const char*>(x.data()), x.stride(0) * bytes_of(element), element};
}

inline Output output_of(const Any2& out, std::int64_t rows, std::int64_t width) {
  const Activations as_input = rows_of(out, width, "out");
  require(size(out, 0) == rows, "out must have a row for each of x");
  return {static_cast<char*>(out.data()), as_input.stride, as_input.element};
}

// (gate, up, down)
using MlpWeights = std::tuple<const Weight*, const Weight*, const Weight*>;

inline const Isa& isa_of(const MlpWeights& weights) {
  require(std::get<0>(weights) != nullptr, "a block needs its gate, up and down");
  return std::get<0>(weights)->isa;
}

inline Mlp checked_mlp(const MlpWeights& weights, const Isa& isa, std::int64_t width) {
  const auto [gate, up, down] = weights;
  for (const Weight* weight : {gate, up, down}) {
    require(weight != nullptr, "a block needs its gate, up and down");
    require(weight->count == 1 && &weight->isa == &isa, "the weights of a block must share an instruction set");
  }
  const Layout& g = gate->matrix.layout;
  const Layout& u = up->matrix.layout;
  const Layout& d = down->matrix.layout;
  require(g.k == width && u.k == width && d.n == width, "a block maps rows of one width to the same width");
  require(g.n == u.n && g.n == d.k, "gate, up and down must have the same inner width");
  require(g.depth == u.depth && g.depth == d.depth, "gate, up and down must be packed for the same products");
  return {&gate->matrix, &up->matrix, &down->matrix};
}

inline void require_call(std::int64_t rows, int num_threads) {
  require(rows >= 0 && num_threads >= 1, "a call has 0 or more rows and at least 1 thread");
}

// A weight that is all shape, for sizes.
inline PackedMatrix shape_of(const Isa& isa, bool bf16, std::int64_t n, std::int64_t k) {
  return {checked_layout(isa, "bfloat16", bf16, n, k), nullptr, bf16};
}

}  // namespace longfill
