#include "matmul.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "narrow.h"
#include "threads.h"

namespace longfill {
namespace {

constexpr std::int64_t kHeadRows = 192;      // rows of one head that a task takes
constexpr std::int64_t kBlockBytes = 6 << 20;  // of packed rows: they come from L3, once a panel
constexpr std::int64_t kPackRows = 16;       // rows that a task packs
constexpr std::int64_t kPackAhead = 8 << 10;  // bytes between what is packed and what is fetched meanwhile
constexpr std::int64_t kTasksPerThread = 4;  // so that the threads end together
constexpr std::int64_t kMinPartRows = 48;    // below it a panel is better not read twice
constexpr std::int64_t kLoneRows = 2;        // up to so many, the machine fetches ahead well enough by itself
constexpr std::int64_t kFewRows = 16;        // up to so many, tile_few_rows
constexpr std::int64_t kRunSteps = 16;       // of those
constexpr std::int64_t kAhead = 8 << 10;     // bytes
constexpr std::int64_t kMaxLanes = 16;
// Of weights read once, and of multiply-adds eight at the time of one weight: about 10 us.
constexpr std::int64_t kWorkPerThread = 128 << 10;

void pack_row(const Isa& isa, int depth, const char* from, Element element, std::int64_t n, char* to) {
  const Element wanted = depth == 2 ? Element::kBfloat16 : Element::kFloat32;
  if (element == wanted) {
    std::memcpy(to, from, static_cast<std::size_t>(n * bytes_of(element)));
  } else if (element == Element::kBfloat16) {
    isa.linear.widen(reinterpret_cast<const std::uint16_t*>(from), n, reinterpret_cast<float*>(to));
  } else {
    isa.linear.narrow(reinterpret_cast<const float*>(from), n, reinterpret_cast<std::uint16_t*>(to));
  }
  if (n % depth != 0) std::memset(to + n * 2, 0, 2);
}

// The end of the steps from `first` on that share their scales, at most `last`. A pair across two blocks is alone.
std::int64_t end_of_run(const PackedMatrix& m, std::int64_t first, std::int64_t last) {
  const std::int64_t depth = m.layout.depth;
  const std::int64_t block_end = (first * depth / m.block_k + 1) * m.block_k;
  return std::min(last, std::max(first + 1, block_end / depth));
}

bool in_one_block(const PackedMatrix& m, std::int64_t first_output, std::int64_t count) {
  return first_output / m.block_n == std::min(first_output + count - 1, m.layout.n - 1) / m.block_n;
}

// Scales of one input and `lanes` outputs; those past the last get its scale.
void fill_scales(const PackedMatrix& m, std::int64_t first_output, std::int64_t input, float* scales) {
  const Layout& l = m.layout;
  const float* const of_input = m.scale + std::min(input, l.k - 1) / m.block_k;
  const bool one_block = in_one_block(m, first_output, l.lanes);
  for (int lane = 0; lane < l.lanes; ++lane) {
    const std::int64_t output = one_block ? first_output : std::min(first_output + lane, l.n - 1);
    scales[lane] = lane > 0 && one_block ? scales[0] : of_input[output / m.block_n * m.scale_stride];
  }
}

void decode_fp8(const Isa& isa, const PackedMatrix& m, std::int64_t panel, std::int64_t first, std::int64_t last,
                const char* from, char* to) {
  const Layout& l = m.layout;
  const std::int64_t column = panel * l.panel_columns();
  const int vectors = l.vectors(panel);
  // Where the vectors of a panel share their scales, they are decoded as one stream.
  const int together = in_one_block(m, column, l.columns(panel)) ? vectors : 1;
  const std::int64_t out_bytes = l.lanes * 4;
  float scales[2][kMaxLanes];
  DecodeArgs args;
  args.value_stride = vectors / together * l.vector_bytes();
  args.out_stride = vectors / together * out_bytes;
  args.round_bf16 = m.round_bf16;
  args.scales[0] = scales[0];
  args.scales[1] = scales[1];
  const auto decode = l.depth == 2 ? isa.linear.decode_to_bf16 : isa.linear.decode_to_fp32;
  for (std::int64_t step = first, end; step < last; step = end) {
    end = end_of_run(m, step, last);
    args.steps = (end - step) * together;
    const std::int64_t last_input = step * l.depth + l.depth - 1;
    for (int v = 0; v < vectors; v += together) {
      const std::int64_t output = column + v * l.lanes;
      const std::int64_t vector = (step - first) * vectors + v;
      fill_scales(m, output, step * l.depth, scales[0]);
      fill_scales(m, output, last_input, scales[1]);
      args.one_scale = in_one_block(m, output, l.lanes) && step * l.depth / m.block_k == last_input / m.block_k;
      args.values = reinterpret_cast<const std::uint8_t*>(from + vector * l.vector_bytes());
      args.out = to + vector * out_bytes;
      decode(args);
    }
  }
}

// Steps [first, last) of a panel as the tiles read them: where they lie, or decoded.
const char* readable_slice(const Isa& isa, const PackedMatrix& m, std::int64_t panel, std::int64_t first,
                           std::int64_t last, char* decoded) {
  const Layout& l = m.layout;
  const std::int64_t step_bytes = l.vectors(panel) * l.vector_bytes();
  const char* const from = m.data + l.panel_offset(panel) + first * step_bytes;
  if (l.item_bytes * l.depth == 4) return from;
  if (l.format == Format::kFp8) {
    decode_fp8(isa, m, panel, first, last, from, decoded);
  } else {
    isa.linear.widen(reinterpret_cast<const std::uint16_t*>(from), (last - first) * step_bytes / 2,
                     reinterpret_cast<float*>(decoded));
  }
  return decoded;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The tiles of a few rows take less time than their weights take to arrive: they go in short runs of steps, each asking
// for what lies kAhead bytes further on.
void tile_few_rows(void (*tile)(const TileArgs&), TileArgs args, std::int64_t vector_bytes) {
  const std::int64_t step_bytes = args.vectors * vector_bytes;
  for (std::int64_t left = args.steps; left > 0; left -= kRunSteps) {
    args.steps = std::min(left, kRunSteps);
    const char* const end = args.b + args.steps * step_bytes;
    for (const char* line = args.b; line < end; line += kCacheLine) __builtin_prefetch(line + kAhead);
    tile(args);
    args.a += args.steps * 4;
    args.b = end;
    args.accumulate = true;
  }
}

}  // namespace

PackedRows::PackedRows(Carver& carver, const Layout& weights, std::int64_t rows_)
    : rows(rows_),
      slice_steps(std::min(weights.steps(), kSliceSteps)),
      slices(ceil_div(weights.steps(), kSliceSteps)) {
  data = carver.take<char>(slices * rows * row_bytes());
}

PanelRoom::PanelRoom(Carver& carver, const Isa& isa, std::int64_t rows) {
  const std::int64_t columns = static_cast<std::int64_t>(isa.tile_lanes) * isa.tile_vectors;
  sums = carver.take<float>(rows * columns);
  decoded = carver.take<char>(kSliceSteps * columns * 4);
}

std::int64_t block_rows(const Layout& weights, std::int64_t rows) {
  const std::int64_t fitting = kBlockBytes / (4 * weights.steps()) / kMinPartRows * kMinPartRows;
  return std::min(rows, std::clamp(fitting, kMinPartRows, kBlockRows));
}

void pack_slice(const Isa& isa, const Layout& weights, const char* row, Element element, std::int64_t slice, char* to) {
  const std::int64_t values = kSliceSteps * weights.depth;
  const std::int64_t at = slice * values;
  pack_row(isa, weights.depth, row + at * bytes_of(element), element, std::min(values, weights.k - at), to);
}

void pack_rows(const Isa& isa, const Layout& weights, const Activations& from, std::int64_t first, std::int64_t count,
               const PackedRows& to, std::int64_t to_row) {
  const auto row_at = [&](std::int64_t r) {
    return from.data + (from.index == nullptr ? first + r : from.index[first + r]) * from.stride;
  };
  const std::int64_t row_bytes = weights.k * bytes_of(from.element);
  const std::int64_t ahead = std::clamp<std::int64_t>(kPackAhead / row_bytes, 1, kPackRows);
  for (std::int64_t r = 0; r < count; ++r) {
    const char* const next = row_at(std::min(r + ahead, count - 1));
    for (std::int64_t byte = 0; byte < row_bytes; byte += kCacheLine) __builtin_prefetch(next + byte);
    for (std::int64_t slice = 0; slice < to.slices; ++slice)
      pack_slice(isa, weights, row_at(r), from.element, slice, to.at(slice, to_row + r));
  }
}

void pack_block(const Isa& isa, const Layout& weights, const Activations& from, std::int64_t first, std::int64_t count,
                const PackedRows& to, int num_threads) {
  for_tasks(num_threads, ceil_div(count, kPackRows), [&](std::int64_t task, int) {
    const std::int64_t row = task * kPackRows;
    pack_rows(isa, weights, from, first + row, std::min(kPackRows, count - row), to, row);
  });
}

Fetch start_of_panel(const PackedMatrix& matrix, std::int64_t panel) {
  const Layout& l = matrix.layout;
  if (panel >= l.panels()) return {};
  const std::int64_t steps = std::min(l.steps(), kSliceSteps);
  return {matrix.data + l.panel_offset(panel), steps * l.vectors(panel) * l.vector_bytes()};
}

void multiply_panel(const Isa& isa, const PackedMatrix& matrix, std::int64_t panel, const PackedRows& rows,
                    std::int64_t first, std::int64_t count, const PanelRoom& room, const Fetch& next,
                    const Finish& finish) {
  const Layout& l = matrix.layout;
  const auto tile = l.depth == 2 ? isa.tile_bf16 : isa.tile_fp32;
  const std::int64_t step_bytes = l.vectors(panel) * l.vector_bytes();
  TileArgs args;
  args.a_stride = rows.row_bytes();
  args.c_stride = l.panel_columns();
  args.vectors = l.vectors(panel);
  for (std::int64_t slice = 0; slice < rows.slices; ++slice) {
    const std::int64_t step = slice * kSliceSteps;
    const std::int64_t end = std::min(step + kSliceSteps, l.steps());
    const bool last = slice + 1 == rows.slices;
    args.b = readable_slice(isa, matrix, panel, step, end, room.decoded);
    args.steps = end - step;
    args.accumulate = slice > 0;
    if (count <= kFewRows) {
      args.a = rows.at(slice, first);
      args.c = room.sums;
      args.rows = static_cast<int>(count);
      if (count > kLoneRows && args.b != room.decoded) {
        tile_few_rows(tile, args, l.vector_bytes());
      } else {
        tile(args);
      }
      if (last) finish(0, count);
      continue;
    }
    Fetch later = next;
    if (!last) later = {matrix.data + l.panel_offset(panel) + end * step_bytes,
                        std::min(kSliceSteps, l.steps() - end) * step_bytes};
    const std::int64_t share = ceil_div(ceil_div(later.bytes, count / isa.tile_rows), kCacheLine) * kCacheLine;
    for (std::int64_t r = 0, group; r < count; r += group) {
      group = group_rows(count - r, isa.tile_rows);
      args.rows = static_cast<int>(group);
      args.a = rows.at(slice, first + r);
      args.c = room.sums + r * args.c_stride;
      const std::int64_t ahead = r + group < count ? r + group : 0;
      const std::int64_t ahead_rows = std::min(count - ahead, group);
      const std::int64_t ahead_slice = ahead > 0 ? slice : last ? 0 : slice + 1;
      args.next_rows = {rows.at(ahead_slice, first + ahead), ahead_rows * args.a_stride};
      args.next_sums = {reinterpret_cast<const char*>(room.sums + ahead * args.c_stride),
                        ahead_rows * args.c_stride * static_cast<std::int64_t>(sizeof(float))};
      args.later = {later.from, std::min(share, later.bytes)};
      later.from += args.later.bytes;
      later.bytes -= args.later.bytes;
      tile(args);
      if (last) finish(r, group);
    }
  }
}

void store_row(const Isa& isa, const float* values, std::int64_t n, Element element, char* out) {
  if (element == Element::kFloat32) {
    std::memcpy(out, values, static_cast<std::size_t>(n) * sizeof(float));
  } else {
    isa.linear.narrow(values, n, reinterpret_cast<std::uint16_t*>(out));
  }
}

void store_panel(const Isa& isa, const PackedMatrix& matrix, std::int64_t panel, float* sums, std::int64_t count,
                 const Output& out, std::int64_t first_row) {
  const std::int64_t column = panel * matrix.layout.panel_columns();
  const std::int64_t columns = matrix.layout.columns(panel);
  const std::int64_t bytes = columns * bytes_of(out.element);
  char* to = out.data + first_row * out.stride + column * bytes_of(out.element);
  for (std::int64_t r = 0; r < count; ++r, to += out.stride) {
    float* const row = sums + r * matrix.layout.panel_columns();
    if (matrix.bias != nullptr) isa.linear.add_scaled(matrix.bias + column, 1.0f, columns, row);
    store_row(isa, row, columns, out.element, to);
    // The rows of the next group, which are stored after its products. Past the last row it does no harm.
    const char* const later = to + count * out.stride;
    for (std::int64_t byte = 0; byte < bytes; byte += kCacheLine) __builtin_prefetch(later + byte, 1);
  }
}

void for_panels(const Layout& weights, std::int64_t rows, int num_threads,
                const std::function<void(const PanelTask&)>& work) {
  const std::int64_t panels = weights.panels();
  std::int64_t parts = num_threads == 1 ? 1 : ceil_div(kTasksPerThread * num_threads, panels);
  parts = std::clamp<std::int64_t>(parts, 1, ceil_div(rows, kMinPartRows));
  const std::int64_t part_rows = ceil_div(ceil_div(rows, parts), kMinPartRows) * kMinPartRows;
  parts = ceil_div(rows, part_rows);
  for_tasks(num_threads, panels * parts, [&](std::int64_t task, int thread) {
    const std::int64_t first = task % parts * part_rows;
    work({task / parts, (task + num_threads) / parts, first, std::min(part_rows, rows - first), thread});
  });
}

int useful_threads(std::int64_t rows, std::int64_t n, std::int64_t k, int num_threads) {
  const std::int64_t work = n * k * (1 + rows / 8);
  return static_cast<int>(std::clamp<std::int64_t>(work / kWorkPerThread, 1, num_threads));
}

namespace {

struct LinearMemory {
  PackedRows packed;
  std::vector<PanelRoom> rooms;

