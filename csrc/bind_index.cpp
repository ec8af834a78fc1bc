// index_topk and what the module says about the machine.
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
#include "index_topk.h"
#include "merge_topk.h"
#include "screen.h"
#include "screen_check.h"

namespace nb = nanobind;

namespace longfill {
namespace {

using Floats2 = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using ConstFloats2 = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using ConstFloats3 = nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;
using ConstBytes3 = nb::ndarray<const std::uint8_t, nb::ndim<3>, nb::device::cpu>;
using Ints2 = nb::ndarray<std::int32_t, nb::ndim<2>, nb::device::cpu>;
using ConstInts2 = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>;
using ConstLongs1 = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::device::cpu>;
// Contiguous ones, of screen_check.
using Queries = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstFloats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes2 = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes2 = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// (first row, rows, first position, keys that each row sees unless rows are consecutive, page table)
using Rows = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::optional<ConstLongs1>, ConstLongs1>>;

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("index_topk: " + what);
}

// Along a dimension of size 1 a stride means nothing, and arrays come with any.
template <class Array>
bool adjacent(const Array& array, std::size_t dimension) {
  return array.stride(dimension) == 1 || array.shape(dimension) <= 1;
}

void check_counts(const ConstLongs1& visible, std::int64_t rows) {
  require(static_cast<std::int64_t>(visible.shape(0)) == rows && adjacent(visible, 0),
          "visible counts must be contiguous, one a row");
  std::int64_t before = 0;
  for (std::int64_t i = 0; i < rows; before = visible.data()[i++])
    require(visible.data()[i] >= before && visible.data()[i] <= INT32_MAX, "visible counts must ascend from 0 on");
}

std::vector<ScoredRows> checked_rows(const Rows& rows, const ConstBytes3& values, std::int64_t num_rows) {
  const auto num_pages = static_cast<std::int64_t>(values.shape(0));
  const auto page_size = static_cast<std::int64_t>(values.shape(1));
  std::vector<ScoredRows> checked;
  for (const auto& [first_row, count, first_position, visible, pages] : rows) {
    require(first_row >= 0 && count >= 0 && count <= num_rows - first_row, "rows outside the step");
    require(first_position >= 0 && first_position <= INT32_MAX - count, "a position does not fit 32 bits");
    require(adjacent(pages, 0), "page tables must be contiguous");
    if (visible.has_value()) check_counts(*visible, count);
    const ScoredRows span{first_row, count, first_position, visible.has_value() ? visible->data() : nullptr,
                          pages.data()};
    const std::int64_t needed = (span.keys() + page_size - 1) / page_size;
    require(static_cast<std::int64_t>(pages.shape(0)) >= needed, "a page table is shorter than its context");
    for (std::int64_t i = 0; i < needed; ++i)
      require(pages.data()[i] >= 0 && pages.data()[i] < num_pages, "a page table names a page outside the pool");
    if (count > 0) checked.push_back(span);
  }
  return checked;
}

Isa isa_for_keys(const std::string& name, bool fp8) {
  return fp8 ? isa_named(name) : with_float_keys(isa_named(name));
}

ScreenMode screen_mode(const std::string& name, const Isa& isa) {
  if (name == "off") return ScreenMode::kOff;
  if (name == "auto") return ScreenMode::kAuto;
  require(name == "on", "screen must be auto, on or off");
  require(isa.screen != nullptr, std::string("no screen for instruction set ") + isa.name);
  return ScreenMode::kOn;
}

// (pairs, screened, survivors)
std::tuple<std::int64_t, std::int64_t, std::int64_t> index_topk_py(
    const std::string& isa_name, const ConstFloats3& queries, const ConstFloats2& weights, const ConstBytes3& values,
    const std::optional<ConstFloats2>& scales, const Rows& rows, const Ints2& selection, const std::optional<Floats2>& scores,
    const std::string& screen, int num_threads) {
  const Isa isa = isa_for_keys(isa_name, scales.has_value());
  const ScreenMode mode = screen_mode(screen, isa);
  const auto num_rows = static_cast<std::int64_t>(queries.shape(0));
  const auto heads = static_cast<std::int64_t>(queries.shape(1));
  const auto dim = static_cast<std::int64_t>(queries.shape(2));
  const auto k = static_cast<std::int64_t>(selection.shape(1));
  require(heads >= 1 && heads <= 1024, "heads must be 1 to 1024");
  require(dim >= 16 && dim % 16 == 0 && dim <= 4096, "dim must be a multiple of 16, at most 4096");
  require(k >= 1, "k must be at least 1");
  require(num_threads >= 1, "num_threads must be at least 1");
  require(queries.stride(2) == 1 && (queries.stride(1) == dim || heads == 1), "a row of queries must be contiguous");
  require(static_cast<std::int64_t>(weights.shape(0)) == num_rows &&
              static_cast<std::int64_t>(weights.shape(1)) == heads && adjacent(weights, 1),
          "weights must be [rows, heads] with contiguous rows");
  const std::int64_t key_bytes = scales.has_value() ? dim : 4 * dim;
  require(static_cast<std::int64_t>(values.shape(2)) == key_bytes && values.stride(2) == 1 && values.shape(1) >= 1,
          "keys must be [pages, page size, bytes of dim values] with contiguous keys");
  require(!scales.has_value() || (scales->shape(0) == values.shape(0) && scales->shape(1) == values.shape(1)),
          "a key needs one scale");
  require(static_cast<std::int64_t>(selection.shape(0)) == num_rows && adjacent(selection, 1),
          "the selection must be [rows, k] with contiguous rows");
  Selection out{selection.data(), selection.stride(0), nullptr, 0, k};
  if (scores.has_value()) {
    require(static_cast<std::int64_t>(scores->shape(0)) == num_rows &&
                static_cast<std::int64_t>(scores->shape(1)) == k && adjacent(*scores, 1),
            "scores must have the selection's shape and contiguous rows");
    out.scores = scores->data();
    out.score_stride = scores->stride(0);
  }
  const std::vector<ScoredRows> checked = checked_rows(rows, values, num_rows);
  PagedKeys keys{values.data(), values.stride(0), values.stride(1), nullptr, 0, 0,
                 static_cast<std::int64_t>(values.shape(1))};
  if (scales.has_value()) {
    keys.scales = scales->data();
    keys.scale_page_stride = scales->stride(0);
    keys.scale_slot_stride = scales->stride(1);
  }
  const IndexInputs inputs{queries.data(), queries.stride(0),        weights.data(), weights.stride(0),
                           static_cast<int>(heads), static_cast<int>(dim), keys};
  nb::gil_scoped_release release;
  const ScreenCounts counted = index_topk(isa, inputs, checked, out, mode, num_threads);
  return {counted.pairs, counted.screened, counted.survivors};
}

void merge_topk_py(const std::string& isa_name, const ConstFloats2& scores, const ConstInts2& positions,
                   const Ints2& selection, int num_threads) {
  const Isa& isa = isa_named(isa_name);
  const auto rows = static_cast<std::int64_t>(selection.shape(0));
  const auto entries = static_cast<std::int64_t>(scores.shape(1));
  const auto k = static_cast<std::int64_t>(selection.shape(1));
  require(num_threads >= 1, "num_threads must be at least 1");
  require(k >= 1, "k must be at least 1");
  require(static_cast<std::int64_t>(scores.shape(0)) == rows && adjacent(scores, 1) &&
              static_cast<std::int64_t>(positions.shape(0)) == rows && adjacent(positions, 1) &&
              static_cast<std::int64_t>(positions.shape(1)) == entries,
          "candidates must be a score and a position an entry, in contiguous rows, one for each of the selection");
  require(adjacent(selection, 1), "the selection must have contiguous rows");
  const ShardCandidates candidates{scores.data(), scores.stride(0), positions.data(), positions.stride(0), entries};
  const Selection out{selection.data(), selection.stride(0), nullptr, 0, k};
  nb::gil_scoped_release release;
  merge_topk(isa, candidates, rows, out, num_threads);
}

void screen_check_py(const std::string& isa_name, const Queries& queries, const Weights& weights,
                     const ConstBytes2& keys, const ConstFloats1& scales, const ConstFloats1& thresholds,
                     float bound_factor, const Bytes2& passed) {
  const Isa& isa = isa_named(isa_name);
  screen_mode("on", isa);
  const std::size_t rows = queries.shape(0), heads = queries.shape(1), dim = queries.shape(2), count = keys.shape(0);
  require(rows >= 1 && heads >= 1 && heads <= 1024 && dim >= 16 && dim % 16 == 0 && dim <= 4096, "bad query shape");
  require(count >= 1 && count <= kScreenTileKeys && keys.shape(1) == dim, "bad key shape");
  require(weights.shape(0) == rows && weights.shape(1) == heads && thresholds.shape(0) == rows &&
              scales.shape(0) == count && passed.shape(0) == rows && passed.shape(1) == count,
          "shapes do not fit together");
  screen_check(isa,
               {queries.data(), weights.data(), keys.data(), scales.data(), thresholds.data(), static_cast<int>(rows),
                static_cast<int>(heads), static_cast<int>(dim), static_cast<int>(count), bound_factor},
               passed.data());
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Isa* isa : supported_isas()) names.emplace_back(isa->name);
  return names;
}

}  // namespace

