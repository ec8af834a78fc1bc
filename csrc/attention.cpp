// Blocks of keys against columns of (query, head) pairs, with a running softmax.
//
// Keys are the left side of the first product and columns its lanes: rows of the cache are used as they are decoded and
// only values are repacked, which matters because packing is repeated for every query of sparse attention.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attention_scratch.h"
#include "threads.h"

namespace longfill {
namespace {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kMostSparseRows = 16;  // of a task, one after the other: each asks for the next one's keys
constexpr std::int64_t kPackedTogether = 8;   // keys, a multiple of every depth

class Kernel {
 public:
  Kernel(const AttentionSteps& steps, const AttentionCall& call, const LatentRows& keys)
      : steps_(steps), call_(call), keys_(keys), widths_(steps, call.shape),
        width_(call.shape.rank + call.shape.rope_dim), row_bytes_(widths_.row_values * steps.value_bytes),
        weight_bytes_(kBlockKeys * steps.value_bytes) {}

  // Rows [first_row, first_row + rows) x heads [first_head, first_head + heads), one column each.
  struct Columns {
    std::int64_t first_row;
    std::int64_t rows;
    std::int64_t first_head;
    std::int64_t heads;
    std::int64_t count() const { return rows * heads; }
  };

  void start(const Columns& columns, Scratch& s) const {
    const std::int64_t padded = round_up(columns.count(), steps_.lanes);
    const char* queries[kMaxColumns] = {};
    for (std::int64_t c = 0; c < columns.count(); ++c)
      queries[c] = call_.queries.data + (columns.first_row + c / columns.heads) * call_.queries.row_stride +
                   (columns.first_head + c % columns.heads) * call_.queries.head_stride;
    steps_.pack_queries({queries, padded, width_, call_.queries.bf16, s.queries});
    std::fill(s.largest, s.largest + padded, kNoScore);
    std::fill(s.sums, s.sums + padded, 0.0f);
  }

  // Inlined by force: GCC takes a function that only prefetches for one without effects and drops the call.
  __attribute__((always_inline)) void prefetch_queries(std::int64_t row, const Columns& columns) const {
    const AttentionQueries& q = call_.queries;
    for (std::int64_t head = columns.first_head; head < columns.first_head + columns.heads; ++head) {
      const char* const values = q.data + row * q.row_stride + head * q.head_stride;
      for (std::int64_t at = 0; at < width_ * (q.bf16 ? 2 : 4); at += kCacheLine) __builtin_prefetch(values + at, 0, 2);
    }
  }

  // Attention of the columns to one block of keys. `seen[r]` keys of the block are visible to row r of the columns;
  // null where every row sees all of them.
  void add(const Columns& columns, const Block& block, const std::int64_t* seen, bool is_first, Prefetch& next,
           Scratch& s) const {
    decode(block, s);
    score(columns, block.count, next, s);
    hide(columns, block, seen, s);
    const std::int64_t padded = round_up(columns.count(), steps_.lanes);
    steps_.softmax({s.scores, padded, block.count, call_.scale, s.largest, s.sums, s.factors, s.weights,
                    weight_bytes_});
    std::int64_t first_row = 0;
    if (seen != nullptr) {
      while (seen[first_row] <= 0) ++first_row;
    }
    if (!is_first) {
      for (std::int64_t c = first_row * columns.heads; c < columns.count(); ++c)
        if (s.factors[c] != 1.0f)
          steps_.rescale(s.outputs + c * widths_.value_values, widths_.value_values, s.factors[c]);
    }
    if (seen == nullptr || hidden_are_finite(block.count, seen[first_row], s)) {
      weigh(first_row * columns.heads, columns.count(), block.count, !is_first, next, s);
      return;
    }
    // 0 x NaN would reach the rows that do not see it: take rows from the last on and clear what they do not see.
    std::int64_t cleared = block.count;
    for (std::int64_t r = columns.rows - 1; r >= first_row; --r) {
      clear(seen[r], cleared, s);
      cleared = std::min(cleared, seen[r]);
      weigh(r * columns.heads, (r + 1) * columns.heads, block.count, !is_first, next, s);
    }
  }

