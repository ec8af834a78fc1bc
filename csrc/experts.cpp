#include "experts.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace longfill {
namespace {

constexpr std::int64_t kMaxPanelColumns = 64;
constexpr std::int64_t kFinishRows = 64;  // rows that a task clears or rounds
constexpr std::int64_t kFoldRows = 8;     // rows that a task folds

struct MlpMemory {
  PackedRows x;
  PackedRows inner;
  std::vector<PanelRoom> gates;
  std::vector<PanelRoom> ups;

  MlpMemory(Carver& carver, const Isa& isa, const Mlp& weights, std::int64_t rows, int num_threads)
      : x(carver, weights.gate->layout, rows), inner(carver, weights.down->layout, rows) {
    for (int t = 0; t < num_threads; ++t) {
      gates.emplace_back(carver, isa, rows);
      ups.emplace_back(carver, isa, rows);
    }
  }
};

std::int64_t rows_together(const Mlp& weights, std::int64_t rows) {
  return std::min(block_rows(weights.gate->layout, rows), block_rows(weights.down->layout, rows));
}

// The memory for blocks of so many rows.
std::size_t mlp_bytes(const Isa& isa, const Mlp& weights, std::int64_t rows, int num_threads) {
  Carver measure(nullptr);
  MlpMemory(measure, isa, weights, rows, num_threads);
  return measure.used();
}

// Outputs [column, column + n) of a row of the middle, rounded to the model's element, as the down projection reads it.
void store_inner(const Isa& isa, const Layout& down, Element element, const float* values, std::int64_t n,
                 std::int64_t column, const PackedRows& to, std::int64_t row) {
  // A panel lies within a slice: its columns divide the slice's values.
  const std::int64_t slice_values = kSliceSteps * down.depth;
  char* const out = to.at(column / slice_values, row) + column % slice_values * (4 / down.depth);
  if (down.depth == 2) {
    isa.linear.narrow(values, n, reinterpret_cast<std::uint16_t*>(out));
    if (column + n == down.k && down.k % 2 != 0) std::memset(out + 2 * n, 0, 2);
  } else if (element == Element::kBfloat16) {
    std::uint16_t rounded[kMaxPanelColumns];
    isa.linear.narrow(values, n, rounded);
    isa.linear.widen(rounded, n, reinterpret_cast<float*>(out));
  } else {
    std::memcpy(out, values, static_cast<std::size_t>(n) * sizeof(float));
  }
}

void add_bias(const Isa& isa, const PackedMatrix& m, std::int64_t column, std::int64_t columns, float* row) {
  if (m.bias != nullptr) isa.linear.add_scaled(m.bias + column, 1.0f, columns, row);
}

// silu(gate x) * up x of a block of rows, into memory.inner.
void multiply_inner(const Isa& isa, const Mlp& weights, const Activations& x, std::int64_t first, std::int64_t count,
                    const MlpMemory& memory, int num_threads) {
  const Layout& l = weights.gate->layout;
  pack_block(isa, l, x, first, count, memory.x, num_threads);
  for_panels(l, count, num_threads, [&](const PanelTask& task) {
    const PanelRoom& gate = memory.gates[task.thread];
    const PanelRoom& up = memory.ups[task.thread];
    const std::int64_t column = task.panel * l.panel_columns();
    const std::int64_t columns = l.columns(task.panel);
    multiply_panel(isa, *weights.gate, task.panel, memory.x, task.first_row, task.rows, gate,
                   start_of_panel(*weights.up, task.panel), [](std::int64_t, std::int64_t) {});
    const Fetch next = start_of_panel(*weights.gate, task.next_panel);
    const auto finish = [&](std::int64_t first_done, std::int64_t done) {
      for (std::int64_t r = first_done; r < first_done + done; ++r) {
        float* const gate_row = gate.sums + r * l.panel_columns();
        float* const up_row = up.sums + r * l.panel_columns();
        add_bias(isa, *weights.gate, column, columns, gate_row);
        add_bias(isa, *weights.up, column, columns, up_row);
        isa.linear.swiglu(gate_row, up_row, columns);
        store_inner(isa, weights.down->layout, x.element, gate_row, columns, column, memory.inner, task.first_row + r);
      }
    };
    multiply_panel(isa, *weights.up, task.panel, memory.x, task.first_row, task.rows, up, next, finish);
  });
}

// `use(row of the block, first column, columns, values)` for the down projection of the block in memory.inner.
template <class Use>
void multiply_down(const Isa& isa, const PackedMatrix& down, std::int64_t count, const MlpMemory& memory,
                   int num_threads, const Use& use) {
  const Layout& l = down.layout;
  for_panels(l, count, num_threads, [&](const PanelTask& task) {
    const PanelRoom& room = memory.gates[task.thread];
    const std::int64_t column = task.panel * l.panel_columns();
    const std::int64_t columns = l.columns(task.panel);
    multiply_panel(isa, down, task.panel, memory.inner, task.first_row, task.rows, room,
                   start_of_panel(down, task.next_panel), [&](std::int64_t first_done, std::int64_t done) {
                     for (std::int64_t r = first_done; r < first_done + done; ++r) {
                       float* const values = room.sums + r * l.panel_columns();
                       add_bias(isa, down, column, columns, values);
                       use(task.first_row + r, column, columns, values);
                     }
                   });
  });
}

int threads_for(const Mlp& weights, std::int64_t rows, int num_threads) {
  return useful_threads(rows, weights.gate->layout.n, weights.gate->layout.k, num_threads);
}

// The rows of every expert: those of expert e stand at [first[e], first[e + 1]), in ascending order.
struct Groups {
  std::int64_t* first;
  std::int64_t* rows;
  float* weights;