  LinearMemory(Carver& carver, const Isa& isa, const Layout& weights, std::int64_t rows, int num_threads)
      : packed(carver, weights, rows) {
    for (int t = 0; t < num_threads; ++t) rooms.emplace_back(carver, isa, rows);
  }
};

// A panel of rows [first_row, first_row + count).
void multiply_and_store(const Isa& isa, const PackedMatrix& m, std::int64_t panel, const PackedRows& packed,
                        std::int64_t first_packed, std::int64_t count, const PanelRoom& room, const Fetch& next,
                        const Output& out, std::int64_t first_row) {
  multiply_panel(isa, m, panel, packed, first_packed, count, room, next, [&](std::int64_t r, std::int64_t rows) {
    store_panel(isa, m, panel, room.sums + r * m.layout.panel_columns(), rows, out, first_row + r);
  });
}

}  // namespace

void linear(const Isa& isa, const PackedMatrix& matrix, const Activations& x, std::int64_t rows, const Output& out,
            int num_threads) {
  const Layout& l = matrix.layout;
  if (is_narrow(l) && rows > kFewRows) return linear_narrow(isa, matrix, x, rows, out, num_threads);
  const std::int64_t together = block_rows(l, rows);
  const int threads = useful_threads(together, l.n, l.k, num_threads);
  Carver measure(nullptr);
  LinearMemory(measure, isa, l, together, threads);
  const KeptBytes bytes(measure.used());
  Carver carver(bytes.get());
  const LinearMemory memory(carver, isa, l, together, threads);
  for_blocks(rows, together, [&](std::int64_t first, std::int64_t count) {
    pack_block(isa, l, x, first, count, memory.packed, threads);
    for_panels(l, count, threads, [&](const PanelTask& task) {
      multiply_and_store(isa, matrix, task.panel, memory.packed, task.first_row, task.rows, memory.rooms[task.thread],
                         start_of_panel(matrix, task.next_panel), out, first + task.first_row);
    });
  });
}

std::int64_t linear_scratch_bytes(const Isa& isa, const Layout& weights, std::int64_t rows, int num_threads) {
  Carver measure(nullptr);
  LinearMemory(measure, isa, weights, block_rows(weights, rows), num_threads);
  const auto bytes = static_cast<std::int64_t>(measure.used());
  return is_narrow(weights) ? std::max(bytes, narrow_scratch_bytes(weights, rows, num_threads)) : bytes;
}

namespace {

struct HeadsMemory {
  std::vector<LinearMemory> threads;

