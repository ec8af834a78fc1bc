// Walks key tiles of a piece, scores its rows and feeds each row's candidates; then merges what was split.
//
// Invariant: scratch is sized by Tiling and the thread count alone.
#include "index_topk.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "index_scratch.h"
#include "memory.h"
#include "threads.h"
#include "tiling.h"

namespace longfill {
namespace {

constexpr std::int64_t kCacheLine = 64;
constexpr std::int64_t kProbedRows = 16;
constexpr std::int64_t kPrimingShare = 32;  // at most one key in so many is scored twice
constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// Keys [first_key, first_key + keys) of a context.
struct Tile {
  std::int64_t first_key;
  std::int64_t keys;
};

// Never subnormal: a thread may take those for zero.
float just_below(float score) {
  if (std::fabs(score) < std::numeric_limits<float>::min()) return -std::numeric_limits<float>::min();
  return std::nextafter(score, kNoScore);
}

class Kernel {
 public:
  Kernel(const Isa& isa, const Tiling& tiling, const IndexInputs& in, const Selection& out, const Partials& partials,
         ScreenMode screen)
      : isa_(isa), tiling_(tiling), in_(in), out_(out), partials_(partials), screen_(screen) {}

  void run(const Piece& piece, Scratch& s) const {
    const ScoredRows& rows = piece.rows;
    start(rows, s);
    const ScreenMode mode = screen_mode(rows, s);
    const bool primed = mode != ScreenMode::kOff && prime(piece, s);
    ScreenChoice choice(mode, primed ? 0 : tiling_.candidate_room + 1, in_.heads, in_.dim);
    const std::int64_t tile_keys = rows.num_rows < kGroupRows ? tiling_.few_rows_tile_keys : tiling_.tile_keys;
    for (std::int64_t key = piece.first_key; key < piece.last_key; key += tile_keys) {
      const Tile tile{key, std::min(tile_keys, piece.last_key - key)};
      locate_tile(rows.pages, tile, s);
      const ScreenChoice::Step step = choice.next(key - piece.first_key);
      if (step != ScreenChoice::Step::kPlain) screen_tile(rows, tile, step, choice, key - piece.first_key, s);
      if (step != ScreenChoice::Step::kScreen) score_tile(rows, tile, s);
      const std::int64_t next = tile.first_key + tile.keys;
      prefetch_tile(rows.pages, {next, std::min(tile_keys, piece.last_key - next)});
    }
    score_pending(rows, s);
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
      const float* const scales =
          k.scales == nullptr ? nullptr : k.scales + pages[page] * k.scale_page_stride + slot * k.scale_slot_stride;
      use(i, k.values + pages[page] * k.value_page_stride + slot * k.value_slot_stride, scales, n);
      i += n;
    }
  }

  void start(const ScoredRows& rows, Scratch& s) const {
    const std::int64_t row_values = static_cast<std::int64_t>(in_.heads) * in_.dim;
    for (std::int64_t r = 0; r < rows.num_rows; ++r) {
      isa_.pack_query(in_.queries + (rows.first_row + r) * in_.query_stride, row_values,
                      s.queries + r * row_values * isa_.bytes_per_value);
      s.counts[r] = 0;
      s.thresholds[r] = kNoScore;
      if (s.screen) s.screen->pending[r] = 0;
    }
    if (s.screen) s.screen->packed_rows = 0;
  }

  // Thresholds before the first key, from the keys just before the rows: often the best, and a screen needs them early.
  bool prime(const Piece& piece, Scratch& s) const {
    const ScoredRows& rows = piece.rows;
    const std::int64_t keys = (tiling_.candidate_room / tiling_.tile_keys + 1) * tiling_.tile_keys;
    if (piece.last_key - piece.first_key < kPrimingShare * keys) return false;
    const std::int64_t last = rows.visible(0);
    if (last < keys) return false;
    for (std::int64_t key = last - keys; key < last; key += tiling_.tile_keys) {
      const Tile tile{key, tiling_.tile_keys};
      locate_tile(rows.pages, tile, s);
      score_tile(rows, tile, s);
    }
    for (std::int64_t r = 0; r < rows.num_rows; ++r) {
      cut_back(r, out_.k, out_.k, s);
      // Those keys come again, and with them others as good: what equals the threshold must pass.
      s.thresholds[r] = just_below(s.thresholds[r]);
      s.counts[r] = 0;
    }
    return true;
  }