  Groups(Carver& carver, std::int64_t experts, std::int64_t entries)
      : first(carver.take<std::int64_t>(experts + 1)),
        rows(carver.take<std::int64_t>(entries)),
        weights(carver.take<float>(entries)) {}

  void fill(const Routes& routes, std::int64_t num_rows, std::int64_t experts) const {
    const std::int64_t entries = num_rows * routes.k;
    std::fill(first, first + experts + 1, 0);
    for (std::int64_t i = 0; i < entries; ++i) ++first[routes.ids[i]];
    for (std::int64_t e = 0, at = 0; e <= experts; ++e) {
      const std::int64_t count = e < experts ? first[e] : 0;
      first[e] = at;
      at += count;
    }
    for (std::int64_t i = 0; i < entries; ++i) {
      const std::int64_t at = first[routes.ids[i]]++;
      rows[at] = i / routes.k;
      weights[at] = routes.weights[i];
    }
    // Each start has moved to the next one's place.
    std::move_backward(first, first + experts, first + experts + 1);
    first[0] = 0;
  }
};

struct ExpertsMemory {
  Groups groups;
  float* total;
  char* block;

  ExpertsMemory(Carver& carver, std::int64_t experts, std::int64_t entries, std::int64_t values,
                std::size_t block_bytes)
      : groups(carver, experts, entries),
        total(carver.take<float>(values)),
        block(carver.take<char>(static_cast<std::int64_t>(block_bytes))) {}
};

// Adds one expert's outputs for the rows that x.index names, weighed.
void add_expert(const Isa& isa, const Mlp& weights, const Activations& x, const float* factors, std::int64_t rows,
                float* total, char* block, int num_threads) {
  if (rows == 0) return;
  const std::int64_t width = weights.down->layout.n;
  const std::int64_t together = rows_together(weights, rows);
  const int threads = threads_for(weights, together, num_threads);
  Carver carver(block);
  const MlpMemory memory(carver, isa, weights, together, threads);
  for_blocks(rows, together, [&](std::int64_t first, std::int64_t count) {
    multiply_inner(isa, weights, x, first, count, memory, threads);
    multiply_down(isa, *weights.down, count, memory, threads,
                  [&](std::int64_t r, std::int64_t column, std::int64_t columns, const float* values) {
                    const std::int64_t row = x.index == nullptr ? first + r : x.index[first + r];
                    const float factor = factors == nullptr ? 1.0f : factors[first + r];
                    isa.linear.add_scaled(values, factor, columns, total + row * width + column);
                  });
  });
}

}  // namespace

void mlp(const Isa& isa, const Mlp& weights, const Activations& x, std::int64_t rows, const Output& out,
         int num_threads) {
  const std::int64_t together = rows_together(weights, rows);
  const int threads = threads_for(weights, together, num_threads);
  const KeptBytes bytes(mlp_bytes(isa, weights, together, threads));
  Carver carver(bytes.get());
  const MlpMemory memory(carver, isa, weights, together, threads);
  for_blocks(rows, together, [&](std::int64_t first, std::int64_t count) {
    multiply_inner(isa, weights, x, first, count, memory, threads);
    multiply_down(isa, *weights.down, count, memory, threads,
                  [&](std::int64_t r, std::int64_t column, std::int64_t columns, const float* values) {
                    store_row(isa, values, columns, out.element,
                              out.data + (first + r) * out.stride + column * bytes_of(out.element));
                  });
  });
}

