#include "bench.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "threads.h"

namespace longfill {
namespace {

constexpr std::int64_t kLine = 64;
constexpr std::int64_t kReadPiece = std::int64_t{4} << 20;  // bytes of a task
// Long enough that memcpy writes past the caches.
constexpr std::int64_t kCopyPiece = std::int64_t{64} << 20;
// Several streams, each in pages of its own, keep more lines on their way than the one that hardware prefetchers follow.
constexpr int kStreams = 4;
constexpr std::int64_t kAhead = 16 * kLine;  // between a prefetch and its use

// One load brings a whole line: more of them would measure the loads.
std::uint64_t line_at(const char* p) {
  std::uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

std::uint64_t read_piece(const char* data, std::int64_t bytes) {
  std::uint64_t sum[kStreams] = {};
  const std::int64_t length = bytes / (kStreams * kLine) * kLine;
  for (std::int64_t at = 0; at < length; at += kLine) {
    for (int s = 0; s < kStreams; ++s) {
      __builtin_prefetch(data + s * length + at + kAhead);
      sum[s] += line_at(data + s * length + at);
    }
  }
  for (std::int64_t at = kStreams * length; at < bytes; at += kLine) sum[0] += line_at(data + at);
  return std::accumulate(sum, sum + kStreams, std::uint64_t{0});
}

std::int64_t pieces(std::int64_t bytes, std::int64_t piece) { return (bytes + piece - 1) / piece; }

}  // namespace

std::uint64_t read_memory(const void* data, std::int64_t bytes, int num_threads) {
  std::atomic<std::uint64_t> total{0};
  for_tasks(num_threads, pieces(bytes, kReadPiece), [&](std::int64_t task, int) {
    const std::int64_t first = task * kReadPiece;
    total += read_piece(static_cast<const char*>(data) + first, std::min(kReadPiece, bytes - first));
  });
  return total;
}

void copy_memory(void* target, const void* source, std::int64_t bytes, int num_threads) {
  for_tasks(num_threads, pieces(bytes, kCopyPiece), [&](std::int64_t task, int) {
    const std::int64_t first = task * kCopyPiece;
    std::memcpy(static_cast<char*>(target) + first, static_cast<const char*>(source) + first,
                static_cast<std::size_t>(std::min(kCopyPiece, bytes - first)));
  });
}

}  // namespace longfill
