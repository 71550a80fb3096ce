// Which instruction-set units were built and can run here.
#pragma once

#include <vector>

#include "registry.h"

namespace quire {

struct Unit {
    const char* name;
    const OpEntry* ops;
    size_t count;
    const OpEntry* load_ops;  // of units/load.h, which units of one vector width share
    size_t load_count;
};

// Best first; the portable unit is always last.
const std::vector<Unit>& supported_units();

}  // namespace quire
