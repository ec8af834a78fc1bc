#include "narrow.h"

#include <algorithm>
#include <vector>

#include "threads.h"

namespace longfill {
namespace {

constexpr std::int64_t kMostPanels = 4;
constexpr std::int64_t kMostRows = 96;   // of a part: a slice of them and their sums stay in L2 beside the weights
constexpr std::int64_t kLeastRows = 24;  // of a part, which reads all weights

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t slice_bytes(const Layout& l) { return 4 * std::min(l.steps(), kSliceSteps); }

// A slice of a part's rows, and its sums: panel after panel, each row after row.
struct PartMemory {
  char* packed;
  float* sums;

  PartMemory(Carver& carver, const Layout& l, std::int64_t rows)
      : packed(carver.take<char>(rows * slice_bytes(l))),
        sums(carver.take<float>(rows * l.panels() * l.panel_columns())) {}
};

// As many parts as threads, or a multiple of it.
std::int64_t parts_of(std::int64_t rows, int num_threads) {
  const std::int64_t rounds = ceil_div(ceil_div(rows, kMostRows), num_threads);
  return std::clamp<std::int64_t>(rounds * num_threads, 1, std::max<std::int64_t>(1, rows / kLeastRows));
}

std::size_t carve(Carver& carver, const Layout& l, std::int64_t rows, int num_threads,
                  std::vector<PartMemory>* threads) {
  for (int t = 0; t < num_threads; ++t) {
    const PartMemory memory(carver, l, std::min(rows, kMostRows));
    if (threads != nullptr) threads->push_back(memory);
  }
  return carver.used();
}

class Part {
 public:
  Part(const Isa& isa, const PackedMatrix& matrix, const Activations& x, std::int64_t first, std::int64_t count,
       const Output& out, const PartMemory& memory)
      : isa_(isa), m_(matrix), l_(matrix.layout), x_(x), first_(first), count_(count), out_(out), memory_(memory) {}

  void multiply() const {
    const std::int64_t slices = ceil_div(l_.steps(), kSliceSteps);
    for (std::int64_t slice = 0; slice < slices; ++slice)
      for (std::int64_t panel = 0; panel < l_.panels(); ++panel) multiply_slice(panel, slice, slice + 1 == slices);
  }

 private:
  Fetch weights(std::int64_t panel, std::int64_t slice) const {
    const std::int64_t step_bytes = l_.vectors(panel) * l_.vector_bytes();
    const std::int64_t step = slice * kSliceSteps;
    return {m_.data + l_.panel_offset(panel) + step * step_bytes,
            std::min(kSliceSteps, l_.steps() - step) * step_bytes};
  }

  void pack(std::int64_t first, std::int64_t count, std::int64_t slice) const {
    const std::int64_t bytes = kSliceSteps * l_.depth * bytes_of(x_.element);
    const std::int64_t row_bytes = l_.k * bytes_of(x_.element);
    for (std::int64_t r = first; r < first + count; ++r) {
      const char* const row = x_.data + (first_ + r) * x_.stride;
      pack_slice(isa_, l_, row, x_.element, slice, memory_.packed + r * slice_bytes(l_));
      const std::int64_t end = std::min(row_bytes, (slice + 2) * bytes);
      for (std::int64_t at = (slice + 1) * bytes; at < end; at += kCacheLine) __builtin_prefetch(row + at, 0, 2);
    }
  }

  void multiply_slice(std::int64_t panel, std::int64_t slice, bool last) const {
    const auto tile = l_.depth == 2 ? isa_.tile_bf16 : isa_.tile_fp32;
    const bool last_panel = panel + 1 == l_.panels();
    float* const sums = memory_.sums + panel * count_ * l_.panel_columns();
    Fetch later = last_panel ? weights(0, last ? 0 : slice + 1) : weights(panel + 1, slice);
    const std::int64_t groups = ceil_div(count_, isa_.tile_rows);
    const std::int64_t share = ceil_div(ceil_div(later.bytes, groups), kCacheLine) * kCacheLine;
    TileArgs args;
    args.a_stride = slice_bytes(l_);
    args.b = weights(panel, slice).from;
    args.c_stride = l_.panel_columns();
    args.steps = std::min(kSliceSteps, l_.steps() - slice * kSliceSteps);
    args.vectors = l_.vectors(panel);
    args.accumulate = slice > 0;
    for (std::int64_t r = 0, group; r < count_; r += group) {
      group = group_rows(count_ - r, isa_.tile_rows);
      if (panel == 0) pack(r, group, slice);
      args.rows = static_cast<int>(group);
      args.a = memory_.packed + r * args.a_stride;
      args.c = sums + r * args.c_stride;
      args.next_rows = {args.a + group * args.a_stride, group * args.a_stride};
      args.next_sums = {reinterpret_cast<const char*>(args.c + group * args.c_stride), group * args.c_stride * 4};
      args.later = {later.from, std::min(share, later.bytes)};
      later.from += args.later.bytes;
      later.bytes -= args.later.bytes;
      tile(args);
      if (last) store_panel(isa_, m_, panel, args.c, group, out_, first_ + r);
    }
  }

  const Isa& isa_;
  const PackedMatrix& m_;
  const Layout& l_;
  const Activations& x_;
  const std::int64_t first_;
  const std::int64_t count_;
  const Output& out_;
  const PartMemory& memory_;
};

}  // namespace

bool is_narrow(const Layout& weights) {
  return weights.panels() <= kMostPanels && weights.item_bytes * weights.depth == 4;
}

void linear_narrow(const Isa& isa, const PackedMatrix& matrix, const Activations& x, std::int64_t rows,
                   const Output& out, int num_threads) {
  const Layout& l = matrix.layout;
  const std::int64_t parts = parts_of(rows, useful_threads(rows, l.n, l.k, num_threads));
  const int threads = static_cast<int>(std::min<std::int64_t>(parts, num_threads));
  Carver measure(nullptr);
  const KeptBytes bytes(carve(measure, l, rows, threads, nullptr));
  Carver carver(bytes.get());
  std::vector<PartMemory> memory;
  carve(carver, l, rows, threads, &memory);
  for_tasks(threads, parts, [&](std::int64_t task, int thread) {
    const std::int64_t first = rows * task / parts;
    const std::int64_t count = rows * (task + 1) / parts - first;
    Part(isa, matrix, x, first, count, out, memory[static_cast<std::size_t>(thread)]).multiply();
  });
}

std::int64_t narrow_scratch_bytes(const Layout& weights, std::int64_t rows, int num_threads) {
  Carver measure(nullptr);
  return static_cast<std::int64_t>(carve(measure, weights, rows, num_threads, nullptr));
}

}  // namespace longfill