void bind_index(nb::module_& m) {
  m.def("isa_names", &isa_names);
  m.def("index_topk", &index_topk_py, nb::arg("isa"), nb::arg("queries").noconvert(),
        nb::arg("weights").noconvert(), nb::arg("values").noconvert(), nb::arg("scales").noconvert().none(),
        nb::arg("rows").noconvert(), nb::arg("selection").noconvert(), nb::arg("scores").noconvert().none(),
        nb::arg("screen"), nb::arg("num_threads"));
  m.def(
      "index_topk_scratch_bytes",
      [](const std::string& isa, bool fp8_keys, int heads, int dim, std::int64_t k, const std::string& screen,
         int num_threads) {
        require(heads >= 1 && dim >= 16 && k >= 1 && num_threads >= 1, "heads, dim, k and num_threads are no shape");
        const Isa chosen = isa_for_keys(isa, fp8_keys);
        return index_topk_scratch_bytes(chosen, {heads, dim, k}, screen_mode(screen, chosen), num_threads);
      },
      nb::arg("isa"), nb::arg("fp8_keys"), nb::arg("heads"), nb::arg("dim"), nb::arg("k"), nb::arg("screen"),
      nb::arg("num_threads"));
  m.def("merge_topk", &merge_topk_py, nb::arg("isa"), nb::arg("scores").noconvert(), nb::arg("positions").noconvert(),
        nb::arg("selection").noconvert(), nb::arg("num_threads"));
  m.def(
      "merge_topk_scratch_bytes",
      [](std::int64_t entries, int num_threads) {
        require(entries >= 0 && num_threads >= 1, "no candidates to merge");
        return merge_topk_scratch_bytes(entries, num_threads);
      },
      nb::arg("entries"), nb::arg("num_threads"));
  m.def("screen_check", &screen_check_py, nb::arg("isa"), nb::arg("queries").noconvert(),
        nb::arg("weights").noconvert(), nb::arg("keys").noconvert(), nb::arg("scales").noconvert(),
        nb::arg("thresholds").noconvert(), nb::arg("bound_factor"), nb::arg("passed").noconvert());
  m.def(
      "spin",
      [](const std::string& isa, std::int64_t iterations) {
        const Isa& chosen = isa_named(isa);
        nb::gil_scoped_release release;
        return chosen.spin(iterations);
      },
      nb::arg("isa"), nb::arg("iterations"));
}

}  // namespace longfill
