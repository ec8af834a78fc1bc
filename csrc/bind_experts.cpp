// The mixture of experts: its router, its products, and the fold of outputs that were computed elsewhere.
#include "bind_weights.h"
#include "route.h"

namespace longfill {
namespace {

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

void fold_experts_py(const std::string& isa_name, const Floats2& outputs, const Longs2& slots, const Floats2& factors,
                     const std::optional<Floats2>& shared, const Any2& out, int num_threads) {
  require(num_threads >= 1, "num_threads must be at least 1");
  const Isa& isa = isa_named(isa_name);
  const std::int64_t rows = size(slots, 0);
  const std::int64_t k = size(slots, 1);
  const std::int64_t width = size(outputs, 1);
  const Output to = output_of(out, rows, width);
  require(adjacent(outputs, 1), "outputs must have contiguous rows");
  require(size(factors, 0) == rows && size(factors, 1) == k && contiguous(slots) && contiguous(factors),
          "slots and weights must be contiguous [rows, experts a row]");
  for (std::int64_t i = 0; i < rows * k; ++i)
    require(slots.data()[i] >= 0 && slots.data()[i] < size(outputs, 0), "there is no output in that slot");
  ExpertOutputs from{outputs.data(), outputs.stride(0), slots.data(), factors.data(), k, nullptr, 0};
  if (shared.has_value()) {
    require(size(*shared, 0) == rows && size(*shared, 1) == width && adjacent(*shared, 1),
            "the shared expert's outputs must be [rows, width] with contiguous rows");
    from.shared = shared->data();
    from.shared_stride = shared->stride(0);
  }
  nb::gil_scoped_release release;
  fold_experts(isa, from, rows, width, to, num_threads);
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

std::int64_t route_scratch_py(const std::string& name, std::int64_t experts, std::int64_t width, std::int64_t rows,
                              int num_threads) {
  require_call(rows, num_threads);
  const Isa& isa = isa_named(name);
  return route_scratch_bytes(isa, shape_of(isa, false, experts, width).layout, rows, num_threads);
}

}  // namespace

void bind_experts(nb::module_& m) {
  m.def("experts_scratch_bytes", &experts_scratch_py, nb::arg("isa"), nb::arg("bf16"), nb::arg("width"),
        nb::arg("inner"), nb::arg("shared_inner"), nb::arg("num_experts"), nb::arg("k"), nb::arg("rows"),
        nb::arg("num_threads"));
  m.def("route_scratch_bytes", &route_scratch_py, nb::arg("isa"), nb::arg("experts"), nb::arg("width"),
        nb::arg("rows"), nb::arg("num_threads"));
  m.def("experts", &experts_py, nb::arg("weights"), nb::arg("shared").none(), nb::arg("ids").noconvert(),
        nb::arg("factors").noconvert(), nb::arg("x").noconvert(), nb::arg("out").noconvert(), nb::arg("num_threads"));
  m.def("fold_experts", &fold_experts_py, nb::arg("isa"), nb::arg("outputs").noconvert(), nb::arg("slots").noconvert(),
        nb::arg("factors").noconvert(), nb::arg("shared").noconvert().none(), nb::arg("out").noconvert(),
        nb::arg("num_threads"));
  m.def("route", &route_py, nb::arg("router"), nb::arg("bias").noconvert().none(), nb::arg("scoring"),
        nb::arg("group_value"), nb::arg("groups"), nb::arg("kept_groups"), nb::arg("normalise"), nb::arg("scale"),
        nb::arg("x").noconvert(), nb::arg("ids").noconvert(), nb::arg("weights").noconvert(), nb::arg("num_threads"));
}

}  // namespace longfill
