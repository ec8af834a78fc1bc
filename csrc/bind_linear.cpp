#include "bind.h"

namespace longfill {

void bind_linear(nanobind::module_&) {}

}  // namespace longfill
