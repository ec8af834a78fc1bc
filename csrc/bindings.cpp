#include "bind.h"

NB_MODULE(_native, m) {
  m.doc() = "CPU kernels of longfill.";
  longfill::bind_index(m);
  longfill::bind_linear(m);
  longfill::bind_attention(m);
  longfill::bind_rows(m);
  longfill::bind_bench(m);
}
