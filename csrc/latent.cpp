// Positions of paged rows, and the gather of a whole context.
#include "latent.h"

#include <algorithm>

#include "isa.h"
#include "threads.h"

namespace longfill {
namespace {

constexpr std::int64_t kRowsPerTask = 256;

int log2_or_none(std::int64_t n) {
  return (n & (n - 1)) == 0 ? __builtin_ctzll(static_cast<unsigned long long>(n)) : -1;
}

}  // namespace

LatentFormat latent_format(const std::string& name) {
  if (name == "float32") return LatentFormat::kFloat32;
  if (name == "bfloat16") return LatentFormat::kBfloat16;
  if (name == "fp8") return LatentFormat::kFp8;
  if (name == "fp8_ds_mla") return LatentFormat::kFp8DsMla;
  throw std::invalid_argument("attention: unknown latent cache format '" + name + "'");
}

LatentRows::LatentRows(const LatentLayout& layout, const std::uint8_t* data, std::int64_t page_stride,
                       std::int64_t slot_stride, std::int64_t page_size, std::int64_t num_pages,
                       const std::int64_t* pages, std::int64_t num_positions)
    : layout_(layout), data_(data), page_stride_(page_stride), slot_stride_(slot_stride), page_size_(page_size),
      shift_(log2_or_none(page_size)), num_pages_(num_pages), pages_(pages), num_positions_(num_positions) {}

LatentRows::LatentRows(const LatentLayout& layout, const std::uint8_t* data, std::int64_t stride,
                       std::int64_t num_positions)
    : layout_(layout), data_(data), slot_stride_(stride), num_positions_(num_positions) {}

void gather_rows(const Isa& isa, const LatentRows& rows, std::int64_t count, char* out, std::int64_t stride,
                 bool as_bf16, int num_threads) {
  const auto decode = as_bf16 ? isa.latent_to_bf16 : isa.latent_to_fp32;
  const std::int64_t tasks = (count + kRowsPerTask - 1) / kRowsPerTask;
  for_tasks(num_threads, tasks, [&](std::int64_t task, int) {
    const std::int64_t last = std::min(count, (task + 1) * kRowsPerTask);
    for (std::int64_t position = task * kRowsPerTask; position < last; ++position)
      decode(rows.layout(), rows.at(position), out + position * stride);
  });
}

}  // namespace longfill
