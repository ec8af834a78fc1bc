// The screen's bound.
//
// For one row, with exact reals: S = s * sum_h w_h relu(q_h . k), k^ = kKeyStep * integers, q^_h = sigma_h * integers.
// relu is 1-Lipschitz and q . k - q^ . k^ = q . (k - k^) + (q - q^) . k^, so by Cauchy-Schwarz
//
//   |S - s * sum_h w_h relu(q^_h . k^)| <= s (A |k - k^| + B |k^|)
//   A = sum_h |w_h| |q_h|    B = sum_h |w_h| |q_h - q^_h|
//
// Both kernels compute in fp32, u = 2^-24 a rounding. The exact one rounds a dot product at most 2 dim times (4 dim
// below, so that truncating hardware is covered), the sum over heads `heads` times, the scale once: it strays from S by
// at most g s A |k|, where |k| <= |k^| + |k - k^| and g = (4 dim + 2 heads + 32) u. The approximation's integer dot
// products are exact; converting them, the factors, the sum and the scale stray by at most
// g s (sum_h |w_h| |q^_h| |k^| + A' |k - k^| + B' |k^|), where sum_h |w_h| |q^_h| <= A + B and A', B' are the weights
// that the kernel is given. g being far below 1, these cover everything:
//
//   A' = A (1 + 2 g) (1 + 4 g)    B' = (B + 3 g (A + B)) (1 + 4 g)
//
// Nothing under- or overflows within the ranges below: the product of the last bits of a query, a key and a weight is
// at least 2^-99, times the scale 2^-125, and the largest sum is below 2^122. Rows and keys outside have no bound. Only
// the bound's own product with the scale may be subnormal; the exact score then is zero, or normal and below it.
#include "screen.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "e4m3.h"

namespace longfill {
namespace {

constexpr float kLeastQuery = 0x1p-20f;
constexpr float kMostQuery = 0x1p20f;
constexpr float kLeastWeight = 0x1p-40f;
constexpr float kMostWeight = 0x1p40f;
constexpr float kLeastScale = 0x1p-26f;
constexpr float kMostScale = 0x1p30f;
constexpr float kMostInteger = 127.0f;

ScreenKeyTables build() {
  ScreenKeyTables tables;
  for (int byte = 0; byte < 127; ++byte) {
    const float value = e4m3.as_float[byte];
    const float integer = std::fmin(std::nearbyint(value / kKeyStep), kMostInteger);
    tables.magnitude[byte] = static_cast<std::uint8_t>(integer);
    tables.error[byte] = static_cast<std::uint8_t>(std::ceil(std::fabs(value - kKeyStep * integer) / kErrorUnit));
  }
  // A key with a NaN has no score that could be chosen: any bound will do.
  tables.magnitude[127] = 0;
  tables.error[127] = 0;
  return tables;
}

bool in_range(float magnitude, float least, float most) { return magnitude >= least && magnitude <= most; }

// The exact kernel may round queries to bf16: only those that it keeps have a bound.
bool is_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & 0xffff) == 0;
}

struct HeadNorms {
  double query = 0;
  double error = 0;
  bool bounded = true;
};

HeadNorms pack_head(const float* query, int dim, std::int8_t* out, std::int32_t& offset, float& sigma) {
  HeadNorms norms;
  float largest = 0.0f;
  for (int d = 0; d < dim; ++d) {
    const float magnitude = std::fabs(query[d]);
    norms.bounded &= magnitude == 0.0f || (in_range(magnitude, kLeastQuery, kMostQuery) && is_bf16(query[d]));
    largest = magnitude > largest ? magnitude : largest;
  }
  offset = 0;
  sigma = 0.0f;
  if (!norms.bounded || largest == 0.0f) {
    std::fill(out, out + dim, std::int8_t{0});
    return norms;
  }
  sigma = largest / kMostInteger;
  const float inverse = 1.0f / sigma;
  double squares = 0;
  double errors = 0;
  std::int32_t sum = 0;
  for (int d = 0; d < dim; ++d) {
    // Any rounding will do: the error is measured.
    const float scaled = query[d] * inverse;
    auto integer = static_cast<int>(scaled + (scaled < 0.0f ? -0.5f : 0.5f));
    integer = integer > 127 ? 127 : integer < -127 ? -127 : integer;
    const double error = static_cast<double>(query[d]) - static_cast<double>(sigma) * integer;
    out[d] = static_cast<std::int8_t>(integer);
    squares += static_cast<double>(query[d]) * query[d];
    errors += error * error;
    sum += integer;
  }
  offset = -128 * sum;
  norms.query = std::sqrt(squares);
  norms.error = std::sqrt(errors);
  return norms;
}

float round_up(double value) {
  if (value == 0) return 0.0f;  // so that a row without weights drops what ties with its zeros
  return std::nextafter(static_cast<float>(value), std::numeric_limits<float>::infinity());
}

}  // namespace

const ScreenKeyTables& screen_keys() {
  static const ScreenKeyTables tables = build();
  return tables;
}

void pack_screen_row(const float* queries, const float* weights, int heads, int dim, ScreenRow& row) {
  double query_sum = 0;
  double error_sum = 0;
  bool bounded = true;
  for (int h = 0; h < heads; ++h) {
    const std::int64_t at = static_cast<std::int64_t>(h) * dim;
    float sigma;
    const HeadNorms norms = pack_head(queries + at, dim, row.query + at, row.offsets[h], sigma);
    const float magnitude = std::fabs(weights[h]);
    // A head without a query adds exactly zero, whatever its finite weight.
    const bool silent = magnitude == 0.0f || (norms.query == 0.0 && std::isfinite(magnitude));
    bounded &= norms.bounded && (silent || in_range(magnitude, kLeastWeight, kMostWeight));
    row.factors[h] = silent ? 0.0f : weights[h] * sigma * kKeyStep;
    query_sum += silent ? 0.0 : magnitude * norms.query;
    error_sum += silent ? 0.0 : magnitude * norms.error;
  }
  if (!bounded) {
    for (int h = 0; h < heads; ++h) row.factors[h] = 0.0f;
    row.error_weight = row.norm_weight = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const double g = (4.0 * dim + 2.0 * heads + 32.0) * 0x1p-24;
  row.error_weight = round_up(query_sum * (1 + 2 * g) * (1 + 4 * g));
  row.norm_weight = round_up((error_sum + 3 * g * (query_sum + error_sum)) * (1 + 4 * g));
}

bool screened_scale(float scale) { return in_range(scale, kLeastScale, kMostScale); }

}  // namespace longfill
