// Packed weights as Python objects, and the products with them.
#include "bind_weights.h"

namespace longfill {
namespace {

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
}

}  // namespace longfill
