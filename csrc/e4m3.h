// The 256 values of float8_e4m3fn, as float and as bf16 bits. Both hold every value exactly.
#pragma once

#include <cstdint>
#include <cstring>

namespace longfill {

struct E4m3Tables {
  float as_float[256];
  std::uint16_t as_bf16[256];
};

extern const E4m3Tables e4m3;

}  // namespace longfill