  void prefetch_tile(const std::int64_t* pages, const Tile& t) const {
    for_each_run(pages, t.first_key, t.keys,
                 [&](std::int64_t, const std::uint8_t* value, const float*, std::int64_t n) {
      const std::uint8_t* const end = value + n * in_.keys.value_slot_stride;
      for (; value < end; value += kCacheLine) __builtin_prefetch(value);
      asm volatile("");  // GCC 12 takes a function that only prefetches for one without effect, and drops its calls.
    });
  }

  // Where the tile's keys lie and their scales, filled up to a whole block.
  void locate_tile(const std::int64_t* pages, const Tile& t, Scratch& s) const {
    const PagedKeys& k = in_.keys;
    const auto locate = [&](std::int64_t i, const std::uint8_t* value, const float* scale, std::int64_t n) {
      for (std::int64_t j = 0; j < n; ++j) {
        s.tile_keys[i + j] = value + j * k.value_slot_stride;
        s.tile_scales[i + j] = scale == nullptr ? 1.0f : scale[j * k.scale_slot_stride];
      }
    };
    for_each_run(pages, t.first_key, t.keys, locate);
    for (std::int64_t i = t.keys; i % isa_.lanes != 0; ++i) {
      s.tile_keys[i] = s.tile_keys[0];  // any readable key: nobody sees these scores
      s.tile_scales[i] = 0.0f;
    }
  }

  void unpack(const std::uint8_t* const* keys, std::int64_t count, Scratch& s) const {
    const std::int64_t block_bytes = static_cast<std::int64_t>(isa_.lanes) * in_.dim * isa_.bytes_per_value;
    for (std::int64_t i = 0; i < count; i += isa_.lanes)
      isa_.unpack_block(keys + i, in_.dim, s.tile + i / isa_.lanes * block_bytes);
  }

  // How many of the tile's keys each of rows [r, r + count) sees.
  static void count_seen(const ScoredRows& rows, std::int64_t r, std::int64_t count, const Tile& t,
                         std::int64_t* seen) {
    for (std::int64_t i = 0; i < count; ++i) seen[i] = std::min(t.keys, rows.visible(r + i) - t.first_key);
  }

  void score_tile(const ScoredRows& rows, const Tile& t, Scratch& s) const {
    score_pending(rows, s);
    unpack(s.tile_keys, t.keys, s);
    for (std::int64_t r = rows.first_that_sees(t.first_key); r < rows.num_rows; r += kGroupRows)
      score_group(rows, r, std::min<std::int64_t>(kGroupRows, rows.num_rows - r), t, s);
  }

  void score_group(const ScoredRows& rows, std::int64_t r, std::int64_t count, const Tile& t, Scratch& s) const {
    std::int64_t seen[kGroupRows];
    count_seen(rows, r, count, t, seen);
    score(rows, r, count, s.tile_scales, seen[count - 1], s);
    const std::int64_t at = r * tiling_.candidate_stride();
    isa_.collect({s.tile_scores, tiling_.tile_keys, static_cast<int>(count), seen,
                  static_cast<std::int32_t>(t.first_key), s.candidate_scores + at, s.candidate_positions + at,
                  tiling_.candidate_stride(), s.counts + r, s.thresholds + r});
    for (std::int64_t i = r; i < r + count; ++i)
      cut_back(i, tiling_.candidate_room, tiling_.kept_candidates, s);
  }

  // Rows [r, r + count) against the first `keys` unpacked keys.
  void score(const ScoredRows& rows, std::int64_t r, std::int64_t count, const float* scales, std::int64_t keys,
             Scratch& s) const {
    const std::int64_t row_bytes = static_cast<std::int64_t>(in_.heads) * in_.dim * isa_.bytes_per_value;
    ScoreArgs args;
    args.queries = s.queries + r * row_bytes;
    args.query_stride = row_bytes;
    args.weights = in_.weights + (rows.first_row + r) * in_.weight_stride;
    args.weight_stride = in_.weight_stride;
    args.keys = s.tile;
    args.scales = scales;
    args.scores = s.tile_scores;
    args.score_stride = tiling_.tile_keys;
    args.rows = static_cast<int>(count);
    args.heads = in_.heads;
    args.dim = in_.dim;
    args.blocks = static_cast<int>((keys + isa_.lanes - 1) / isa_.lanes);
    isa_.score(args);
  }

