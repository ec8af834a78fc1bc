// Cached latent rows: where they lie in a paged pool and how their bytes become numbers.
//
// The formats are those of longfill/cache/formats.py. Invariant: decoding gives the same numbers in every instruction
// set, and the same bits from pages as from a gathered copy.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace longfill {

struct Isa;

enum class LatentFormat { kFloat32, kBfloat16, kFp8, kFp8DsMla };

constexpr std::int64_t kScaleGroup = 128;  // latent values that share a scale in fp8_ds_mla

struct LatentLayout {
  LatentFormat format;
  std::int64_t rank;
  std::int64_t rope_dim;
  float scale;  // of both parts in kFp8
  float rope_scale;

  std::int64_t width() const { return rank + rope_dim; }
  std::int64_t scale_groups() const { return (rank + kScaleGroup - 1) / kScaleGroup; }
  std::int64_t row_bytes() const {
    switch (format) {
      case LatentFormat::kFloat32: return 4 * width();
      case LatentFormat::kBfloat16: return 2 * width();
      case LatentFormat::kFp8: return width();
      case LatentFormat::kFp8DsMla: return rank + 4 * scale_groups() + 2 * rope_dim;
    }
    return 0;
  }
};

// Throws std::invalid_argument for a name that is none of the four.
LatentFormat latent_format(const std::string& name);

// The rows of one request by position.
class LatentRows {
 public:
  // Paged: position p lies in slot p % page_size of page pages[p / page_size].
  LatentRows(const LatentLayout& layout, const std::uint8_t* data, std::int64_t page_stride, std::int64_t slot_stride,
             std::int64_t page_size, std::int64_t num_pages, const std::int64_t* pages, std::int64_t num_positions);
  // One after the other, `stride` bytes apart.
  LatentRows(const LatentLayout& layout, const std::uint8_t* data, std::int64_t stride, std::int64_t num_positions);

  const LatentLayout& layout() const { return layout_; }
  std::int64_t size() const { return num_positions_; }

  // Throws std::invalid_argument for a position or page that is not there.
  const std::uint8_t* at(std::int64_t position) const {
    if (position >= num_positions_) throw std::invalid_argument("attention: a position lies beyond the context");
    if (pages_ == nullptr) return data_ + position * slot_stride_;
    const std::int64_t page = shift_ >= 0 ? position >> shift_ : position / page_size_;
    const std::int64_t physical = pages_[page];
    if (physical < 0 || physical >= num_pages_)
      throw std::invalid_argument("attention: a page table names a page outside the pool");
    return data_ + physical * page_stride_ + (position - page * page_size_) * slot_stride_;
  }

 private:
  LatentLayout layout_;
  const std::uint8_t* data_;
  std::int64_t page_stride_ = 0;
  std::int64_t slot_stride_;
  std::int64_t page_size_ = 1;
  int shift_ = -1;  // log2 of a page size that is a power of two: a division a key shows in small models
  std::int64_t num_pages_ = 0;
  const std::int64_t* pages_ = nullptr;
  std::int64_t num_positions_;
};

// Decode positions [0, count) into `out`, rows `stride` bytes apart, as bf16 (rounded to nearest even) or fp32.
void gather_rows(const Isa& isa, const LatentRows& rows, std::int64_t count, char* out, std::int64_t stride,
                 bool as_bf16, int num_threads);

}  // namespace longfill
