// Packed weights as Python objects, and the products with them.
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
#include "route.h"

namespace nb = nanobind;

namespace longfill {
namespace {

using Bytes1 = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::device::cpu>;
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using FloatsOut2 = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using Longs2 = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::device::cpu>;
using LongsOut2 = nb::ndarray<std::int64_t, nb::ndim<2>, nb::device::cpu>;
using Any2 = nb::ndarray<nb::ndim<2>, nb::device::cpu>;
using Any3 = nb::ndarray<nb::ndim<3>, nb::device::cpu>;

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

template <class Array>
std::int64_t size(const Array& array, std::size_t dimension) {
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

Format format_named(const std::string& name) {
  if (name == "float32") return Format::kFloat32;
  if (name == "bfloat16") return Format::kBfloat16;
  require(name == "fp8", "a weight's format is float32, bfloat16 or fp8, not " + name);
  return Format::kFp8;
}

template <class Array>
Element element_of(const Array& array, const char* name) {
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

Layout checked_layout(const Isa& isa, const std::string& format, bool bf16, std::int64_t n, std::int64_t k) {
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

std::int64_t matrix_stride(const Layout& layout) {
  const auto align = static_cast<std::int64_t>(kAlign);
  return (layout.bytes() + align - 1) / align * align;
}

Weight make_weight(const std::string& isa_name, const std::string& format, bool bf16, std::int64_t n, std::int64_t k,
                   std::int64_t count, const Bytes1& data, const std::optional<Floats2>& scale,
                   std::tuple<std::int64_t, std::int64_t> block, const std::optional<Floats1>& bias) {
  const Isa& isa = isa_named(isa_name);
  const Layout layout = checked_layout(isa, format, bf16, n, k);
  const std::int64_t stride = matrix_stride(layout);
  require(count >= 1 && adjacent(data, 0) && size(data, 0) >= layout.bytes() &&
              count - 1 <= (size(data, 0) - layout.bytes()) / stride,
          "the packed bytes do not cover the weight");
  require(reinterpret_cast<std::uintptr_t>(data.data()) % kAlign == 0, "packed bytes must start at a multiple of 64");
  const PackedMatrix matrix{layout, reinterpret_cast<const char*>(data.data()), bf16};
  Weight weight{isa, matrix, count, stride, data, scale, bias};
  PackedMatrix& m = weight.matrix;
  require(scale.has_value() == (layout.format == Format::kFp8), "scales belong to fp8 weights, and to each of them");
  if (scale.has_value()) {
    std::tie(m.block_n, m.block_k) = block;
    require(count == 1, "fp8 weights are packed one by one");
    require(m.block_n >= 1 && m.block_k >= 1, "a block of scales must not be empty");
    require(size(*scale, 0) > (n - 1) / m.block_n && size(*scale, 1) > (k - 1) / m.block_k &&
                adjacent(*scale, 1),
            "there must be a scale a block, with contiguous rows");
    m.scale = scale->data();
    m.scale_stride = scale->stride(0);
  }
  if (bias.has_value()) {
    require(size(*bias, 0) == n && adjacent(*bias, 0), "the bias must hold one value an output");
    m.bias = bias->data();
  }
  return weight;
}

void pack_py(const std::string& isa_name, const std::string& format, bool bf16, const Any2& source, const Bytes1& out,
             int num_threads) {
  const Isa& isa = isa_named(isa_name);
  const Layout layout = checked_layout(isa, format, bf16, size(source, 0), size(source, 1));
  require(static_cast<std::int64_t>(source.itemsize()) == layout.item_bytes, "the source has values of another size");
  require(adjacent(out, 0) && size(out, 0) >= layout.bytes(), "the packed bytes do not cover the weight");
  require(num_threads >= 1, "num_threads must be at least 1");
  const char* const data = static_cast<const char*>(source.data());
  const std::int64_t n_stride = source.stride(0) * layout.item_bytes;
  const std::int64_t k_stride = source.stride(1) * layout.item_bytes;
  char* const to = reinterpret_cast<char*>(out.data());
  nb::gil_scoped_release release;
  pack(layout, data, n_stride, k_stride, to, num_threads);
}

void unpack_py(const Weight& weight, std::int64_t first, std::int64_t last, const FloatsOut2& out, int num_threads) {
  const Layout& l = weight.matrix.layout;
  require(first >= 0 && first <= last && last <= l.n && num_threads >= 1, "rows outside the weight");
  require(size(out, 0) == last - first && size(out, 1) == l.k && contiguous(out),
          "out must be a contiguous [rows, inputs]");
  float* const to = out.data();
  nb::gil_scoped_release release;
  unpack(weight.matrix, first, last, to, num_threads);
}

Activations rows_of(const Any2& x, std::int64_t width, const char* name) {
  const Element element = element_of(x, name);
  require(size(x, 1) == width && adjacent(x, 1),
          std::string(name) + " must be [rows, " + std::to_string(width) + "] with contiguous rows");
  return {static_cast<const char*>(x.data()), x.stride(0) * bytes_of(element), element};
}

Output output_of(const Any2& out, std::int64_t rows, std::int64_t width) {
  const Activations as_input = rows_of(out, width, "out");
  require(size(out, 0) == rows, "out must have a row for each of x");
  return {static_cast<char*>(out.data()), as_input.stride, as_input.element};
}

void linear_py(const Weight& weight, const Any2& x, const Any2& out, int num_threads) {
  require(weight.count == 1, "weights of several heads take per_head");
  require(num_threads >= 1, "num_threads must be at least 1");
  const Activations from = rows_of(x, weight.matrix.layout.k, "x");
  const Output to = output_of(out, size(x, 0), weight.matrix.layout.n);
  const std::int64_t rows = size(x, 0);
  nb::gil_scoped_release release;
  linear(weight.isa, weight.matrix, from, rows, to, num_threads);
}

void per_head_py(const Weight& weight, const Any3& x, const Any3& out, int num_threads) {
  const Layout& l = weight.matrix.layout;
  const Element from_element = element_of(x, "x");
  const Element to_element = element_of(out, "out");
  require(num_threads >= 1, "num_threads must be at least 1");
  require(size(x, 1) == weight.count && size(x, 2) == l.k && adjacent(x, 2), "x must be [rows, heads, inputs]");
  require(size(out, 0) == size(x, 0) && size(out, 1) == weight.count && size(out, 2) == l.n && adjacent(out, 2),
          "out must be [rows, heads, outputs]");
  const std::int64_t from_bytes = bytes_of(from_element);
  const std::int64_t to_bytes = bytes_of(to_element);
  const Activations from{static_cast<const char*>(x.data()), x.stride(0) * from_bytes, from_element};
  const Output to{static_cast<char*>(out.data()), out.stride(0) * to_bytes, to_element};
  const Heads heads{weight.count, weight.stride, x.stride(1) * from_bytes, out.stride(1) * to_bytes};
  const std::int64_t rows = size(x, 0);
  nb::gil_scoped_release release;
  per_head(weight.isa, weight.matrix, heads, from, rows, to, num_threads);
}

// (gate, up, down)
using MlpWeights = std::tuple<const Weight*, const Weight*, const Weight*>;

const Isa& isa_of(const MlpWeights& weights) {
  require(std::get<0>(weights) != nullptr, "a block needs its gate, up and down");
  return std::get<0>(weights)->isa;
}

Mlp checked_mlp(const MlpWeights& weights, const Isa& isa, std::int64_t width) {
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

void mlp_py(const MlpWeights& weights, const Any2& x, const Any2& out, int num_threads) {
  require(num_threads >= 1, "num_threads must be at least 1");
  const Isa& isa = isa_of(weights);
  const Mlp checked = checked_mlp(weights, isa, size(x, 1));
  const Activations from = rows_of(x, size(x, 1), "x");
  const Output to = output_of(out, size(x, 0), size(x, 1));
  const std::int64_t rows = size(x, 0);
  nb::gil_scoped_release release;
  mlp(isa, checked, from, rows, to, num_threads);
}

void experts_py(const std::vector<MlpWeights>& weights, const std::optional<MlpWeights>& shared, const Longs2& ids,
                const Floats2& factors, const Any2& x, const Any2& out, int num_threads) {
  require(num_threads >= 1, "num_threads must be at least 1");
  require(!weights.empty(), "there must be an expert");
  const Isa& isa = isa_of(weights.front());
  const std::int64_t rows = size(x, 0);
  const std::int64_t width = size(x, 1);
  std::vector<Mlp> checked;
  checked.reserve(weights.size());
  for (const MlpWeights& expert : weights) checked.push_back(checked_mlp(expert, isa, width));
  std::optional<Mlp> always;
  if (shared.has_value()) always = checked_mlp(*shared, isa, width);
  const Activations from = rows_of(x, width, "x");
  const Output to = output_of(out, rows, width);
  const std::int64_t k = size(ids, 1);
  require(size(ids, 0) == rows && size(factors, 0) == rows && size(factors, 1) == k && contiguous(ids) &&
              contiguous(factors),
          "ids and weights must be contiguous [rows, experts a row]");
  for (std::int64_t i = 0; i < rows * k; ++i) {
    const std::int64_t id = ids.data()[i];
    require(id >= 0 && id < static_cast<std::int64_t>(weights.size()), "there is no expert with that id");
    require(i % k == 0 || ids.data()[i - 1] < id, "a row's experts must ascend");
  }
  const Routes routes{ids.data(), factors.data(), k};
  nb::gil_scoped_release release;
  experts(isa, checked, always.has_value() ? &*always : nullptr, routes, from, rows, width, to, num_threads);
}

void route_py(const Weight& router, const std::optional<Floats1>& bias, const std::string& scoring,
              const std::string& group_value, std::int64_t groups, std::int64_t kept_groups, bool normalise,
              float scale, const Any2& x, const LongsOut2& ids, const FloatsOut2& weights, int num_threads) {
  const Layout& l = router.matrix.layout;
  const std::int64_t rows = size(x, 0);
  const std::int64_t k = size(ids, 1);
  require(router.count == 1, "a router is one weight");
  require(num_threads >= 1, "num_threads must be at least 1");
  require(l.depth == 1, "a router is packed for products in float32");
  require(scoring == "sigmoid" || scoring == "softmax", "scoring is sigmoid or softmax");
  require(group_value == "top2" || group_value == "max" || group_value.empty(), "a group's value is top2 or max");
  require(groups >= 1 && l.n % groups == 0, "groups must divide the experts");
  require(kept_groups >= 1 && kept_groups <= groups, "1 to all groups are kept");
  require(groups == 1 || group_value != "top2" || l.n / groups >= 2, "a group's two best need two experts");
  require(k >= 1 && k <= l.n, "a row takes 1 to all experts");
  require(size(ids, 0) == rows && size(weights, 0) == rows && size(weights, 1) == k && contiguous(ids) &&
              contiguous(weights),
          "ids and weights must be contiguous [rows, experts a row]");
  require(!bias.has_value() || (size(*bias, 0) == l.n && adjacent(*bias, 0)), "the bias must hold one value an expert");
  const Choice choice{scoring == "sigmoid" ? Scoring::kSigmoid : Scoring::kSoftmax,
                      k,
                      groups,
                      kept_groups,
                      group_value.empty()     ? GroupValue::kNone
                      : group_value == "top2" ? GroupValue::kBestTwo
                                              : GroupValue::kBest,
                      normalise,
                      scale};
  const Activations from = rows_of(x, l.k, "x");
  const float* const bias_data = bias.has_value() ? bias->data() : nullptr;
  std::int64_t* const to = ids.data();
  float* const to_weights = weights.data();
  nb::gil_scoped_release release;
  route(router.isa, router.matrix, bias_data, choice, from, rows, to, to_weights, num_threads);
}

void require_call(std::int64_t rows, int num_threads) {
  require(rows >= 0 && num_threads >= 1, "a call has 0 or more rows and at least 1 thread");
}

// A weight that is all shape, for sizes.
PackedMatrix shape_of(const Isa& isa, bool bf16, std::int64_t n, std::int64_t k) {
  return {checked_layout(isa, "bfloat16", bf16, n, k), nullptr, bf16};
}

std::int64_t experts_scratch_py(const std::string& isa_name, bool bf16, std::int64_t width, std::int64_t inner,
                                std::int64_t shared_inner, std::int64_t num_experts, std::int64_t k, std::int64_t rows,
                                int num_threads) {
  require_call(rows, num_threads);
  require(num_experts >= 1 && k >= 1 && shared_inner >= 0, "there must be an expert");
  const Isa& isa = isa_named(isa_name);
  const PackedMatrix in = shape_of(isa, bf16, inner, width);
  const PackedMatrix out = shape_of(isa, bf16, width, inner);
  const std::vector<Mlp> all(static_cast<std::size_t>(num_experts), Mlp{&in, &in, &out});
  if (shared_inner == 0) return experts_scratch_bytes(isa, all, nullptr, k, rows, width, num_threads);
  const PackedMatrix shared_in = shape_of(isa, bf16, shared_inner, width);
  const PackedMatrix shared_out = shape_of(isa, bf16, width, shared_inner);
  const Mlp shared{&shared_in, &shared_in, &shared_out};
  return experts_scratch_bytes(isa, all, &shared, k, rows, width, num_threads);
}

std::int64_t packed_bytes_py(const std::string& isa, const std::string& format, bool bf16, std::int64_t n,
                             std::int64_t k) {
  return checked_layout(isa_named(isa), format, bf16, n, k).bytes();
}

std::int64_t linear_scratch_py(const std::string& name, bool bf16, std::int64_t n, std::int64_t k, std::int64_t rows,
                               int num_threads) {
  require_call(rows, num_threads);
  const Isa& isa = isa_named(name);
  return linear_scratch_bytes(isa, shape_of(isa, bf16, n, k).layout, rows, num_threads);
}

std::int64_t per_head_scratch_py(const std::string& name, bool bf16, std::int64_t n, std::int64_t k, std::int64_t rows,
                                 int num_threads) {
  require_call(rows, num_threads);
  const Isa& isa = isa_named(name);
  return per_head_scratch_bytes(isa, shape_of(isa, bf16, n, k).layout, rows, num_threads);
}

std::int64_t mlp_scratch_py(const std::string& name, bool bf16, std::int64_t width, std::int64_t inner,
                            std::int64_t rows, int num_threads) {
  require_call(rows, num_threads);
  const Isa& isa = isa_named(name);
  const PackedMatrix in = shape_of(isa, bf16, inner, width);
  const PackedMatrix out = shape_of(isa, bf16, width, inner);
  return mlp_scratch_bytes(isa, {&in, &in, &out}, rows, num_threads);
}

std::int64_t route_scratch_py(const std::string& name, std::int64_t experts, std::int64_t width, std::int64_t rows,
                              int num_threads) {
  require_call(rows, num_threads);
  const Isa& isa = isa_named(name);
  return route_scratch_bytes(isa, shape_of(isa, false, experts, width).layout, rows, num_threads);
}

void bind_packing(nb::module_& m) {
  m.def("pack", &pack_py, nb::arg("isa"), nb::arg("format"), nb::arg("bf16"), nb::arg("source").noconvert(),
        nb::arg("out").noconvert(), nb::arg("num_threads"));
  m.def("unpack", &unpack_py, nb::arg("weight"), nb::arg("first"), nb::arg("last"), nb::arg("out").noconvert(),
        nb::arg("num_threads"));
  m.def("packed_bytes", &packed_bytes_py, nb::arg("isa"), nb::arg("format"), nb::arg("bf16"), nb::arg("n"),
        nb::arg("k"));
  const auto init = [](Weight* self, const std::string& isa, const std::string& format, bool bf16, std::int64_t n,
                       std::int64_t k, std::int64_t count, const Bytes1& data, const std::optional<Floats2>& scale,
                       std::tuple<std::int64_t, std::int64_t> block, const std::optional<Floats1>& bias) {
    new (self) Weight(make_weight(isa, format, bf16, n, k, count, data, scale, block, bias));
  };
  nb::class_<Weight>(m, "PackedMatrix")
      .def("__init__", init, nb::arg("isa"), nb::arg("format"), nb::arg("bf16"), nb::arg("n"), nb::arg("k"),
           nb::arg("count"), nb::arg("data").noconvert(), nb::arg("scale").noconvert().none(), nb::arg("block"),
           nb::arg("bias").noconvert().none());
}

void bind_scratch(nb::module_& m) {
  m.def("linear_scratch_bytes", &linear_scratch_py, nb::arg("isa"), nb::arg("bf16"), nb::arg("n"), nb::arg("k"),
        nb::arg("rows"), nb::arg("num_threads"));
  m.def("per_head_scratch_bytes", &per_head_scratch_py, nb::arg("isa"), nb::arg("bf16"), nb::arg("n"), nb::arg("k"),
        nb::arg("rows"), nb::arg("num_threads"));
  m.def("mlp_scratch_bytes", &mlp_scratch_py, nb::arg("isa"), nb::arg("bf16"), nb::arg("width"), nb::arg("inner"),
        nb::arg("rows"), nb::arg("num_threads"));
  m.def("experts_scratch_bytes", &experts_scratch_py, nb::arg("isa"), nb::arg("bf16"), nb::arg("width"),
        nb::arg("inner"), nb::arg("shared_inner"), nb::arg("num_experts"), nb::arg("k"), nb::arg("rows"),
        nb::arg("num_threads"));
  m.def("route_scratch_bytes", &route_scratch_py, nb::arg("isa"), nb::arg("experts"), nb::arg("width"),
        nb::arg("rows"), nb::arg("num_threads"));
}

}  // namespace

void bind_linear(nb::module_& m) {
  bind_packing(m);
  bind_scratch(m);
  m.def("linear", &linear_py, nb::arg("weight"), nb::arg("x").noconvert(), nb::arg("out").noconvert(),
        nb::arg("num_threads"));
  m.def("per_head", &per_head_py, nb::arg("weight"), nb::arg("x").noconvert(), nb::arg("out").noconvert(),
        nb::arg("num_threads"));
  m.def("mlp", &mlp_py, nb::arg("weights"), nb::arg("x").noconvert(), nb::arg("out").noconvert(),
        nb::arg("num_threads"));
  m.def("experts", &experts_py, nb::arg("weights"), nb::arg("shared").none(), nb::arg("ids").noconvert(),
        nb::arg("factors").noconvert(), nb::arg("x").noconvert(), nb::arg("out").noconvert(), nb::arg("num_threads"));
  m.def("route", &route_py, nb::arg("router"), nb::arg("bias").noconvert().none(), nb::arg("scoring"),
        nb::arg("group_value"), nb::arg("groups"), nb::arg("kept_groups"), nb::arg("normalise"), nb::arg("scale"),
        nb::arg("x").noconvert(), nb::arg("ids").noconvert(), nb::arg("weights").noconvert(), nb::arg("num_threads"));
}

}  // namespace longfill
