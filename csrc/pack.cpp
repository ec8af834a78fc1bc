#include "pack.h"

#include <algorithm>
#include <cstring>

#include "convert.h"
#include "e4m3.h"
#include "threads.h"

namespace longfill {
namespace {

constexpr std::int64_t kSteps = 32;  // of a column, read together: a cache line or more

template <class Item, int DEPTH>
void pack_panel(const Layout& l, std::int64_t panel, const char* data, std::int64_t n_stride, std::int64_t k_stride,
                char* out) {
  const std::int64_t step_columns = static_cast<std::int64_t>(l.vectors(panel)) * l.lanes;
  const std::int64_t columns = l.columns(panel);
  const std::int64_t panel_bytes = l.steps() * l.vectors(panel) * l.vector_bytes();
  const std::int64_t whole_steps = l.k / DEPTH;
  Item* const to = reinterpret_cast<Item*>(out + l.panel_offset(panel));
  if (columns < step_columns || whole_steps < l.steps()) std::memset(to, 0, static_cast<std::size_t>(panel_bytes));
  const auto copy = [&](std::int64_t column, std::int64_t step, int inputs) {
    const char* const from = data + (panel * l.panel_columns() + column) * n_stride + step * DEPTH * k_stride;
    Item* const at = to + (step * step_columns + column) * DEPTH;
    for (int d = 0; d < inputs; ++d) std::memcpy(at + d, from + d * k_stride, sizeof(Item));
  };
  for (std::int64_t first = 0; first < whole_steps; first += kSteps) {
    const std::int64_t last = std::min(first + kSteps, whole_steps);
    for (std::int64_t column = 0; column < columns; ++column)
      for (std::int64_t step = first; step < last; ++step) copy(column, step, DEPTH);
  }
  if (whole_steps == l.steps()) return;
  for (std::int64_t column = 0; column < columns; ++column) copy(column, whole_steps, 1);
}

template <class Item>
auto pack_panel_of(int depth) {
  return depth == 2 ? pack_panel<Item, 2> : pack_panel<Item, 1>;
}

float value_at(const PackedMatrix& m, std::int64_t o, std::int64_t i) {
  const Layout& l = m.layout;
  const std::int64_t panel = o / l.panel_columns();
  const std::int64_t step_columns = static_cast<std::int64_t>(l.vectors(panel)) * l.lanes;
  const std::int64_t at = (i / l.depth * step_columns + o % l.panel_columns()) * l.depth + i % l.depth;
  const char* const from = m.data + l.panel_offset(panel) + at * l.item_bytes;
  if (l.format == Format::kFloat32) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  if (l.format == Format::kBfloat16) {
    std::uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return from_bf16(bits);
  }
  const float scale = m.scale[o / m.block_n * m.scale_stride + i / m.block_k];
  const float value = e4m3.as_float[static_cast<std::uint8_t>(*from)] * scale;
  return m.round_bf16 ? from_bf16(to_bf16(value)) : value;
}

}  // namespace

std::int64_t bytes_per_value(Format format) {
  return format == Format::kFloat32 ? 4 : format == Format::kBfloat16 ? 2 : 1;
}

Layout::Layout(const Isa& isa, Format format_, bool compute_bf16, std::int64_t n_, std::int64_t k_)
    : format(format_),
      n(n_),
      k(k_),
      lanes(isa.tile_lanes),
      panel_vectors(isa.tile_vectors),
      depth(compute_bf16 && isa.tile_bf16 != nullptr ? 2 : 1),
      item_bytes(bytes_per_value(format_)) {}

std::int64_t Layout::columns(std::int64_t panel) const {
  return std::min(panel_columns(), n - panel * panel_columns());
}

int Layout::vectors(std::int64_t panel) const { return static_cast<int>((columns(panel) + lanes - 1) / lanes); }

void pack(const Layout& layout, const char* data, std::int64_t n_stride, std::int64_t k_stride, char* out,
          int num_threads) {
  const auto panel = layout.item_bytes == 4   ? pack_panel_of<std::uint32_t>(layout.depth)
                     : layout.item_bytes == 2 ? pack_panel_of<std::uint16_t>(layout.depth)
                                              : pack_panel_of<std::uint8_t>(layout.depth);
  for_tasks(num_threads, layout.panels(),
            [&](std::int64_t p, int) { panel(layout, p, data, n_stride, k_stride, out); });
}

void unpack(const PackedMatrix& matrix, std::int64_t first, std::int64_t last, float* out, int num_threads) {
  const std::int64_t k = matrix.layout.k;
  for_tasks(num_threads, last - first, [&](std::int64_t row, int) {
    for (std::int64_t i = 0; i < k; ++i) out[row * k + i] = value_at(matrix, first + row, i);
  });
}

}  // namespace longfill