  void cut_back(std::int64_t i, std::int64_t room, std::int64_t most, Scratch& s) const {
    if (s.counts[i] <= room) return;
    Candidates row = candidates(s, i);
    s.thresholds[i] = isa_.keep_best(row, out_.k, most, s.sort_keys);
    s.counts[i] = row.count;
  }

  // A few rows spend their time on keys, which a screen decodes as well.
  ScreenMode screen_mode(const ScoredRows& rows, const Scratch& s) const {
    const bool few = screen_ == ScreenMode::kAuto && rows.num_rows < kGroupRows;
    return s.screen && !few ? screen_ : ScreenMode::kOff;
  }

  // Tests the located tile and lines up what passes for exact scores; a probe only counts, and for a few rows.
  void screen_tile(const ScoredRows& rows, const Tile& t, ScreenChoice::Step step, ScreenChoice& choice,
                   std::int64_t keys_before, Scratch& s) const {
    const bool probe = step == ScreenChoice::Step::kProbe;
    const std::int64_t first = rows.first_that_sees(t.first_key);
    const std::int64_t last = probe ? std::min(first + kProbedRows, rows.num_rows) : rows.num_rows;
    ScreenScratch& c = *s.screen;
    for (std::int64_t& r = c.packed_rows; r < last; ++r)
      c.pack_row(r, in_.queries + (rows.first_row + r) * in_.query_stride,
                 in_.weights + (rows.first_row + r) * in_.weight_stride, in_.heads, in_.dim);
    for (std::int64_t r = first; r < last; ++r) cut_back(r, tiling_.screened_room, out_.k, s);
    c.pack_tile(*isa_.screen, s.tile_keys, s.tile_scales, t.keys, in_.dim);
    ScreenCounts counted;
    for (std::int64_t r = first; r < last; r += kGroupRows)
      screen_group(rows, r, std::min<std::int64_t>(kGroupRows, last - r), t, probe, counted, s);
    choice.saw(keys_before + t.keys, counted.screened, counted.survivors);
    if (!probe) s.counted.add(counted);
  }

  void screen_group(const ScoredRows& rows, std::int64_t r, std::int64_t count, const Tile& t, bool probe,
                    ScreenCounts& counted, Scratch& s) const {
    ScreenScratch& c = *s.screen;
    std::int64_t seen[kGroupRows];
    count_seen(rows, r, count, t, seen);
    isa_.screen->test(c.arguments(r, count, s.thresholds + r, seen, in_.heads, in_.dim));
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int32_t survivors = c.survivor_counts[i];
      counted.screened += seen[i];
      counted.survivors += survivors;
      if (!probe) line_up(rows, r + i, c.survivors + i * kSurvivorStride, survivors, t, s);
    }
  }

  void line_up(const ScoredRows& rows, std::int64_t i, const std::uint8_t* keys, std::int32_t count, const Tile& t,
               Scratch& s) const {
    ScreenScratch& c = *s.screen;
    for (std::int32_t taken = 0; taken < count;) {
      const std::int32_t waiting = c.pending[i];
      const std::int32_t more = std::min(count - taken, kPendingKeys - waiting);
      const std::uint8_t** const pending = c.pending_keys + i * kPendingKeys + waiting;
      float* const scales = c.pending_scales + i * kPendingKeys + waiting;
      std::int32_t* const positions = c.pending_positions + i * kPendingKeys + waiting;
      for (std::int32_t j = 0; j < more; ++j) {
        const int key = keys[taken + j];
        pending[j] = s.tile_keys[key];
        scales[j] = s.tile_scales[key];
        positions[j] = static_cast<std::int32_t>(t.first_key) + key;
      }
      taken += more;
      c.pending[i] = waiting + more;
      if (waiting + more == kPendingKeys) score_pending_of(rows, i, s);
    }
  }

