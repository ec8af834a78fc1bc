// What the memory of this machine can do: the ceilings that kernels bound by memory are measured against.
//
// Invariant: every cache line of the buffers crosses once a call, in pieces that the threads take in turn.
#pragma once

#include <cstdint>

namespace longfill {

// Reads `bytes` (whole lines of 64, aligned) and returns the sum of each line's first 8 bytes, so that no load can be
// left out.
std::uint64_t read_memory(const void* data, std::int64_t bytes, int num_threads);

// Copies `bytes` from `source` to `target`, which do not overlap.
void copy_memory(void* target, const void* source, std::int64_t bytes, int num_threads);

}  // namespace longfill
