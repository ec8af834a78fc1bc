// sparse_mla, dense_mla and gather_rows.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "attention.h"
#include "bind.h"
#include "latent.h"

namespace nb = nanobind;

namespace longfill {
namespace {

using Rows3 = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;  // bf16 or fp32
using OutRows3 = nb::ndarray<nb::ndim<3>, nb::device::cpu>;
using Rows2 = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
using OutRows2 = nb::ndarray<nb::ndim<2>, nb::device::cpu>;
using ConstBytes3 = nb::ndarray<const std::uint8_t, nb::ndim<3>, nb::device::cpu>;
using ConstInts2 = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>;
using ConstLongs1 = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::device::cpu>;
using Floats2 = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
// (format, rank, rope dim, latent scale, rope scale)
using Layout = std::tuple<std::string, std::int64_t, std::int64_t, float, float>;

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("attention: " + what);
}

bool is_bf16(const nb::dlpack::dtype& type, const std::string& name) {
  const bool bf16 = type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat) && type.bits == 16;
  const bool fp32 = type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 32;
  require(type.lanes == 1 && (bf16 || fp32), name + " must be bfloat16 or float32");
  return bf16;
}

LatentLayout layout_of(const Layout& layout) {
  const auto& [format, rank, rope_dim, scale, rope_scale] = layout;
  require(rank >= 1 && rank <= 1 << 16 && rope_dim >= 0 && rope_dim <= 1 << 16, "rank or rope dim out of range");
  const LatentLayout checked{latent_format(format), rank, rope_dim, scale, rope_scale};
  require(checked.format == LatentFormat::kFloat32 || checked.row_bytes() % 4 == 0,
          "the rows of this format do not fill whole words at this rank and rope dim");
  // bf16 products take values in pairs.
  require(checked.format == LatentFormat::kFloat32 || checked.width() % 2 == 0,
          "rank + rope dim must be even in this format");
  return checked;
}

// Pages are checked where they are read: a request may have many more than a call touches.
LatentRows paged_rows(const Layout& layout, const ConstBytes3& pool, const ConstLongs1& pages) {
  const LatentLayout checked = layout_of(layout);
  const auto page_size = static_cast<std::int64_t>(pool.shape(1));
  require(page_size >= 1, "a page must hold a token");
  require(static_cast<std::int64_t>(pool.shape(2)) == checked.row_bytes() && pool.stride(2) == 1,
          "the pool must be [pages, page size, row bytes] with contiguous rows of its format");
  require(pages.stride(0) == 1 || pages.shape(0) <= 1, "page tables must be contiguous");
  return LatentRows(checked, pool.data(), pool.stride(0), pool.stride(1), page_size,
                    static_cast<std::int64_t>(pool.shape(0)), pages.data(),
                    static_cast<std::int64_t>(pages.shape(0)) * page_size);
}

LatentRows gathered_rows(const LatentLayout& layout, const Rows2& context) {
  const bool bf16 = is_bf16(context.dtype(), "the context");
  require(static_cast<std::int64_t>(context.shape(1)) == layout.width() && context.stride(1) == 1,
          "the context must be [tokens, rank + rope dim] with contiguous rows");
  const LatentLayout plain{bf16 ? LatentFormat::kBfloat16 : LatentFormat::kFloat32, layout.rank, layout.rope_dim, 1.0f,
                           1.0f};
  return LatentRows(plain, static_cast<const std::uint8_t*>(context.data()), context.stride(0) * (bf16 ? 2 : 4),
                    static_cast<std::int64_t>(context.shape(0)));
}

AttentionCall call_of(const Isa& isa, const LatentLayout& layout, const Rows3& queries, const OutRows3& out,
                      const std::optional<Floats2>& lse, double scale, int num_threads) {
  const auto num_rows = static_cast<std::int64_t>(queries.shape(0));
  const auto heads = static_cast<std::int64_t>(queries.shape(1));
  const bool bf16 = is_bf16(queries.dtype(), "queries");
  const bool bf16_out = is_bf16(out.dtype(), "outputs");
  require(heads >= 1, "queries must have a head");
  require(std::isfinite(scale) && static_cast<float>(scale) > 0.0f, "the scale must be positive");
  require(num_threads >= 1, "num_threads must be at least 1");
  require(static_cast<std::int64_t>(queries.shape(2)) == layout.width() && queries.stride(2) == 1,
          "queries must be [rows, heads, rank + rope dim] with contiguous heads");
  require(static_cast<std::int64_t>(out.shape(0)) == num_rows && static_cast<std::int64_t>(out.shape(1)) == heads &&
              static_cast<std::int64_t>(out.shape(2)) == layout.rank && out.stride(2) == 1,
          "outputs must be [rows, heads, rank] with contiguous heads");
  const std::int64_t in_bytes = bf16 ? 2 : 4;
  const std::int64_t out_bytes = bf16_out ? 2 : 4;
  AttentionCall call{};
  call.shape = {heads, layout.rank, layout.rope_dim};
  call.queries = {static_cast<const char*>(queries.data()), queries.stride(0) * in_bytes,
                  queries.stride(1) * in_bytes, bf16};
  call.out = {static_cast<char*>(out.data()), out.stride(0) * out_bytes, out.stride(1) * out_bytes, bf16_out, nullptr,
              0};
  if (lse.has_value()) {
    require(static_cast<std::int64_t>(lse->shape(0)) == num_rows &&
                static_cast<std::int64_t>(lse->shape(1)) == heads && (lse->stride(1) == 1 || heads == 1),
            "the log-sum-exp must be [rows, heads] with contiguous rows");
    call.out.lse = lse->data();
    call.out.lse_stride = lse->stride(0);
  }
  call.num_rows = num_rows;
  call.scale = static_cast<float>(scale);
  call.bf16 = computes_in_bf16(isa, bf16, layout.format);
  return call;
}

