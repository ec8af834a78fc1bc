// What a row passes through between the matrix products: norms, rotary embedding, rounding to e4m3, both cache writes.
//
// Invariant: all of it is fp32 arithmetic on one row alone, in an order that its width fixes; rows in a call, threads
// and instruction sets change no bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"
#include "latent.h"

namespace longfill {

enum class ValueType { kFloat32, kBf16 };

constexpr float kIndexNormEps = 1e-6f;     // of the index keys' LayerNorm
// The least largest value that a scale is made for.
constexpr float kLatentFloor = 1e-4f;
constexpr float kIndexKeyFloor = 1e-4f;
constexpr float kIndexQueryFloor = 1e-10f;

// Rows of values, `stride` bytes apart.
struct ConstRows {
  const char* data;
  std::int64_t stride;
};
struct Rows {
  char* data;
  std::int64_t stride;
};

// Cosines and sines of each row's position, of P / 2 pairs each. Pairs are (0, 1), (2, 3)... or (i, i + P / 2).
struct Rotation {
  ConstRows cos;
  ConstRows sin;
  std::int64_t pairs;
  bool interleaved;
};

// Where the pool keeps row `slot`: page slot / page_size, strides in bytes.
struct PagedRows {
  char* data;
  std::int64_t page_stride;
  std::int64_t row_stride;
  std::int64_t page_size;

  char* at(std::int64_t slot) const {
    return data + slot / page_size * page_stride + slot % page_size * row_stride;
  }
};

// out = x / rms(x) * weight.
struct RmsNormArgs {
  ValueType type;  // of every row and the weight
  ConstRows x;
  const char* weight;
  float eps;
  Rows out;
  std::int64_t width;
};

struct StoreLatentArgs {
  ValueType type;  // of kv and norm
  ConstRows kv;    // rank values to normalise, then 2 * pairs to rotate
  const char* norm;
  float eps;
  Rotation rotation;
  std::int64_t rank;
  LatentFormat format;
  float scale;       // of kFp8: powers of two
  float rope_scale;
  const std::int64_t* slots;  // one a row, no two the same
  PagedRows cache;
};

struct StoreIndexKeysArgs {
  ValueType type;  // of the keys
  ConstRows keys;
  const float* weight;  // of the LayerNorm
  const float* bias;
  Rotation rotation;
  std::int64_t dim;
  const std::int64_t* slots;  // one a row, no two the same
  PagedRows values;
  PagedRows scales;  // null: values are stored as fp32
};

struct IndexQueriesArgs {
  ValueType type;  // of the queries
  ConstRows queries;
  ConstRows weights;  // fp32, one a head
  float weight_scale;
  Rotation rotation;
  std::int64_t heads;
  std::int64_t dim;
  bool quantise;
  float* out_queries;  // contiguous
  float* out_weights;
};

struct RotateArgs {
  ValueType type;  // of x and out
  ConstRows x;
  std::int64_t x_head_stride;  // bytes
  Rotation rotation;
  std::int64_t heads;
  Rows out;
  std::int64_t out_head_stride;
};

// One instruction set's copy of rows_steps.h: rows [first, last) of a call. `scratch` is a thread's own.
struct RowSteps {
  void (*rms_norm)(const RmsNormArgs& args, std::int64_t first, std::int64_t last);
  void (*store_latent)(const StoreLatentArgs& args, std::int64_t first, std::int64_t last, float* scratch);
  void (*store_index_keys)(const StoreIndexKeysArgs& args, std::int64_t first, std::int64_t last, float* scratch);
  void (*index_queries)(const IndexQueriesArgs& args, std::int64_t first, std::int64_t last);
  void (*rotate)(const RotateArgs& args, std::int64_t first, std::int64_t last, float* scratch);
};

void rms_norm(const Isa& isa, const RmsNormArgs& args, std::int64_t rows, int num_threads);
void store_latent(const Isa& isa, const StoreLatentArgs& args, std::int64_t rows, int num_threads);
void store_index_keys(const Isa& isa, const StoreIndexKeysArgs& args, std::int64_t rows, int num_threads);
void index_queries(const Isa& isa, const IndexQueriesArgs& args, std::int64_t rows, int num_threads);
void rotate(const Isa& isa, const RotateArgs& args, std::int64_t rows, int num_threads);

// Row i of `bytes` bytes goes from place order[i] of `from` into slot slots[i]; slots are distinct.
struct PutRowsArgs {
  ConstRows from;
  std::int64_t bytes;
  const std::int64_t* order;
  const std::int64_t* slots;
  PagedRows pages;
};
void put_rows(const PutRowsArgs& args, std::int64_t rows, int num_threads);

// What one call allocates for itself, at most; `width` counts the values of a row that is stored or of a head that is
// rotated.
std::size_t row_scratch_bytes(std::int64_t width, int num_threads);

}  // namespace longfill
