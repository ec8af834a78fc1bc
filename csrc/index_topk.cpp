// Walks key tiles of a piece, scores its rows and feeds each row's candidates; then merges what was split.
//
// Invariant: scratch is sized by Tiling and the thread count alone.
#include "index_topk.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "memory.h"
#include "threads.h"
#include "tiling.h"

namespace longfill {
namespace {

constexpr std::int64_t kCacheLine = 64;
constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// What one thread works in.
struct Scratch {
  char* queries;
  char* tile;
  float* tile_scales;
  float* tile_scores;
  float* candidate_scores;
  std::int32_t* candidate_positions;
  std::int32_t* sort_keys;
  std::int64_t* counts;
  float* thresholds;

  Scratch(Carver& carver, const Isa& isa, const Tiling& tiling, int heads, int dim) {
    const std::int64_t value_bytes = isa.bytes_per_value;
    const std::int64_t candidates = tiling.block_rows * tiling.candidate_stride();
    queries = carver.take<char>(tiling.block_rows * heads * dim * value_bytes);
    tile = carver.take<char>(tiling.tile_keys * dim * value_bytes);
    tile_scales = carver.take<float>(tiling.tile_keys);
    tile_scores = carver.take<float>(static_cast<std::int64_t>(kGroupRows) * tiling.tile_keys);
    candidate_scores = carver.take<float>(candidates);
    candidate_positions = carver.take<std::int32_t>(candidates);
    sort_keys = carver.take<std::int32_t>(tiling.candidate_stride());
    counts = carver.take<std::int64_t>(tiling.block_rows);
    thresholds = carver.take<float>(tiling.block_rows);
  }
};

// Selections over parts of the keys, k entries a row; shorter rows say how many.
struct Partials {
  float* scores;
  std::int32_t* positions;
  std::int64_t* counts;

  Partials(Carver& carver, std::int64_t rows, std::int64_t k)
      : scores(carver.take<float>(rows * k)),
        positions(carver.take<std::int32_t>(rows * k)),
        counts(carver.take<std::int64_t>(rows)) {}
};

// Where one thread brings a row's partial selections together.
struct MergeRoom {
  float* scores;
  std::int32_t* positions;
  std::int32_t* sort_keys;

  MergeRoom(Carver& carver, std::int64_t entries)
      : scores(carver.take<float>(entries + 16)),
        positions(carver.take<std::int32_t>(entries + 16)),
        sort_keys(carver.take<std::int32_t>(entries + 16)) {}
};

class Kernel {
 public:
  Kernel(const Isa& isa, const Tiling& tiling, const IndexInputs& in, const Selection& out, const Partials& partials)
      : isa_(isa), tiling_(tiling), in_(in), out_(out), partials_(partials) {}

  void run(const Piece& piece, Scratch& s) const {
    const ScoredRows& rows = piece.rows;
    const std::int64_t row_values = static_cast<std::int64_t>(in_.heads) * in_.dim;
    for (std::int64_t r = 0; r < rows.num_rows; ++r) {
      isa_.pack_query(in_.queries + (rows.first_row + r) * in_.query_stride, row_values,
                      s.queries + r * row_values * isa_.bytes_per_value);
      s.counts[r] = 0;
      s.thresholds[r] = kNoScore;
    }
    const std::int64_t tile_keys = rows.num_rows < kGroupRows ? tiling_.few_rows_tile_keys : tiling_.tile_keys;
    for (std::int64_t key = piece.first_key; key < piece.last_key; key += tile_keys) {
      const std::int64_t keys = std::min(tile_keys, piece.last_key - key);
      unpack_tile(rows.pages, key, keys, s);
      const std::int64_t next = key + keys;
      prefetch_tile(rows.pages, next, std::min(tile_keys, piece.last_key - next));
      // Rows at positions before the tile see none of it.
      const std::int64_t first_row = std::max<std::int64_t>(0, key - rows.first_position);
      for (std::int64_t r = first_row; r < rows.num_rows; r += kGroupRows)
        score_group(rows, r, std::min<std::int64_t>(kGroupRows, rows.num_rows - r), key, keys, s);
    }
    for (std::int64_t r = 0; r < rows.num_rows; ++r) {
      Candidates row = candidates(s, r);
      if (row.count > out_.k) isa_.keep_best(row, out_.k, out_.k, s.sort_keys);
      if (piece.partial < 0) {
        write(rows.first_row + r, row);
      } else {
        save_partial(piece.partial + r, row);
      }
    }
  }

