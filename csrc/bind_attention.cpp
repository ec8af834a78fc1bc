#include "bind.h"

namespace longfill {

void bind_attention(nanobind::module_&) {}

}  // namespace longfill