  HeadsMemory(Carver& carver, const Isa& isa, const Layout& weights, std::int64_t rows, int num_threads) {
    for (int t = 0; t < num_threads; ++t) threads.emplace_back(carver, isa, weights, std::min(rows, kHeadRows), 1);
  }
};

}  // namespace

void per_head(const Isa& isa, const PackedMatrix& first_head, const Heads& heads, const Activations& x,
              std::int64_t rows, const Output& out, int num_threads) {
  const Layout& l = first_head.layout;
  const int threads = useful_threads(rows, l.n * heads.count, l.k, num_threads);
  Carver measure(nullptr);
  HeadsMemory(measure, isa, l, rows, threads);
  const KeptBytes bytes(measure.used());
  Carver carver(bytes.get());
  const HeadsMemory memory(carver, isa, l, rows, threads);
  const std::int64_t blocks = ceil_div(rows, kHeadRows);
  for_tasks(threads, heads.count * blocks, [&](std::int64_t task, int thread) {
    const LinearMemory& own = memory.threads[thread];
    const PanelRoom& room = own.rooms.front();
    const std::int64_t head = task / blocks;
    const std::int64_t first = task % blocks * kHeadRows;
    const std::int64_t count = std::min(kHeadRows, rows - first);
    PackedMatrix matrix = first_head;
    matrix.data += head * heads.head_bytes;
    const Activations from{x.data + head * heads.x_head_stride, x.stride, x.element};
    const Output to{out.data + head * heads.out_head_stride, out.stride, out.element};
    pack_rows(isa, l, from, first, count, own.packed, 0);
    for (std::int64_t panel = 0; panel < l.panels(); ++panel) {
      multiply_and_store(isa, matrix, panel, own.packed, 0, count, room, start_of_panel(matrix, panel + 1), to, first);
    }
  });
}

std::int64_t per_head_scratch_bytes(const Isa& isa, const Layout& weights, std::int64_t rows, int num_threads) {
  Carver measure(nullptr);
  HeadsMemory(measure, isa, weights, rows, num_threads);
  return static_cast<std::int64_t>(measure.used());
}

}  // namespace longfill