  // One row's best of the parts' bests: concatenated in order of keys they are again in order of position.
  void merge(const std::vector<Piece>& parts, std::int64_t r, const MergeRoom& room) const {
    Candidates row{room.scores, room.positions, 0};
    for (const Piece& part : parts) {
      const std::int64_t from = part.partial + r;
      const std::int64_t count = partials_.counts[from];
      std::memcpy(row.scores + row.count, partials_.scores + from * out_.k, count * sizeof(float));
      std::memcpy(row.positions + row.count, partials_.positions + from * out_.k, count * sizeof(std::int32_t));
      row.count += count;
    }
    if (row.count > out_.k) isa_.keep_best(row, out_.k, out_.k, room.sort_keys);
    write(parts.front().rows.first_row + r, row);
  }

 private:
  Candidates candidates(Scratch& s, std::int64_t r) const {
    const std::int64_t at = r * tiling_.candidate_stride();
    return {s.candidate_scores + at, s.candidate_positions + at, s.counts[r]};
  }

  // `use(i, value, scale, n)` for each run of n keys that lie in one page, the first of them key first_key + i.
  template <class Use>
  void for_each_run(const std::int64_t* pages, std::int64_t first_key, std::int64_t count, const Use& use) const {
    const PagedKeys& k = in_.keys;
    std::int64_t page = first_key / k.page_size;
    std::int64_t slot = first_key % k.page_size;
    for (std::int64_t i = 0; i < count; ++page, slot = 0) {
      const std::int64_t n = std::min(count - i, k.page_size - slot);
      use(i, k.values + pages[page] * k.value_page_stride + slot * k.value_slot_stride,
          k.scales + pages[page] * k.scale_page_stride + slot * k.scale_slot_stride, n);
      i += n;
    }
  }

  void prefetch_tile(const std::int64_t* pages, std::int64_t first_key, std::int64_t count) const {
    for_each_run(pages, first_key, count, [&](std::int64_t, const std::uint8_t* value, const float*, std::int64_t n) {
      const std::uint8_t* const end = value + n * in_.keys.value_slot_stride;
      for (; value < end; value += kCacheLine) __builtin_prefetch(value);
      asm volatile("");  // GCC 12 takes a function that only prefetches for one without effect, and drops its calls.
    });
  }

  void unpack_tile(const std::int64_t* pages, std::int64_t first_key, std::int64_t count, Scratch& s) const {
    const PagedKeys& k = in_.keys;
    const std::uint8_t* rows[kMaxTileKeys];
    const auto locate = [&](std::int64_t i, const std::uint8_t* value, const float* scale, std::int64_t n) {
      for (std::int64_t j = 0; j < n; ++j) {
        rows[i + j] = value + j * k.value_slot_stride;
        s.tile_scales[i + j] = scale[j * k.scale_slot_stride];
      }
    };
    for_each_run(pages, first_key, count, locate);
    const auto padded = static_cast<int>((count + isa_.lanes - 1) / isa_.lanes * isa_.lanes);
    for (auto i = static_cast<int>(count); i < padded; ++i) {
      rows[i] = rows[0];  // any readable key: nobody sees these scores
      s.tile_scales[i] = 0.0f;
    }
    const std::int64_t block_bytes = static_cast<std::int64_t>(isa_.lanes) * in_.dim * isa_.bytes_per_value;
    for (int i = 0; i < padded; i += isa_.lanes)
      isa_.unpack_block(rows + i, in_.dim, s.tile + i / isa_.lanes * block_bytes);
  }

