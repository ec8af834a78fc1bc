#include "bind.h"
#include "threads.h"

NB_MODULE(_native, m) {
  m.doc() = "CPU kernels of longfill.";
  longfill::bind_index(m);
  longfill::bind_linear(m);
  longfill::bind_experts(m);
  longfill::bind_attention(m);
  longfill::bind_rows(m);
  longfill::bind_bench(m);
  m.def("tasks_done", &longfill::tasks_done, "Tasks of kernels done since the process began; grows while one runs.");
}