void sparse_mla_py(const std::string& isa_name, const Rows3& queries, const Layout& layout, const ConstBytes3& pool,
                   const ConstLongs1& pages, const std::optional<Rows2>& context, const ConstInts2& selection,
                   double scale, const OutRows3& out, const std::optional<Floats2>& lse, int num_threads) {
  const Isa& isa = isa_named(isa_name);
  const LatentRows paged = paged_rows(layout, pool, pages);
  const LatentRows keys = context.has_value() ? gathered_rows(paged.layout(), *context) : paged;
  const AttentionCall call = call_of(isa, paged.layout(), queries, out, lse, scale, num_threads);
  require(static_cast<std::int64_t>(selection.shape(0)) == call.num_rows &&
              (selection.stride(1) == 1 || selection.shape(1) <= 1),
          "the selection must be [rows, k] with contiguous rows");
  const SelectedKeys selected{selection.data(), selection.stride(0), static_cast<std::int64_t>(selection.shape(1))};
  nb::gil_scoped_release release;
  sparse_mla(isa, call, keys, selected, num_threads);
}

void dense_mla_py(const std::string& isa_name, const Rows3& queries, const Layout& layout, const ConstBytes3& pool,
                  const ConstLongs1& pages, const ConstLongs1& visible, double scale, const OutRows3& out,
                  const std::optional<Floats2>& lse, int num_threads) {
  const Isa& isa = isa_named(isa_name);
  const LatentRows keys = paged_rows(layout, pool, pages);
  const AttentionCall call = call_of(isa, keys.layout(), queries, out, lse, scale, num_threads);
  require(static_cast<std::int64_t>(visible.shape(0)) == call.num_rows &&
              (visible.stride(0) == 1 || call.num_rows <= 1),
          "visible counts must be contiguous, one a row");
  std::int64_t before = 0;
  for (std::int64_t i = 0; i < call.num_rows; before = visible.data()[i++])
    require(visible.data()[i] >= before, "visible counts must ascend from 0 on");
  require(before <= keys.size(), "the page table is shorter than the context");
  nb::gil_scoped_release release;
  dense_mla(isa, call, keys, visible.data(), num_threads);
}

void gather_rows_py(const std::string& isa_name, const Layout& layout, const ConstBytes3& pool,
                    const ConstLongs1& pages, std::int64_t length, const OutRows2& out, int num_threads) {
  const Isa& isa = isa_named(isa_name);
  const LatentRows rows = paged_rows(layout, pool, pages);
  const bool bf16 = is_bf16(out.dtype(), "the context");
  require(num_threads >= 1, "num_threads must be at least 1");
  require(static_cast<std::int64_t>(out.shape(1)) == rows.layout().width() && out.stride(1) == 1,
          "the context must be [tokens, rank + rope dim] with contiguous rows");
  require(length >= 0 && length <= static_cast<std::int64_t>(out.shape(0)), "the context has no room for all tokens");
  require(length <= rows.size(), "the page table is shorter than the context");
  nb::gil_scoped_release release;
  gather_rows(isa, rows, length, static_cast<char*>(out.data()), out.stride(0) * (bf16 ? 2 : 4), bf16, num_threads);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("sparse_mla", &sparse_mla_py, nb::arg("isa"), nb::arg("queries").noconvert(), nb::arg("layout"),
        nb::arg("pool").noconvert(), nb::arg("pages").noconvert(), nb::arg("context").noconvert().none(),
        nb::arg("selection").noconvert(), nb::arg("scale"), nb::arg("out").noconvert(),
        nb::arg("lse").noconvert().none(), nb::arg("num_threads"));
  m.def("dense_mla", &dense_mla_py, nb::arg("isa"), nb::arg("queries").noconvert(), nb::arg("layout"),
        nb::arg("pool").noconvert(), nb::arg("pages").noconvert(), nb::arg("visible").noconvert(), nb::arg("scale"),
        nb::arg("out").noconvert(), nb::arg("lse").noconvert().none(), nb::arg("num_threads"));
  m.def("gather_rows", &gather_rows_py, nb::arg("isa"), nb::arg("layout"), nb::arg("pool").noconvert(),
        nb::arg("pages").noconvert(), nb::arg("length"), nb::arg("out").noconvert(), nb::arg("num_threads"));
  m.def(
      "attention_scratch_bytes",
      [](const std::string& isa, std::int64_t heads, std::int64_t rank, std::int64_t rope_dim, int num_threads) {
        require(heads >= 1 && rank >= 1 && rope_dim >= 0 && num_threads >= 1, "no shape to attend with");
        return attention_scratch_bytes(isa_named(isa), {heads, rank, rope_dim}, num_threads);
      },
      nb::arg("isa"), nb::arg("heads"), nb::arg("rank"), nb::arg("rope_dim"), nb::arg("num_threads"));
}

}  // namespace longfill
