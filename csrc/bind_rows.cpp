#include "bind.h"

namespace longfill {

void bind_rows(nanobind::module_&) {}

}  // namespace longfill