  // The first `empty_rows` rows have no keys.
  void finish(const Columns& columns, std::int64_t empty_rows, Scratch& s) const {
    const AttentionOutputs& out = call_.out;
    const std::int64_t rank = call_.shape.rank;
    for (std::int64_t c = 0; c < columns.count(); ++c) {
      const std::int64_t row = columns.first_row + c / columns.heads;
      const std::int64_t head = columns.first_head + c % columns.heads;
      char* const to = out.data + row * out.row_stride + head * out.head_stride;
      const bool any_keys = c / columns.heads >= empty_rows;
      if (any_keys) {
        steps_.finish(s.outputs + c * widths_.value_values, rank, 1.0f / s.sums[c], out.bf16, to);
      } else {
        std::memset(to, 0, static_cast<std::size_t>(rank) * (out.bf16 ? 2 : 4));
      }
      if (out.lse != nullptr)
        out.lse[row * out.lse_stride + head] = any_keys ? s.largest[c] * steps_.nats + std::log(s.sums[c]) : kNoScore;
    }
  }

  const LatentRows& keys() const { return keys_; }

 private:
  void decode(const Block& block, Scratch& s) const {
    const std::int64_t whole = round_up(block.count, steps_.depth);
    for (std::int64_t i = 0; i < whole; ++i) {
      char* const row = s.rows + i * row_bytes_;
      if (i < block.count && block.rows[i] != nullptr) {
        steps_.decode(keys_.layout(), block.rows[i], row);
      } else {
        std::memset(row, 0, static_cast<std::size_t>(row_bytes_));
      }
      // While the rows are still in the first cache.
      if ((i + 1) % kPackedTogether == 0) pack(i + 1 - kPackedTogether, i + 1, s);
    }
    pack(whole / kPackedTogether * kPackedTogether, whole, s);
  }

  void pack(std::int64_t first, std::int64_t last, Scratch& s) const {
    steps_.pack_values({s.rows, row_bytes_, first, last, widths_.value_values, s.values});
  }

  void score(const Columns& columns, std::int64_t keys, Prefetch& next, Scratch& s) const {
    const std::int64_t padded = round_up(columns.count(), steps_.lanes);
    const std::int64_t widest = static_cast<std::int64_t>(steps_.lanes) * steps_.vectors;
    const std::int64_t steps = width_ / steps_.depth;
    const char* tile = s.queries;
    for (std::int64_t c = 0; c < padded; c += widest) {
      const std::int64_t here = std::min(widest, padded - c);
      TileArgs args;
      args.a = s.rows;
      args.a_stride = row_bytes_;
      args.b = tile;
      args.c = s.scores + c;
      args.c_stride = padded;
      args.steps = steps;
      args.vectors = static_cast<int>(here / steps_.lanes);
      args.accumulate = false;
      args.rows = static_cast<int>(keys);
      steps_.tile(args, next);
      tile += width_ * here * steps_.value_bytes;
    }
  }

  void hide(const Columns& columns, const Block& block, const std::int64_t* seen, Scratch& s) const {
    const std::int64_t padded = round_up(columns.count(), steps_.lanes);
    if (block.missing > 0) {
      for (std::int64_t i = 0; i < block.count; ++i)
        if (block.rows[i] == nullptr) std::fill(s.scores + i * padded, s.scores + (i + 1) * padded, kNoScore);
    }
    if (seen == nullptr) return;
    for (std::int64_t r = 0; r < columns.rows; ++r) {
      for (std::int64_t i = std::max<std::int64_t>(0, seen[r]); i < block.count; ++i) {
        float* const hidden = s.scores + i * padded + r * columns.heads;
        std::fill(hidden, hidden + columns.heads, kNoScore);
      }
    }
  }

  // Outputs of columns [first, last) += weights x values.
  void weigh(std::int64_t first, std::int64_t last, std::int64_t keys, bool accumulate, Prefetch& next,
             Scratch& s) const {
    const std::int64_t widest = static_cast<std::int64_t>(steps_.lanes) * steps_.vectors;
    for (std::int64_t x = 0; x < widths_.value_values; x += widest) {
      const std::int64_t here = std::min(widest, widths_.value_values - x);
      TileArgs args;
      args.a = s.weights + first * weight_bytes_;
      args.a_stride = weight_bytes_;
      args.b = s.values + x * kBlockKeys * steps_.value_bytes;
      args.c = s.outputs + first * widths_.value_values + x;
      args.c_stride = widths_.value_values;
      args.steps = (keys + steps_.depth - 1) / steps_.depth;
      args.vectors = static_cast<int>(here / steps_.lanes);
      args.accumulate = accumulate;
      args.rows = static_cast<int>(last - first);
      steps_.tile(args, next);
    }
  }

