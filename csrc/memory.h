// Aligned scratch that is sized before it is taken.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace longfill {

constexpr std::size_t kAlign = 64;

struct AlignedDelete {
  void operator()(char* p) const { ::operator delete[](p, std::align_val_t{kAlign}); }
};
using Bytes = std::unique_ptr<char[], AlignedDelete>;

inline Bytes allocate(std::size_t bytes) {
  return Bytes(static_cast<char*>(::operator new[](std::max(bytes, kAlign), std::align_val_t{kAlign})));
}

constexpr std::size_t kMostKept = std::size_t{32} << 20;

// Memory for the length of a call. The last call's is kept for the next one, up to kMostKept: fresh memory is paid for
// page by page. What is kept is no more than a call has used, so a plan that counts the largest call counts it as well.
class KeptBytes {
 public:
  explicit KeptBytes(std::size_t bytes) : block_(kept_.exchange(nullptr)) {
    if (block_ != nullptr && block_->bytes >= bytes) return;
    delete block_;
    block_ = new Block{allocate(bytes), bytes};
  }
  ~KeptBytes() {
    if (block_->bytes <= kMostKept) block_ = kept_.exchange(block_);
    delete block_;
  }
  KeptBytes(const KeptBytes&) = delete;
  KeptBytes& operator=(const KeptBytes&) = delete;
  char* get() const { return block_->data.get(); }

 private:
  struct Block {
    Bytes data;
    std::size_t bytes;
  };
  inline static std::atomic<Block*> kept_{nullptr};
  Block* block_;
};

// Carves arrays out of one allocation, or only counts where `base` is null.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  template <class T>
  T* take(std::int64_t count) {
    const std::size_t at = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  std::size_t used() const { return used_; }

 private:
  char* base_;
  std::size_t used_ = 0;
};

}  // namespace longfill