  void score_group(const ScoredRows& rows, std::int64_t r, std::int64_t count, std::int64_t first_key,
                   std::int64_t tile_keys, Scratch& s) const {
    const std::int64_t before = rows.first_position - first_key + 1;  // row i sees `before + i` keys of the tile
    const std::int64_t most = std::min(tile_keys, before + r + count - 1);
    const std::int64_t row_bytes = static_cast<std::int64_t>(in_.heads) * in_.dim * isa_.bytes_per_value;
    ScoreArgs args;
    args.queries = s.queries + r * row_bytes;
    args.query_stride = row_bytes;
    args.weights = in_.weights + (rows.first_row + r) * in_.weight_stride;
    args.weight_stride = in_.weight_stride;
    args.keys = s.tile;
    args.scales = s.tile_scales;
    args.scores = s.tile_scores;
    args.score_stride = tiling_.tile_keys;
    args.rows = static_cast<int>(count);
    args.heads = in_.heads;
    args.dim = in_.dim;
    args.blocks = static_cast<int>((most + isa_.lanes - 1) / isa_.lanes);
    isa_.score(args);
    const std::int64_t at = r * tiling_.candidate_stride();
    isa_.collect({s.tile_scores, tiling_.tile_keys, args.rows, tile_keys, before + r,
                  static_cast<std::int32_t>(first_key), s.candidate_scores + at, s.candidate_positions + at,
                  tiling_.candidate_stride(), s.counts + r, s.thresholds + r});
    for (std::int64_t i = r; i < r + count; ++i) {
      if (s.counts[i] <= tiling_.candidate_room) continue;
      Candidates row = candidates(s, i);
      s.thresholds[i] = isa_.keep_best(row, out_.k, tiling_.kept_candidates, s.sort_keys);
      s.counts[i] = row.count;
    }
  }

  void write(std::int64_t row, const Candidates& best) const {
    std::int32_t* const positions = out_.positions + row * out_.position_stride;
    std::copy(best.positions, best.positions + best.count, positions);
    std::fill(positions + best.count, positions + out_.k, -1);
    if (out_.scores == nullptr) return;
    float* const scores = out_.scores + row * out_.score_stride;
    std::copy(best.scores, best.scores + best.count, scores);
    std::fill(scores + best.count, scores + out_.k, kNoScore);
  }

  void save_partial(std::int64_t row, const Candidates& best) const {
    std::copy(best.scores, best.scores + best.count, partials_.scores + row * out_.k);
    std::copy(best.positions, best.positions + best.count, partials_.positions + row * out_.k);
    partials_.counts[row] = best.count;
  }

  const Isa& isa_;
  const Tiling& tiling_;
  const IndexInputs& in_;
  const Selection& out_;
  const Partials& partials_;
};

// Everything that a call allocates.
struct Memory {
  std::vector<Scratch> threads;
  std::vector<MergeRoom> merging;
  Partials partials;

  Memory(Carver& carver, const Isa& isa, const Tiling& tiling, const IndexShape& shape, int num_threads,
         std::int64_t parts, std::int64_t partial_rows)
      : partials(carver, partial_rows, shape.k) {
    for (int t = 0; t < num_threads; ++t) {
      threads.emplace_back(carver, isa, tiling, shape.heads, shape.dim);
      merging.emplace_back(carver, parts * shape.k);
    }
  }
};

}  // namespace

void index_topk(const Isa& isa, const IndexInputs& in, const std::vector<ScoredRows>& rows, const Selection& out,
                int num_threads) {
  const Tiling tiling(isa, in.heads, in.dim, out.k);
  const Plan plan = make_plan(tiling, rows, in.heads, in.dim, num_threads);
  const std::int64_t parts = plan.merges.empty() ? 0 : most_parts(num_threads);
  const IndexShape shape{in.heads, in.dim, out.k};

  Carver measure(nullptr);
  Memory(measure, isa, tiling, shape, plan.num_threads, parts, plan.partial_rows);
  const Bytes bytes = allocate(measure.used());
  Carver carver(bytes.get());
  Memory memory(carver, isa, tiling, shape, plan.num_threads, parts, plan.partial_rows);

  const Kernel kernel(isa, tiling, in, out, memory.partials);
  for_tasks(plan.num_threads, static_cast<std::int64_t>(plan.pieces.size()),
            [&](std::int64_t i, int thread) { kernel.run(plan.pieces[i], memory.threads[thread]); });
  for (const std::vector<Piece>& block : plan.merges) {
    for_tasks(plan.num_threads, block.front().rows.num_rows,
              [&](std::int64_t row, int thread) { kernel.merge(block, row, memory.merging[thread]); });
  }
}

std::int64_t index_topk_scratch_bytes(const Isa& isa, const IndexShape& shape, int num_threads) {
  const Tiling tiling(isa, shape.heads, shape.dim, shape.k);
  Carver measure(nullptr);
  Memory(measure, isa, tiling, shape, num_threads, most_parts(num_threads), most_partial_rows(tiling, num_threads));
  return static_cast<std::int64_t>(measure.used());
}

}  // namespace longfill
