// The ceilings of memory, for `longfill bench`.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "bench.h"
#include "bind.h"

namespace nb = nanobind;

namespace longfill {
namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

std::uint64_t read_memory_py(const ConstBytes& data, int num_threads) {
  require(num_threads >= 1, "read_memory: num_threads must be at least 1");
  require(data.shape(0) % 64 == 0 && reinterpret_cast<std::uintptr_t>(data.data()) % 64 == 0,
          "read_memory: the data must be whole, aligned lines of 64 bytes");
  nb::gil_scoped_release release;
  return read_memory(data.data(), static_cast<std::int64_t>(data.shape(0)), num_threads);
}

void copy_memory_py(const Bytes& target, const ConstBytes& source, int num_threads) {
  require(num_threads >= 1, "copy_memory: num_threads must be at least 1");
  require(target.shape(0) == source.shape(0), "copy_memory: the sizes differ");
  const auto* const from = source.data();
  const auto* const to = target.data();
  require(to + target.shape(0) <= from || from + source.shape(0) <= to, "copy_memory: the buffers overlap");
  nb::gil_scoped_release release;
  copy_memory(target.data(), source.data(), static_cast<std::int64_t>(source.shape(0)), num_threads);
}

}  // namespace

void bind_bench(nb::module_& m) {
  m.def("read_memory", &read_memory_py, nb::arg("data").noconvert(), nb::arg("num_threads"));
  m.def("copy_memory", &copy_memory_py, nb::arg("target").noconvert(), nb::arg("source").noconvert(),
        nb::arg("num_threads"));
}

}  // namespace longfill
