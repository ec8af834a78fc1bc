// Which instruction sets this machine runs, asked once.
#include <stdexcept>

#include "isa.h"

namespace longfill {

const std::vector<const Isa*>& supported_isas() {
  static const std::vector<const Isa*> found = [] {
    std::vector<const Isa*> isas;
#ifdef LONGFILL_X86
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#ifdef LONGFILL_AVX512_BF16
    // All but the first processors with bf16 have the others.
    const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
    if (avx512 && bf16) isas.push_back(&avx512_bf16_isa);
#endif
    if (avx512) isas.push_back(&avx512_isa);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isas.push_back(&avx2_isa);
#endif
    isas.push_back(&portable_isa);
    return isas;
  }();
  return found;
}

const Isa& isa_named(const std::string& name) {
  std::string known;
  for (const Isa* isa : supported_isas()) {
    if (name == isa->name) return *isa;
    known += known.empty() ? "" : ", ";
    known += isa->name;
  }
  throw std::invalid_argument("instruction set '" + name + "' is not available here; choose one of " + known);
}

Isa with_float_keys(const Isa& isa) {
#ifdef LONGFILL_X86
  Isa chosen = isa.transpose_block == nullptr ? avx512_isa : isa;
#else
  Isa chosen = isa;
#endif
  chosen.unpack_block = chosen.transpose_block;
  chosen.screen = nullptr;
  return chosen;
}

}  // namespace longfill
