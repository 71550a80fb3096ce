// Which instruction-set units were built and can run here.
#pragma once

#include <vector>

#include "registry.h"

namespace quire {

struct Unit {
    const char* name;
    const OpList* const* ops;  // the lists of its files; the last is null
};

// Best first.
const std::vector<Unit>& supported_units();

}  // namespace quire
