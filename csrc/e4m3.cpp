// Builds the tables from the format's definition: sign, 4 exponent bits (bias 7), 3 mantissa bits, no infinity.
#include "e4m3.h"

#include <cmath>
#include <limits>

namespace longfill {
namespace {

float decode(int byte) {
  const int exponent = (byte >> 3) & 15;
  const int mantissa = byte & 7;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if ((byte & 0x7f) == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
  return (byte & 0x80) != 0 ? -value : value;
}

E4m3Tables build() {
  E4m3Tables tables;
  for (int byte = 0; byte < 256; ++byte) {
    tables.as_float[byte] = decode(byte);
    std::uint32_t bits;
    std::memcpy(&bits, &tables.as_float[byte], sizeof bits);
    tables.as_bf16[byte] = static_cast<std::uint16_t>(bits >> 16);
  }
  return tables;
}

}  // namespace

const E4m3Tables e4m3 = build();

}  // namespace longfill