  // Whether the values of keys [first, last) that some row does not see are all finite.
  bool hidden_are_finite(std::int64_t last, std::int64_t first, const Scratch& s) const {
    for (std::int64_t key = first; key < last; ++key) {
      const char* const row = s.rows + key * row_bytes_;
      bool finite = true;
      for (std::int64_t x = 0; x < call_.shape.rank; ++x) {
        // The exponent's bits of either type.
        std::uint16_t high;
        std::memcpy(&high, row + (x + 1) * steps_.value_bytes - 2, sizeof high);
        finite &= (high & 0x7f80) != 0x7f80;
      }
      if (!finite) return false;
    }
    return true;
  }

  void clear(std::int64_t first, std::int64_t last, Scratch& s) const {
    if (first >= last) return;
    std::memset(s.rows + first * row_bytes_, 0, static_cast<std::size_t>((last - first) * row_bytes_));
    pack(first / steps_.depth * steps_.depth, round_up(last, steps_.depth), s);
  }

  const AttentionSteps& steps_;
  const AttentionCall& call_;
  const LatentRows& keys_;
  Widths widths_;
  std::int64_t width_;
  std::int64_t row_bytes_;
  std::int64_t weight_bytes_;
};

// Entries [block * size, ...) of a row's selection.
void locate_selected(const Kernel& kernel, const std::int32_t* entries, std::int64_t k, std::int64_t first,
                     Block& block) {
  const std::int64_t most = std::min(kBlockKeys, k - first);
  block.count = 0;
  block.missing = 0;
  std::int64_t selected = 0;
  for (std::int64_t i = 0; i < most; ++i) {
    const std::int32_t position = entries[first + i];
    block.rows[i] = position < 0 ? nullptr : kernel.keys().at(position);
    if (position < 0) continue;
    block.count = i + 1;
    ++selected;
  }
  block.missing = block.count - selected;
}

void locate_range(const Kernel& kernel, std::int64_t first, std::int64_t last, Block& block) {
  block.count = std::max<std::int64_t>(0, std::min(kBlockKeys, last - first));
  block.missing = 0;
  for (std::int64_t i = 0; i < block.count; ++i) block.rows[i] = kernel.keys().at(first + i);
}

// Rows x heads in pieces: enough of them for the threads, none with more than kMaxColumns columns.
struct Cut {
  std::int64_t heads;  // of a piece
  std::int64_t head_pieces;

