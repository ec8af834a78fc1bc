#include "merge_topk.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "memory.h"
#include "threads.h"

namespace longfill {
namespace {

constexpr std::int64_t kRowsPerTask = 4;
constexpr std::int64_t kVectorRoom = 16;  // keep_best stores whole vectors

struct Entry {
  std::int32_t position;
  float score;
};

bool before(const Entry& a, const Entry& b) { return a.position < b.position; }

// What one thread works in.
struct MergeScratch {
  float* scores;
  std::int32_t* positions;
  std::int32_t* sort_keys;
  Entry* entries;
  Entry* others;

  MergeScratch(Carver& carver, std::int64_t count)
      : scores(carver.take<float>(count + kVectorRoom)),
        positions(carver.take<std::int32_t>(count + kVectorRoom)),
        sort_keys(carver.take<std::int32_t>(count + kVectorRoom)),
        entries(carver.take<Entry>(count)),
        others(carver.take<Entry>(count)) {}
};

// By position: ascending runs are merged two by two. Returns where the result lies, one of the two.
Entry* merge_runs(Entry* from, Entry* to, std::int64_t count) {
  while (std::is_sorted_until(from, from + count, before) != from + count) {
    Entry* const last = from + count;
    Entry* out = to;
    for (Entry* first = from; first != last;) {
      Entry* const middle = std::is_sorted_until(first, last, before);
      Entry* const next = std::is_sorted_until(middle, last, before);
      out = std::merge(first, middle, middle, next, out, before);
      first = next;
    }
    std::swap(from, to);
  }
  return from;
}

class Merge {
 public:
  Merge(const Isa& isa, const ShardCandidates& candidates, const Selection& out)
      : isa_(isa), candidates_(candidates), out_(out) {}

  void run(std::int64_t row, const MergeScratch& s) const {
    std::int64_t count = collect(row, s);
    if (count > out_.k) count = drop_low(count, s);
    const Entry* const sorted = merge_runs(s.entries, s.others, count);
    for (std::int64_t i = 0; i < count; ++i) {
      s.scores[i] = sorted[i].score;
      s.positions[i] = sorted[i].position;
    }
    Candidates best{s.scores, s.positions, count};
    // More than k are left only where several tie for the last places: the lower positions take them.
    if (count > out_.k) isa_.keep_best(best, out_.k, out_.k, s.sort_keys);
    std::int32_t* const to = out_.positions + row * out_.position_stride;
    std::copy(best.positions, best.positions + best.count, to);
    std::fill(to + best.count, to + out_.k, -1);
  }

 private:
  std::int64_t collect(std::int64_t row, const MergeScratch& s) const {
    const float* const scores = candidates_.scores + row * candidates_.score_stride;
    const std::int32_t* const positions = candidates_.positions + row * candidates_.position_stride;
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < candidates_.entries; ++i) {
      s.entries[count] = {positions[i], scores[i]};
      count += positions[i] >= 0 && scores[i] > -std::numeric_limits<float>::infinity();
    }
    return count;
  }

  // Keeps what reaches the k-th best score.
  std::int64_t drop_low(std::int64_t count, const MergeScratch& s) const {
    for (std::int64_t i = 0; i < count; ++i) s.scores[i] = s.entries[i].score;
    Candidates row{s.scores, s.positions, count};
    const float lowest = isa_.keep_best(row, out_.k, out_.k, s.sort_keys);
    return std::remove_if(s.entries, s.entries + count, [&](const Entry& e) { return e.score < lowest; }) - s.entries;
  }

  const Isa& isa_;
  const ShardCandidates& candidates_;
  const Selection& out_;
};

}  // namespace

void merge_topk(const Isa& isa, const ShardCandidates& candidates, std::int64_t rows, const Selection& out,
                int num_threads) {
  const KeptBytes bytes(static_cast<std::size_t>(merge_topk_scratch_bytes(candidates.entries, num_threads)));
  Carver carver(bytes.get());
  std::vector<MergeScratch> scratch;
  for (int t = 0; t < num_threads; ++t) scratch.emplace_back(carver, candidates.entries);
  const Merge merge(isa, candidates, out);
  for_tasks(num_threads, (rows + kRowsPerTask - 1) / kRowsPerTask, [&](std::int64_t task, int thread) {
    const std::int64_t last = std::min(rows, (task + 1) * kRowsPerTask);
    for (std::int64_t row = task * kRowsPerTask; row < last; ++row)
      merge.run(row, scratch[static_cast<std::size_t>(thread)]);
  });
}

std::int64_t merge_topk_scratch_bytes(std::int64_t entries, int num_threads) {
  Carver measure(nullptr);
  for (int t = 0; t < num_threads; ++t) MergeScratch(measure, entries);
  return static_cast<std::int64_t>(measure.used());
}

}  // namespace longfill
