// Products of rows with packed weights.
//
// Rows are taken in blocks and packed once a block, in slices of the inputs; then each thread takes panels of the
// weights and runs through the slices. Invariant: an output is one chain of multiply-adds over the inputs in ascending
// order, continued from slice to slice, so blocks, panels, parts and threads change no bit of it.
#pragma once

#include <cstdint>
#include <functional>

#include "memory.h"
#include "pack.h"

namespace longfill {

enum class Element { kFloat32, kBfloat16 };

inline std::int64_t bytes_of(Element element) { return element == Element::kFloat32 ? 4 : 2; }

constexpr std::int64_t kBlockRows = 512;   // most rows packed together
constexpr std::int64_t kSliceSteps = 128;  // a panel's slice stays in L1 beside a few rows: 32 KB at 64 columns

constexpr std::int64_t kCacheLine = 64;

// Row r starts at `data + (index ? index[r] : r) * stride`; its values are adjacent. Strides in bytes.
struct Activations {
  const char* data;
  std::int64_t stride;
  Element element;
  const std::int64_t* index = nullptr;
};

struct Output {
  char* data;
  std::int64_t stride;
  Element element;
};

// A block of rows as the tiles read it: slice after slice, each its rows one after the other. A step is four bytes.
struct PackedRows {
  char* data;
  std::int64_t rows;
  std::int64_t slice_steps;
  std::int64_t slices;

  PackedRows(Carver& carver, const Layout& weights, std::int64_t rows);
  std::int64_t row_bytes() const { return 4 * slice_steps; }
  char* at(std::int64_t slice, std::int64_t row) const { return data + (slice * rows + row) * row_bytes(); }
};

// Sums of one panel, and its fp8 or bf16 weights decoded where the tiles cannot read them as they are.
struct PanelRoom {
  float* sums;
  char* decoded;

  PanelRoom(Carver& carver, const Isa& isa, std::int64_t rows);
};

// How many of `rows` are packed together for weights of that layout.
std::int64_t block_rows(const Layout& weights, std::int64_t rows);

// `work(first, count)` for all of `rows`, in as few blocks of at most `together` as there can be, evenly cut: a small
// last block would read all weights for a few rows.
template <class Work>
void for_blocks(std::int64_t rows, std::int64_t together, const Work& work) {
  const std::int64_t blocks = rows == 0 ? 0 : (rows + together - 1) / together;
  for (std::int64_t block = 0, first = 0; block < blocks; ++block) {
    const std::int64_t end = rows * (block + 1) / blocks;
    work(first, end - first);
    first = end;
  }
}

// Slice `slice` of a row, as the tiles read it.
void pack_slice(const Isa& isa, const Layout& weights, const char* row, Element element, std::int64_t slice, char* to);

// Rows [first, first + count) of `from` become rows [to_row, ...) of `to`, whose weights have the layout `weights`.
void pack_rows(const Isa& isa, const Layout& weights, const Activations& from, std::int64_t first, std::int64_t count,
               const PackedRows& to, std::int64_t to_row);

// `finish(r, count)` uses the sums of rows [r, r + count), counted from the first one.
using Finish = std::function<void(std::int64_t, std::int64_t)>;

// sums[r][column] = row first + r times the panel, for `count` rows, a row `panel_columns` floats long. What lies at
// `next` is fetched meanwhile: the panel after this one.
void multiply_panel(const Isa& isa, const PackedMatrix& matrix, std::int64_t panel, const PackedRows& rows,
                    std::int64_t first, std::int64_t count, const PanelRoom& room, const Fetch& next,
                    const Finish& finish);

// The start of a panel, to be fetched before its turn; nothing where there is no such panel.
Fetch start_of_panel(const PackedMatrix& matrix, std::int64_t panel);

// Adds the bias to sums of that panel, and stores them: row r of `count` comes from sums + r * panel_columns.
void store_panel(const Isa& isa, const PackedMatrix& matrix, std::int64_t panel, float* sums, std::int64_t count,
                 const Output& out, std::int64_t first_row);

// Whole vectors at `values` may be overwritten past n.
void store_row(const Isa& isa, const float* values, std::int64_t n, Element element, char* out);

struct PanelTask {
  std::int64_t panel;
  std::int64_t next_panel;  // probably the thread's next one, perhaps past the last
  std::int64_t first_row;
  std::int64_t rows;
  int thread;
};

// Every panel times all of `rows`, in as many parts as keep the threads busy.
void for_panels(const Layout& weights, std::int64_t rows, int num_threads,
                const std::function<void(const PanelTask&)>& work);

// pack_rows by all threads.
void pack_block(const Isa& isa, const Layout& weights, const Activations& from, std::int64_t first, std::int64_t count,
                const PackedRows& to, int num_threads);

// At most num_threads, fewer where the work of rows [rows] x n x k does not pay for starting them.
int useful_threads(std::int64_t rows, std::int64_t n, std::int64_t k, int num_threads);

// out = rows x weights + bias.
void linear(const Isa& isa, const PackedMatrix& matrix, const Activations& x, std::int64_t rows, const Output& out,
            int num_threads);
// The most bytes that `linear` allocates.
std::int64_t linear_scratch_bytes(const Isa& isa, const Layout& weights, std::int64_t rows, int num_threads);

// One product a head: head h reads x.data + h * x_head_stride and writes out.data + h * out_head_stride; its weights
// start `head_bytes` after those of the head before.
struct Heads {
  std::int64_t count;
  std::int64_t head_bytes;
  std::int64_t x_head_stride;
  std::int64_t out_head_stride;
};
void per_head(const Isa& isa, const PackedMatrix& first, const Heads& heads, const Activations& x, std::int64_t rows,
              const Output& out, int num_threads);
std::int64_t per_head_scratch_bytes(const Isa& isa, const Layout& weights, std::int64_t rows, int num_threads);

}  // namespace longfill
