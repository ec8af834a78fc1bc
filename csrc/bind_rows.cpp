// The row operations: norms, rotary embedding, both cache writes.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "bind.h"
#include "rows.h"

namespace nb = nanobind;

namespace longfill {
namespace {

// Of float32 or bfloat16, for which nanobind has no scalar: `type_of` checks.
using ConstValues1 = nb::ndarray<nb::ro, nb::ndim<1>, nb::device::cpu>;
using ConstValues2 = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
using ConstValues3 = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
using Values2 = nb::ndarray<nb::ndim<2>, nb::device::cpu>;
using Values3 = nb::ndarray<nb::ndim<3>, nb::device::cpu>;
using ConstFloats1 = nb::ndarray<const float, nb::ndim<1>, nb::device::cpu>;
using ConstFloats2 = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Floats2 = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using Floats3 = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;
using ConstBytes2 = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using Bytes3 = nb::ndarray<std::uint8_t, nb::ndim<3>, nb::device::cpu>;
using ConstLongs1 = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::device::cpu>;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

std::int64_t signed_size(std::size_t size) { return static_cast<std::int64_t>(size); }

template <class Array>
ValueType type_of(const Array& x) {
  if (x.dtype() == nb::dtype<float>()) return ValueType::kFloat32;
  const nb::dlpack::dtype bf16{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
  require(x.dtype() == bf16, "values must be float32 or bfloat16");
  return ValueType::kBf16;
}

template <class Array>
std::int64_t value_bytes(const Array& x) {
  return x.dtype().bits / 8;
}

// Bytes between neighbours along `axis`.
template <class Array>
std::int64_t byte_stride(const Array& x, std::size_t axis) {
  return x.stride(axis) * value_bytes(x);
}

template <class Array>
void require_contiguous(const Array& x) {
  const std::size_t last = x.ndim() - 1;
  require(x.shape(last) <= 1 || x.stride(last) == 1, "the last dimension must be contiguous");
}

template <class Array>
ConstRows readable(const Array& x) {
  require_contiguous(x);
  return {reinterpret_cast<const char*>(x.data()), byte_stride(x, 0)};
}

template <class Array>
void require_packed(const Array& x) {
  std::int64_t expected = 1;
  for (std::size_t axis = x.ndim(); axis-- > 0; expected *= signed_size(x.shape(axis)))
    require(x.shape(axis) <= 1 || x.stride(axis) == expected, "what is returned must be contiguous");
}

// Rows that are written must not share memory: two threads may have them.
template <class Array>
Rows writable(Array& x) {
  require_contiguous(x);
  const std::size_t last = x.ndim() - 1;
  for (std::size_t axis = 0; axis < last; ++axis)
    require(x.shape(axis) <= 1 || x.stride(axis) >= signed_size(x.shape(last)), "rows that are written overlap");
  return {reinterpret_cast<char*>(x.data()), byte_stride(x, 0)};
}

Rotation checked_rotation(const ConstFloats2& cos, const ConstFloats2& sin, std::int64_t rows, bool interleaved) {
  require(signed_size(cos.shape(0)) == rows && signed_size(sin.shape(0)) == rows && cos.shape(1) == sin.shape(1),
          "cosines and sines must be [rows, pairs]");
  return {readable(cos), readable(sin), signed_size(cos.shape(1)), interleaved};
}

const std::int64_t* checked_slots(const ConstLongs1& slots, std::int64_t rows, std::int64_t pages,
                                  std::int64_t page_size) {
  require(signed_size(slots.shape(0)) == rows, "a row needs one slot");
  require_contiguous(slots);
  for (std::int64_t i = 0; i < rows; ++i)
    require(slots.data()[i] >= 0 && slots.data()[i] < pages * page_size, "a slot lies outside the pool");
  return slots.data();
}

PagedRows checked_pages(const Bytes3& pages, std::int64_t row_bytes) {
  require(signed_size(pages.shape(2)) == row_bytes, "a row of the cache has another size than its format says");
  require(row_bytes <= 1 || pages.stride(2) == 1, "a row of the cache must be contiguous");
  return {reinterpret_cast<char*>(pages.data()), pages.stride(0), pages.stride(1), signed_size(pages.shape(1))};
}

struct LatentLayout {
  LatentFormat format;
  std::int64_t row_bytes;
};

LatentLayout latent_layout(const std::string& format, std::int64_t rank, std::int64_t rope_dim) {
  const std::int64_t width = rank + rope_dim;
  if (format == "float32") return {LatentFormat::kFloat32, 4 * width};
  if (format == "bfloat16") return {LatentFormat::kBfloat16, 2 * width};
  if (format == "fp8") return {LatentFormat::kFp8, width};
  if (format != "fp8_ds_mla") throw std::invalid_argument("unknown latent cache format '" + format + "'");
  const std::int64_t groups = (rank + kScaleGroup - 1) / kScaleGroup;
  return {LatentFormat::kFp8DsMla, rank + 4 * groups + 2 * rope_dim};
}

bool is_power_of_two(float scale) {
  int exponent;
  return std::isnormal(scale) && std::isnormal(1.0f / scale) && std::frexp(scale, &exponent) == 0.5f;
}

void rms_norm_py(const std::string& isa_name, const ConstValues2& x, const ConstValues1& weight, float eps,
                 Values2& out, int num_threads) {
  const Isa& isa = isa_named(isa_name);
  const auto rows = signed_size(x.shape(0));
  const auto width = signed_size(x.shape(1));
  const ValueType type = type_of(x);
  require(num_threads >= 1, "num_threads must be at least 1");
  require(width >= 1, "a row must hold a value");
  require(type_of(weight) == type && type_of(out) == type, "rows, weight and result must have one dtype");
  require(signed_size(weight.shape(0)) == width, "the weight must have a row's width");
  require(signed_size(out.shape(0)) == rows && signed_size(out.shape(1)) == width, "the result must have x's shape");
  const RmsNormArgs args{type, readable(x), readable(weight).data, eps, writable(out), width};
  nb::gil_scoped_release release;
  rms_norm(isa, args, rows, num_threads);
}

void store_latent_py(const std::string& isa_name, const ConstValues2& kv, const ConstValues1& norm, float eps,
                     const ConstFloats2& cos, const ConstFloats2& sin, bool interleaved, const Bytes3& cache,
                     const std::string& format, float scale, float rope_scale, const ConstLongs1& slots,
                     int num_threads) {
  const Isa& isa = isa_named(isa_name);
  const auto rows = signed_size(kv.shape(0));
  const auto rank = signed_size(norm.shape(0));
  const Rotation rotation = checked_rotation(cos, sin, rows, interleaved);
  const LatentLayout layout = latent_layout(format, rank, 2 * rotation.pairs);
  require(num_threads >= 1, "num_threads must be at least 1");
  require(rank >= 1, "the latent part must hold a value");
  require(type_of(norm) == type_of(kv), "rows and norm must have one dtype");
  require(signed_size(kv.shape(1)) == rank + 2 * rotation.pairs, "a row must hold the latent and the rotary part");
  require(layout.format != LatentFormat::kFp8 || (is_power_of_two(scale) && is_power_of_two(rope_scale)),
          "the scales of format fp8 must be powers of two");
  const PagedRows pages = checked_pages(cache, layout.row_bytes);
  const std::int64_t* const to = checked_slots(slots, rows, signed_size(cache.shape(0)), pages.page_size);
  const StoreLatentArgs args{type_of(kv), readable(kv),  readable(norm).data, eps,        rotation, rank,
                             layout.format, scale, rope_scale,          to, pages};
  nb::gil_scoped_release release;
  store_latent(isa, args, rows, num_threads);
}

void store_index_keys_py(const std::string& isa_name, const ConstValues2& keys, const ConstFloats1& weight,
                         const ConstFloats1& bias, const ConstFloats2& cos, const ConstFloats2& sin, bool interleaved,
                         const Bytes3& values, const std::optional<Floats2>& scales, const ConstLongs1& slots,
                         int num_threads) {
  const Isa& isa = isa_named(isa_name);
  const auto rows = signed_size(keys.shape(0));
  const auto dim = signed_size(keys.shape(1));
  const Rotation rotation = checked_rotation(cos, sin, rows, interleaved);
  require(num_threads >= 1, "num_threads must be at least 1");
  require(dim >= 1 && 2 * rotation.pairs <= dim, "a key must hold its rotary part");
  require(signed_size(weight.shape(0)) == dim && signed_size(bias.shape(0)) == dim, "norms must have a key's width");
  const PagedRows pages = checked_pages(values, scales.has_value() ? dim : 4 * dim);
  PagedRows scale_pages{nullptr, 0, 0, pages.page_size};
  if (scales.has_value()) {
    require(scales->shape(0) == values.shape(0) && scales->shape(1) == values.shape(1), "a key needs one scale");
    scale_pages = {reinterpret_cast<char*>(scales->data()), byte_stride(*scales, 0), byte_stride(*scales, 1),
                   pages.page_size};
  }
  const std::int64_t* const to = checked_slots(slots, rows, signed_size(values.shape(0)), pages.page_size);
  require_contiguous(weight);
  require_contiguous(bias);
  const StoreIndexKeysArgs args{type_of(keys), readable(keys), weight.data(), bias.data(), rotation,
                                dim,           to,             pages,         scale_pages};
  nb::gil_scoped_release release;
  store_index_keys(isa, args, rows, num_threads);
}

void index_queries_py(const std::string& isa_name, const ConstValues2& queries, const ConstFloats2& weights,
                      const ConstFloats2& cos, const ConstFloats2& sin, bool interleaved, bool quantise,
                      float weight_scale, Floats3& out_queries, Floats2& out_weights, int num_threads) {
  const Isa& isa = isa_named(isa_name);
  const auto rows = signed_size(queries.shape(0));
  const auto heads = signed_size(out_queries.shape(1));
  const auto dim = signed_size(out_queries.shape(2));
  const Rotation rotation = checked_rotation(cos, sin, rows, interleaved);
  require(num_threads >= 1, "num_threads must be at least 1");
  require(heads >= 1 && dim >= 1 && 2 * rotation.pairs <= dim, "a head must hold its rotary part");
  require(signed_size(queries.shape(1)) == heads * dim, "a row must hold all heads");
  require(signed_size(weights.shape(0)) == rows && signed_size(weights.shape(1)) == heads,
          "weights must be [rows, heads]");
  require(signed_size(out_queries.shape(0)) == rows && signed_size(out_weights.shape(0)) == rows &&
              signed_size(out_weights.shape(1)) == heads,
          "what is returned must be [rows, heads, dim] and [rows, heads]");
  require_packed(out_queries);
  require_packed(out_weights);
  const IndexQueriesArgs args{type_of(queries), readable(queries), readable(weights), weight_scale,
                              rotation,         heads,             dim,               quantise,
                              out_queries.data(), out_weights.data()};
  nb::gil_scoped_release release;
  index_queries(isa, args, rows, num_threads);
}

void rotate_py(const std::string& isa_name, const ConstValues3& x, const ConstFloats2& cos, const ConstFloats2& sin,
               bool interleaved, Values3& out, int num_threads) {
  const Isa& isa = isa_named(isa_name);
  const auto rows = signed_size(x.shape(0));
  const Rotation rotation = checked_rotation(cos, sin, rows, interleaved);
  require(num_threads >= 1, "num_threads must be at least 1");
  require(type_of(out) == type_of(x), "x and the result must have one dtype");
  require(signed_size(x.shape(2)) == 2 * rotation.pairs, "a vector must hold two values a pair");
  for (std::size_t axis = 0; axis < 3; ++axis)
    require(out.shape(axis) == x.shape(axis), "the result must have x's shape");
  const RotateArgs args{type_of(x),    readable(x),   byte_stride(x, 1), rotation, signed_size(x.shape(1)),
                        writable(out), byte_stride(out, 1)};
  nb::gil_scoped_release release;
  rotate(isa, args, rows, num_threads);
}

void put_rows_py(const ConstBytes2& from, const ConstLongs1& order, const Bytes3& cache, const ConstLongs1& slots,
                 int num_threads) {
  const auto rows = signed_size(order.shape(0));
  const auto bytes = signed_size(from.shape(1));
  require(num_threads >= 1, "num_threads must be at least 1");
  require_contiguous(order);
  for (std::int64_t i = 0; i < rows; ++i)
    require(order.data()[i] >= 0 && order.data()[i] < signed_size(from.shape(0)), "a row that is put is not there");
  const PagedRows pages = checked_pages(cache, bytes);
  const std::int64_t* const to = checked_slots(slots, rows, signed_size(cache.shape(0)), pages.page_size);
  const PutRowsArgs args{readable(from), bytes, order.data(), to, pages};
  nb::gil_scoped_release release;
  put_rows(args, rows, num_threads);
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("rms_norm", &rms_norm_py, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
        nb::arg("eps"), nb::arg("out").noconvert(), nb::arg("num_threads"));
  m.def("store_latent", &store_latent_py, nb::arg("isa"), nb::arg("kv").noconvert(), nb::arg("norm").noconvert(),
        nb::arg("eps"), nb::arg("cos").noconvert(), nb::arg("sin").noconvert(), nb::arg("interleaved"),
        nb::arg("cache").noconvert(), nb::arg("format"), nb::arg("scale"), nb::arg("rope_scale"),
        nb::arg("slots").noconvert(), nb::arg("num_threads"));
  m.def("store_index_keys", &store_index_keys_py, nb::arg("isa"), nb::arg("keys").noconvert(),
        nb::arg("weight").noconvert(), nb::arg("bias").noconvert(), nb::arg("cos").noconvert(),
        nb::arg("sin").noconvert(), nb::arg("interleaved"), nb::arg("values").noconvert(),
        nb::arg("scales").noconvert().none(), nb::arg("slots").noconvert(), nb::arg("num_threads"));
  m.def("index_queries", &index_queries_py, nb::arg("isa"), nb::arg("queries").noconvert(),
        nb::arg("weights").noconvert(), nb::arg("cos").noconvert(), nb::arg("sin").noconvert(),
        nb::arg("interleaved"), nb::arg("quantise"), nb::arg("weight_scale"), nb::arg("out_queries").noconvert(),
        nb::arg("out_weights").noconvert(), nb::arg("num_threads"));
  m.def("rotate", &rotate_py, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("cos").noconvert(),
        nb::arg("sin").noconvert(), nb::arg("interleaved"), nb::arg("out").noconvert(), nb::arg("num_threads"));
  m.def("put_rows", &put_rows_py, nb::arg("rows").noconvert(), nb::arg("order").noconvert(),
        nb::arg("cache").noconvert(), nb::arg("slots").noconvert(), nb::arg("num_threads"));
  m.def(
      "row_scratch_bytes",
      [](std::int64_t width, int num_threads) {
        require(width >= 0 && num_threads >= 1, "a row has 0 or more values, a call at least 1 thread");
        return row_scratch_bytes(width, num_threads);
      },
      nb::arg("width"), nb::arg("num_threads"));
}

}  // namespace longfill
