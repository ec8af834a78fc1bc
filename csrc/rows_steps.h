// The row operations of rows.h for one instruction set, a row at a time.
//
// Internal linkage, as in score.h. Invariant: a row's values go through fp32 in the order written here, rounded where
// the reference rounds them (kernels/reference), and through no other row's.
#pragma once

#include "lanes.h"
#include "round_e4m3.h"
#include "rows.h"

namespace longfill {
namespace {

template <class T>
LONGFILL_INLINE const T* row_of(const ConstRows& rows, std::int64_t row) {
  return reinterpret_cast<const T*>(rows.data + row * rows.stride);
}
template <class T>
LONGFILL_INLINE T* row_of(const Rows& rows, std::int64_t row) {
  return reinterpret_cast<T*>(rows.data + row * rows.stride);
}

template <class From, class To>
LONGFILL_INLINE void convert(const From* x, std::int64_t n, To* out) {
  for_vectors(n, [&](std::int64_t i, auto some) { store(out + i, rounded<To>(load(x + i, some)), some); });
}

// In place. Plain loops: the compiler turns them into vectors, and elementwise arithmetic has the same bits either way.
LONGFILL_INLINE void rotate_values(float* __restrict x, const Rotation& rotation, std::int64_t row) {
  const float* const __restrict cos = row_of<float>(rotation.cos, row);
  const float* const __restrict sin = row_of<float>(rotation.sin, row);
  const std::int64_t pairs = rotation.pairs;
  if (rotation.interleaved) {
    for (std::int64_t i = 0; i < pairs; ++i) {
      const float a = x[2 * i];
      const float b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  } else {
    float* const __restrict y = x + pairs;
    for (std::int64_t i = 0; i < pairs; ++i) {
      const float a = x[i];
      const float b = y[i];
      x[i] = a * cos[i] - b * sin[i];
      y[i] = b * cos[i] + a * sin[i];
    }
  }
}

LONGFILL_INLINE float inverse_root(float mean, float eps) { return 1.0f / __builtin_sqrtf(mean + eps); }

template <class T>
LONGFILL_INLINE float rms_factor(const T* x, std::int64_t n, float eps) {
  const float sum = sum_over(n, [&](std::int64_t i, auto some) {
    const Floats v = load(x + i, some);
    return v * v;
  });
  return inverse_root(sum / static_cast<float>(n), eps);
}

// Rounded to T before the weight and, in memory of To as well, after it: as Llama does.
template <class T, class To>
LONGFILL_INLINE void scale_by(const T* x, const T* weight, float factor, std::int64_t n, To* out) {
  for_vectors(n, [&](std::int64_t i, auto some) {
    const Floats scaled = rounded<T>(load(x + i, some) * factor);
    store(out + i, rounded<T>(scaled * load(weight + i, some)), some);
  });
}

template <class T>
void rms_norm_rows(const RmsNormArgs& a, std::int64_t first, std::int64_t last) {
  const T* const weight = reinterpret_cast<const T*>(a.weight);
  for (std::int64_t row = first; row < last; ++row) {
    const T* const x = row_of<T>(a.x, row);
    scale_by(x, weight, rms_factor(x, a.width, a.eps), a.width, row_of<T>(a.out, row));
  }
}

template <class To>
LONGFILL_INLINE void store_parts(const float* latent, std::int64_t rank, const float* rope, std::int64_t rope_dim,
                                 char* out) {
  convert(latent, rank, reinterpret_cast<To*>(out));
  convert(rope, rope_dim, reinterpret_cast<To*>(out) + rank);
}

LONGFILL_INLINE void store_ds_mla(const float* latent, std::int64_t rank, const float* rope, std::int64_t rope_dim,
                                  char* out) {
  auto* const values = reinterpret_cast<std::uint8_t*>(out);
  char* scales = out + rank;
  for (std::int64_t i = 0; i < rank; i += kScaleGroup, scales += sizeof(float)) {
    const std::int64_t count = rank - i < kScaleGroup ? rank - i : kScaleGroup;
    const float scale = pow2_scale(largest_magnitude(latent + i, count), kLatentFloor);
    quantise(latent + i, count, scale, values + i);
    std::memcpy(scales, &scale, sizeof scale);
  }
  convert(rope, rope_dim, reinterpret_cast<Bf16*>(scales));
}

template <class T>
void store_latent_rows(const StoreLatentArgs& a, std::int64_t first, std::int64_t last, float* scratch) {
  const std::int64_t rope_dim = 2 * a.rotation.pairs;
  float* const latent = scratch;
  float* const rope = scratch + (a.rank + kLanes - 1) / kLanes * kLanes;
  const T* const norm = reinterpret_cast<const T*>(a.norm);
  for (std::int64_t row = first; row < last; ++row) {
    const T* const kv = row_of<T>(a.kv, row);
    scale_by(kv, norm, rms_factor(kv, a.rank, a.eps), a.rank, latent);
    convert(kv + a.rank, rope_dim, rope);
    rotate_values(rope, a.rotation, row);
    for_vectors(rope_dim, [&](std::int64_t i, auto some) { store(rope + i, rounded<T>(load(rope + i, some)), some); });
    char* const out = a.cache.at(a.slots[row]);
    switch (a.format) {
      case LatentFormat::kFloat32: store_parts<float>(latent, a.rank, rope, rope_dim, out); break;
      case LatentFormat::kBfloat16: store_parts<Bf16>(latent, a.rank, rope, rope_dim, out); break;
      case LatentFormat::kFp8:
        quantise(latent, a.rank, a.scale, reinterpret_cast<std::uint8_t*>(out));
        quantise(rope, rope_dim, a.rope_scale, reinterpret_cast<std::uint8_t*>(out) + a.rank);
        break;
      case LatentFormat::kFp8DsMla: store_ds_mla(latent, a.rank, rope, rope_dim, out); break;
    }
  }
}

// out = (x - mean) / standard deviation * weight + bias.
template <class T>
LONGFILL_INLINE void layer_norm(const T* x, const float* weight, const float* bias, std::int64_t n, float* out) {
  const float mean = sum_over(n, [&](std::int64_t i, auto some) { return load(x + i, some); }) / static_cast<float>(n);
  for_vectors(n, [&](std::int64_t i, auto some) { store(out + i, load(x + i, some) - mean, some); });
  const float factor = rms_factor(out, n, kIndexNormEps);
  for_vectors(n, [&](std::int64_t i, auto some) {
    store(out + i, load(out + i, some) * factor * load(weight + i, some) + load(bias + i, some), some);
  });
}

template <class T>
void store_index_key_rows(const StoreIndexKeysArgs& a, std::int64_t first, std::int64_t last, float* scratch) {
  for (std::int64_t row = first; row < last; ++row) {
    layer_norm(row_of<T>(a.keys, row), a.weight, a.bias, a.dim, scratch);
    rotate_values(scratch, a.rotation, row);
    char* const out = a.values.at(a.slots[row]);
    if (a.scales.data == nullptr) {
      std::memcpy(out, scratch, a.dim * sizeof(float));
      continue;
    }
    const float scale = pow2_scale(largest_magnitude(scratch, a.dim), kIndexKeyFloor);
    quantise(scratch, a.dim, scale, reinterpret_cast<std::uint8_t*>(out));
    std::memcpy(a.scales.at(a.slots[row]), &scale, sizeof scale);
  }
}

template <class T>
void index_query_rows(const IndexQueriesArgs& a, std::int64_t first, std::int64_t last) {
  for (std::int64_t row = first; row < last; ++row) {
    const T* const q = row_of<T>(a.queries, row);
    const float* const w = row_of<float>(a.weights, row);
    for (std::int64_t head = 0; head < a.heads; ++head) {
      float* const out = a.out_queries + (row * a.heads + head) * a.dim;
      float weight = w[head] * a.weight_scale;
      convert(q + head * a.dim, a.dim, out);
      rotate_values(out, a.rotation, row);
      if (a.quantise) {
        const float scale = pow2_scale(largest_magnitude(out, a.dim), kIndexQueryFloor);
        quantise_values(out, a.dim, scale);
        weight *= scale;
      }
      a.out_weights[row * a.heads + head] = weight;
    }
  }
}

template <class T>
void rotate_rows(const RotateArgs& a, std::int64_t first, std::int64_t last, float* scratch) {
  const std::int64_t width = 2 * a.rotation.pairs;
  for (std::int64_t row = first; row < last; ++row)
    for (std::int64_t head = 0; head < a.heads; ++head) {
      convert(reinterpret_cast<const T*>(a.x.data + row * a.x.stride + head * a.x_head_stride), width, scratch);
      rotate_values(scratch, a.rotation, row);
      convert(scratch, width, reinterpret_cast<T*>(a.out.data + row * a.out.stride + head * a.out_head_stride));
    }
}

// Both value types behind one function.
#define LONGFILL_FOR_TYPE(function, ...) \
  a.type == ValueType::kBf16 ? function<Bf16>(a, __VA_ARGS__) : function<float>(a, __VA_ARGS__)

constexpr RowSteps row_steps = {
    [](const RmsNormArgs& a, std::int64_t first, std::int64_t last) {
      LONGFILL_FOR_TYPE(rms_norm_rows, first, last);
    },
    [](const StoreLatentArgs& a, std::int64_t first, std::int64_t last, float* scratch) {
      LONGFILL_FOR_TYPE(store_latent_rows, first, last, scratch);
    },
    [](const StoreIndexKeysArgs& a, std::int64_t first, std::int64_t last, float* scratch) {
      LONGFILL_FOR_TYPE(store_index_key_rows, first, last, scratch);
    },
    [](const IndexQueriesArgs& a, std::int64_t first, std::int64_t last) {
      LONGFILL_FOR_TYPE(index_query_rows, first, last);
    },
    [](const RotateArgs& a, std::int64_t first, std::int64_t last, float* scratch) {
      LONGFILL_FOR_TYPE(rotate_rows, first, last, scratch);
    },
};

#undef LONGFILL_FOR_TYPE

}  // namespace
}  // namespace longfill