  Cut(const AttentionSteps& steps, std::int64_t num_rows, std::int64_t num_heads, int num_threads) {
    const std::int64_t wanted = std::max<std::int64_t>((num_heads + kMaxColumns - 1) / kMaxColumns,
                                                       num_rows < num_threads ? num_threads : 1);
    heads = std::min(kMaxColumns, round_up((num_heads + wanted - 1) / wanted, steps.lanes));
    heads = std::min(heads, num_heads);
    head_pieces = (num_heads + heads - 1) / heads;
  }
};

const AttentionSteps& steps_of(const Isa& isa, bool bf16) { return bf16 ? *isa.attention_bf16 : *isa.attention_fp32; }

// Runs work(task, scratch) for every task.
template <class Work>
void for_pieces(const AttentionSteps& steps, const AttentionShape& shape, std::int64_t tasks, int num_threads,
                const Work& work) {
  num_threads = static_cast<int>(std::min<std::int64_t>(num_threads, std::max<std::int64_t>(tasks, 1)));
  Carver measure(nullptr);
  for (int t = 0; t < num_threads; ++t) Scratch(measure, steps, shape);
  const Bytes bytes = allocate(measure.used());
  Carver carver(bytes.get());
  std::vector<Scratch> scratch;
  for (int t = 0; t < num_threads; ++t) scratch.emplace_back(carver, steps, shape);
  for_tasks(num_threads, tasks, [&](std::int64_t task, int thread) { work(task, scratch[thread]); });
}

}  // namespace

bool computes_in_bf16(const Isa& isa, bool bf16_queries, LatentFormat format) {
  return bf16_queries && format != LatentFormat::kFloat32 && isa.attention_bf16 != nullptr;
}

void sparse_mla(const Isa& isa, const AttentionCall& call, const LatentRows& keys, const SelectedKeys& selected,
                int num_threads) {
  const AttentionSteps& steps = steps_of(isa, call.bf16);
  const Kernel kernel(steps, call, keys);
  const Cut cut(steps, call.num_rows, call.shape.heads, num_threads);
  const std::int64_t rows_together = std::clamp<std::int64_t>(call.num_rows / (4 * num_threads), 1, kMostSparseRows);
  const std::int64_t row_pieces = (call.num_rows + rows_together - 1) / rows_together;
  for_pieces(steps, call.shape, row_pieces * cut.head_pieces, num_threads, [&](std::int64_t task, Scratch& s) {
    const std::int64_t first_head = task % cut.head_pieces * cut.heads;
    const std::int64_t heads = std::min(cut.heads, call.shape.heads - first_head);
    const std::int64_t first_row = task / cut.head_pieces * rows_together;
    const std::int64_t last_row = std::min(first_row + rows_together, call.num_rows);
    Block blocks[2];
    int now = 0;
    const auto locate = [&](std::int64_t row, std::int64_t entry, Block& block) {
      block.count = 0;
      if (row < last_row) locate_selected(kernel, selected.positions + row * selected.stride, selected.k, entry, block);
    };
    locate(first_row, 0, blocks[now]);
    for (std::int64_t row = first_row; row < last_row; ++row) {
      const Kernel::Columns columns{row, 1, first_head, heads};
      kernel.start(columns, s);
      if (row + 1 < last_row) kernel.prefetch_queries(row + 1, columns);
      bool is_first = true;
      for (std::int64_t entry = 0; entry < selected.k; entry += kBlockKeys, now ^= 1) {
        const std::int64_t next_entry = entry + kBlockKeys;
        const bool is_last = next_entry >= selected.k;
        locate(is_last ? row + 1 : row, is_last ? 0 : next_entry, blocks[now ^ 1]);
        if (blocks[now].count == 0) continue;
        Prefetch next(blocks[now ^ 1].rows, blocks[now ^ 1].count, keys.layout().row_bytes());
        kernel.add(columns, blocks[now], nullptr, is_first, next, s);
        is_first = false;
      }
      kernel.finish(columns, is_first ? 1 : 0, s);
    }
  });
}

void dense_mla(const Isa& isa, const AttentionCall& call, const LatentRows& keys, const std::int64_t* visible,
               int num_threads) {
  const AttentionSteps& steps = steps_of(isa, call.bf16);
  const Kernel kernel(steps, call, keys);
  const Cut cut(steps, call.num_rows, call.shape.heads, num_threads);
  const std::int64_t rows_together =
      std::clamp<std::int64_t>(call.num_rows / num_threads, 1, kMaxColumns / cut.heads);
  const std::int64_t row_pieces = (call.num_rows + rows_together - 1) / rows_together;
  const std::int64_t tasks = row_pieces * cut.head_pieces;
  for_pieces(steps, call.shape, tasks, num_threads, [&](std::int64_t task, Scratch& s) {
    // The longest first, so that no thread is left with one of them at the end.
    const std::int64_t piece = tasks - 1 - task;
    const std::int64_t first_head = piece % cut.head_pieces * cut.heads;
    const std::int64_t first_row = piece / cut.head_pieces * rows_together;
    const Kernel::Columns columns{first_row, std::min(rows_together, call.num_rows - first_row), first_head,
                                  std::min(cut.heads, call.shape.heads - first_head)};
    const std::int64_t* const counts = visible + first_row;
    const std::int64_t end = counts[columns.rows - 1];
    kernel.start(columns, s);
    Block blocks[2];
    int now = 0;
    locate_range(kernel, 0, end, blocks[now]);
    for (std::int64_t key = 0; key < end; key += kBlockKeys, now ^= 1) {
      locate_range(kernel, key + kBlockKeys, end, blocks[now ^ 1]);
      Prefetch next(blocks[now ^ 1].rows, blocks[now ^ 1].count, keys.layout().row_bytes());
      std::int64_t seen[kMaxColumns];
      for (std::int64_t r = 0; r < columns.rows; ++r) seen[r] = std::min(blocks[now].count, counts[r] - key);
      const bool all_see_all = seen[0] == blocks[now].count;
      kernel.add(columns, blocks[now], all_see_all ? nullptr : seen, key == 0, next, s);
    }
    kernel.finish(columns, std::upper_bound(counts, counts + columns.rows, 0) - counts, s);
  });
}

std::int64_t attention_scratch_bytes(const Isa& isa, const AttentionShape& shape, int num_threads) {
  std::size_t most = 0;
  for (const AttentionSteps* steps : {isa.attention_fp32, isa.attention_bf16}) {
    if (steps == nullptr) continue;
    Carver measure(nullptr);
    for (int t = 0; t < num_threads; ++t) Scratch(measure, *steps, shape);
    most = std::max(most, measure.used());
  }
  return static_cast<std::int64_t>(most);
}

}  // namespace longfill