  void score_pending(const ScoredRows& rows, Scratch& s) const {
    if (!s.screen) return;
    for (std::int64_t i = 0; i < rows.num_rows; ++i) {
      if (s.screen->pending[i] != 0) score_pending_of(rows, i, s);
    }
  }

  // The exact kernel's own scores of a row's survivors, into its candidates.
  void score_pending_of(const ScoredRows& rows, std::int64_t i, Scratch& s) const {
    ScreenScratch& c = *s.screen;
    const std::uint8_t** const keys = c.pending_keys + i * kPendingKeys;
    const std::int32_t* const positions = c.pending_positions + i * kPendingKeys;
    const std::int64_t count = c.pending[i];
    for (std::int64_t j = count; j % isa_.lanes != 0; ++j) keys[j] = keys[0];
    unpack(keys, count, s);
    score(rows, i, 1, c.pending_scales + i * kPendingKeys, count, s);
    Candidates row = candidates(s, i);
    for (std::int64_t j = 0; j < count; ++j) {
      row.scores[row.count] = s.tile_scores[j];
      row.positions[row.count] = positions[j];
      row.count += s.tile_scores[j] > s.thresholds[i];
    }
    s.counts[i] = row.count;
    c.pending[i] = 0;
    cut_back(i, tiling_.screened_room, out_.k, s);
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
  ScreenMode screen_;
};

// Everything that a call allocates.
struct Memory {
  std::vector<Scratch> threads;
  std::vector<MergeRoom> merging;
  Partials partials;

  Memory(Carver& carver, const Isa& isa, const Tiling& tiling, const IndexShape& shape, bool screened,
         int num_threads, std::int64_t parts, std::int64_t partial_rows)
      : partials(carver, partial_rows, shape.k) {
    for (int t = 0; t < num_threads; ++t) {
      threads.emplace_back(carver, isa, tiling, shape.heads, shape.dim, screened);
      merging.emplace_back(carver, parts * shape.k);
    }
  }
};

bool has_screen(const Isa& isa, ScreenMode screen) { return screen != ScreenMode::kOff && isa.screen != nullptr; }

}  // namespace

ScreenCounts index_topk(const Isa& isa, const IndexInputs& in, const std::vector<ScoredRows>& rows,
                        const Selection& out, ScreenMode screen, int num_threads) {
  const Tiling tiling(isa, in.heads, in.dim, out.k);
  const Plan plan = make_plan(tiling, rows, in.heads, in.dim, num_threads);
  const std::int64_t parts = plan.merges.empty() ? 0 : most_parts(num_threads);
  const IndexShape shape{in.heads, in.dim, out.k};
  const bool screened = has_screen(isa, screen);

  Carver measure(nullptr);
  Memory(measure, isa, tiling, shape, screened, plan.num_threads, parts, plan.partial_rows);
  const Bytes bytes = allocate(measure.used());
  Carver carver(bytes.get());
  Memory memory(carver, isa, tiling, shape, screened, plan.num_threads, parts, plan.partial_rows);

  const Kernel kernel(isa, tiling, in, out, memory.partials, screen);
  for_tasks(plan.num_threads, static_cast<std::int64_t>(plan.pieces.size()),
            [&](std::int64_t i, int thread) { kernel.run(plan.pieces[i], memory.threads[thread]); });
  for (const std::vector<Piece>& block : plan.merges) {
    for_tasks(plan.num_threads, block.front().rows.num_rows,
              [&](std::int64_t row, int thread) { kernel.merge(block, row, memory.merging[thread]); });
  }
  ScreenCounts counted;
  for (const Scratch& thread : memory.threads) counted.add(thread.counted);
  for (const ScoredRows& r : rows) {
    for (std::int64_t i = 0; i < r.num_rows; ++i) counted.pairs += r.visible(i);
  }
  return counted;
}

std::int64_t index_topk_scratch_bytes(const Isa& isa, const IndexShape& shape, ScreenMode screen,
                                      int num_threads) {
  const Tiling tiling(isa, shape.heads, shape.dim, shape.k);
  Carver measure(nullptr);
  Memory(measure, isa, tiling, shape, has_screen(isa, screen), num_threads, most_parts(num_threads),
         most_partial_rows(tiling, num_threads));
  return static_cast<std::int64_t>(measure.used());
}

}  // namespace longfill
