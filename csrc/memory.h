// Aligned scratch that is sized before it is taken.
#pragma once

#include <algorithm>
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
