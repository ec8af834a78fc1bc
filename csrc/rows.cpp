// Spreads the rows of a call over threads.
#include "rows.h"

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "threads.h"

namespace longfill {
namespace {

// Values that make a task worth handing out: some microseconds.
constexpr std::int64_t kTaskValues = 32768;
// A row's parts in scratch start on whole vectors.
constexpr std::int64_t kScratchSlack = 16;

template <class Work>
void for_row_blocks(std::int64_t rows, std::int64_t width, int num_threads, const Work& work) {
  const std::int64_t block = std::max<std::int64_t>(1, kTaskValues / std::max<std::int64_t>(1, width));
  for_tasks(num_threads, (rows + block - 1) / block, [&](std::int64_t task, int thread) {
    work(task * block, std::min(rows, (task + 1) * block), thread);
  });
}

class Scratch {
 public:
  Scratch(std::int64_t width, int num_threads) : bytes_(allocate(row_scratch_bytes(width, num_threads))) {
    stride_ = row_scratch_bytes(width, 1);
  }
  float* of(int thread) const { return reinterpret_cast<float*>(bytes_.get() + thread * stride_); }

 private:
  Bytes bytes_;
  std::size_t stride_;
};

}  // namespace

std::size_t row_scratch_bytes(std::int64_t width, int num_threads) {
  Carver carver(nullptr);
  for (int thread = 0; thread < num_threads; ++thread) carver.take<float>(width + kScratchSlack);
  return carver.used();
}

void rms_norm(const Isa& isa, const RmsNormArgs& args, std::int64_t rows, int num_threads) {
  for_row_blocks(rows, args.width, num_threads,
                 [&](std::int64_t first, std::int64_t last, int) { isa.rows->rms_norm(args, first, last); });
}

void store_latent(const Isa& isa, const StoreLatentArgs& args, std::int64_t rows, int num_threads) {
  const std::int64_t width = args.rank + 2 * args.rotation.pairs;
  const Scratch scratch(width, num_threads);
  for_row_blocks(rows, width, num_threads, [&](std::int64_t first, std::int64_t last, int thread) {
    isa.rows->store_latent(args, first, last, scratch.of(thread));
  });
}

void store_index_keys(const Isa& isa, const StoreIndexKeysArgs& args, std::int64_t rows, int num_threads) {
  const Scratch scratch(args.dim, num_threads);
  for_row_blocks(rows, args.dim, num_threads, [&](std::int64_t first, std::int64_t last, int thread) {
    isa.rows->store_index_keys(args, first, last, scratch.of(thread));
  });
}

void index_queries(const Isa& isa, const IndexQueriesArgs& args, std::int64_t rows, int num_threads) {
  for_row_blocks(rows, args.heads * args.dim, num_threads,
                 [&](std::int64_t first, std::int64_t last, int) { isa.rows->index_queries(args, first, last); });
}

void rotate(const Isa& isa, const RotateArgs& args, std::int64_t rows, int num_threads) {
  const std::int64_t width = 2 * args.rotation.pairs;
  const Scratch scratch(width, num_threads);
  for_row_blocks(rows, args.heads * width, num_threads, [&](std::int64_t first, std::int64_t last, int thread) {
    isa.rows->rotate(args, first, last, scratch.of(thread));
  });
}

void put_rows(const PutRowsArgs& args, std::int64_t rows, int num_threads) {
  for_row_blocks(rows, args.bytes, num_threads, [&](std::int64_t first, std::int64_t last, int) {
    for (std::int64_t i = first; i < last; ++i)
      std::memcpy(args.pages.at(args.slots[i]), args.from.data + args.order[i] * args.from.stride,
                  static_cast<std::size_t>(args.bytes));
  });
}

}  // namespace longfill
