#include "route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "threads.h"
#include "topk.h"
#include "vmath.h"

namespace longfill {
namespace {

constexpr std::int64_t kLanes = 4;  // every architecture has them
constexpr std::int64_t kTaskRows = 32;
typedef float Floats __attribute__((vector_size(16)));

std::int64_t padded(std::int64_t experts) { return (experts + kLanes - 1) / kLanes * kLanes; }

Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

// `scores` has room for whole vectors.
void sigmoid(float* scores, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) store(scores + i, 1.0f / (1.0f + vexp(-load(scores + i))));
}

void softmax(float* scores, std::int64_t n) {
  const float highest = *std::max_element(scores, scores + n);
  std::fill(scores + n, scores + padded(n), -std::numeric_limits<float>::infinity());
  Floats sums{};
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats e = vexp(load(scores + i) - highest);
    store(scores + i, e);
    sums += e;
  }
  const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (std::int64_t i = 0; i < n; i += kLanes) store(scores + i, load(scores + i) / sum);
}

std::int32_t rank(float value) {
  return value != value ? std::numeric_limits<std::int32_t>::max() : order_key(value);
}

// The k best of values added one after the other, equals in the order of their coming.
class Best {
 public:
  explicit Best(std::int64_t k) : k_(k) { found_.reserve(static_cast<std::size_t>(k) + 1); }

  void clear() { found_.clear(); }

  void add(float value, std::int64_t id) {
    const std::int32_t key = rank(value);
    if (full() && key <= found_.back().key) return;
    const auto after = std::find_if(found_.begin(), found_.end(), [&](const Found& f) { return f.key < key; });
    found_.insert(after, {key, value, id});
    if (static_cast<std::int64_t>(found_.size()) > k_) found_.pop_back();
  }

  float value(std::size_t place) const { return found_[place].value; }

  // In ascending order, one after the other to `out`.
  void ids(std::int64_t* out) const {
    for (const Found& f : found_) *out++ = f.id;
    std::sort(out - found_.size(), out);
  }

 private:
  struct Found {
    std::int32_t key;
    float value;
    std::int64_t id;
  };

  bool full() const { return static_cast<std::int64_t>(found_.size()) == k_; }

  std::int64_t k_;
  std::vector<Found> found_;
};

// Chooses for one row after another.
class Chooser {
 public:
  Chooser(const Choice& choice, const float* bias, std::int64_t experts)
      : choice_(choice),
        bias_(bias),
        experts_(experts),
        group_size_(experts / choice.groups),
        best_(choice.k),
        best_groups_(choice.kept_groups),
        best_two_(2),
        kept_(static_cast<std::size_t>(choice.kept_groups)),
        biased_(static_cast<std::size_t>(experts)) {}

  void run(float* scores, std::int64_t* ids, float* weights) {
    choice_.scoring == Scoring::kSigmoid ? sigmoid(scores, experts_) : softmax(scores, experts_);
    for (std::int64_t e = 0; e < experts_; ++e) biased_[e] = bias_ == nullptr ? scores[e] : scores[e] + bias_[e];
    if (choice_.groups > 1 && choice_.group_value != GroupValue::kNone) close_groups();
    best_.clear();
    for (std::int64_t e = 0; e < experts_; ++e) best_.add(biased_[e], e);
    best_.ids(ids);
    float sum = 0.0f;
    for (std::int64_t i = 0; i < choice_.k; ++i) sum += scores[ids[i]];
    const float divisor = choice_.normalise ? sum + 1e-20f : 1.0f;
    for (std::int64_t i = 0; i < choice_.k; ++i) weights[i] = scores[ids[i]] / divisor * choice_.scale;
  }

 private:
  // Experts outside the best groups lose their score; they are chosen only where nothing else is left.
  void close_groups() {
    best_groups_.clear();
    for (std::int64_t g = 0; g < choice_.groups; ++g) {
      best_two_.clear();
      for (std::int64_t e = g * group_size_; e < (g + 1) * group_size_; ++e) best_two_.add(biased_[e], e);
      const bool two = choice_.group_value == GroupValue::kBestTwo;
      best_groups_.add(two ? best_two_.value(0) + best_two_.value(1) : best_two_.value(0), g);
    }
    best_groups_.ids(kept_.data());
    for (std::int64_t e = 0; e < experts_; ++e)
      if (!std::binary_search(kept_.begin(), kept_.end(), e / group_size_))
        biased_[e] = -std::numeric_limits<float>::infinity();
  }

  const Choice& choice_;
  const float* bias_;
  std::int64_t experts_;
  std::int64_t group_size_;
  Best best_;
  Best best_groups_;
  Best best_two_;
  std::vector<std::int64_t> kept_;
  std::vector<float> biased_;
};

std::int64_t logit_bytes(const Layout& router, std::int64_t rows) {
  return std::min(rows, kBlockRows) * padded(router.n) * 4;
}

}  // namespace

void route(const Isa& isa, const PackedMatrix& router, const float* bias, const Choice& choice, const Activations& x,
           std::int64_t rows, std::int64_t* ids, float* weights, int num_threads) {
  const std::int64_t experts = router.layout.n;
  const std::int64_t stride = padded(experts);
  const Bytes bytes = allocate(static_cast<std::size_t>(logit_bytes(router.layout, rows)));
  float* const logits = reinterpret_cast<float*>(bytes.get());
  for (std::int64_t first = 0; first < rows; first += kBlockRows) {
    const std::int64_t count = std::min(kBlockRows, rows - first);
    const Activations block{x.data + first * x.stride, x.stride, x.element};
    linear(isa, router, block, count, {bytes.get(), stride * 4, Element::kFloat32}, num_threads);
    for_tasks(num_threads, (count + kTaskRows - 1) / kTaskRows, [&](std::int64_t task, int) {
      Chooser chooser(choice, bias, experts);
      for (std::int64_t r = task * kTaskRows; r < std::min(count, (task + 1) * kTaskRows); ++r)
        chooser.run(logits + r * stride, ids + (first + r) * choice.k, weights + (first + r) * choice.k);
    });
  }
}

std::int64_t route_scratch_bytes(const Isa& isa, const Layout& router, std::int64_t rows, int num_threads) {
  return logit_bytes(router, rows) + linear_scratch_bytes(isa, router, rows, num_threads);
}

}  // namespace longfill