std::int64_t mlp_scratch_bytes(const Isa& isa, const Mlp& weights, std::int64_t rows, int num_threads) {
  return static_cast<std::int64_t>(mlp_bytes(isa, weights, rows_together(weights, rows), num_threads));
}

void experts(const Isa& isa, const std::vector<Mlp>& weights, const Mlp* shared, const Routes& routes,
             const Activations& x, std::int64_t rows, std::int64_t width, const Output& out, int num_threads) {
  const auto num_experts = static_cast<std::int64_t>(weights.size());
  const KeptBytes bytes(
      static_cast<std::size_t>(experts_scratch_bytes(isa, weights, shared, routes.k, rows, width, num_threads)));
  Carver carver(bytes.get());
  const ExpertsMemory memory(carver, num_experts, rows * routes.k, rows * width, 0);
  const Groups& groups = memory.groups;
  groups.fill(routes, rows, num_experts);
  const auto for_row_groups = [&](const auto& work) {
    for_tasks(num_threads, (rows + kFinishRows - 1) / kFinishRows, [&](std::int64_t task, int) {
      const std::int64_t first = task * kFinishRows;
      work(first, std::min(kFinishRows, rows - first));
    });
  };
  for_row_groups([&](std::int64_t first, std::int64_t count) {
    std::fill_n(memory.total + first * width, count * width, 0.0f);
  });
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const std::int64_t first = groups.first[e];
    const Activations taken{x.data, x.stride, x.element, groups.rows + first};
    add_expert(isa, weights[e], taken, groups.weights + first, groups.first[e + 1] - first, memory.total, memory.block,
               num_threads);
  }
  if (shared != nullptr) add_expert(isa, *shared, x, nullptr, rows, memory.total, memory.block, num_threads);
  for_row_groups([&](std::int64_t first, std::int64_t count) {
    for (std::int64_t r = first; r < first + count; ++r)
      store_row(isa, memory.total + r * width, width, out.element, out.data + r * out.stride);
  });
}

std::int64_t experts_scratch_bytes(const Isa& isa, const std::vector<Mlp>& weights, const Mlp* shared, std::int64_t k,
                                   std::int64_t rows, std::int64_t width, int num_threads) {
  const auto bytes_of_block = [&](const Mlp& block) {
    return mlp_bytes(isa, block, rows_together(block, rows), num_threads);
  };
  std::size_t block = shared == nullptr ? 0 : bytes_of_block(*shared);
  for (const Mlp& expert : weights) block = std::max(block, bytes_of_block(expert));
  Carver measure(nullptr);
  ExpertsMemory(measure, static_cast<std::int64_t>(weights.size()), rows * k, rows * width, block);
  return static_cast<std::int64_t>(measure.used());
}

void fold_experts(const Isa& isa, const ExpertOutputs& outputs, std::int64_t rows, std::int64_t width,
                  const Output& out, int num_threads) {
  Carver measure(nullptr);
  for (int t = 0; t < num_threads; ++t) measure.take<float>(width);
  const KeptBytes bytes(measure.used());
  Carver carver(bytes.get());
  std::vector<float*> totals;
  for (int t = 0; t < num_threads; ++t) totals.push_back(carver.take<float>(width));
  for_tasks(num_threads, (rows + kFoldRows - 1) / kFoldRows, [&](std::int64_t task, int thread) {
    float* const total = totals[static_cast<std::size_t>(thread)];
    const std::int64_t last = std::min(rows, (task + 1) * kFoldRows);
    for (std::int64_t r = task * kFoldRows; r < last; ++r) {
      std::fill_n(total, width, 0.0f);
      for (std::int64_t i = r * outputs.k; i < (r + 1) * outputs.k; ++i)
        isa.linear.add_scaled(outputs.values + outputs.slots[i] * outputs.stride, outputs.weights[i], width, total);
      if (outputs.shared != nullptr)
        isa.linear.add_scaled(outputs.shared + r * outputs.shared_stride, 1.0f, width, total);
      store_row(isa, total, width, out.element, out.data + r * out.stride);
    }
  });
}

}  // namespace longfill
