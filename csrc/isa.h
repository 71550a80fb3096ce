// Which instruction-set units were built and can run here.
#pragma once

#include <vector>

#include "registry.h"

namespace quire {

struct Unit {
    const char* name;
    const OpEntry* ops;
    size_t count;
};

// Best first; the portable unit is always last.
const std::vector<Unit>& supported_units();

}  // namespace quire
