#include "isa.h"

#include "processor.h"

namespace quire {

#define UNIT(name)                           \
    namespace name {                         \
    extern const OpList* const kOpLists[];   \
    }
#include "units.inc"
#undef UNIT

const std::vector<Unit>& supported_units() {
    static const std::vector<Unit> units = [] {
        std::vector<Unit> found;
#define UNIT(name) \
    if (processor::name()) found.push_back({#name, name::kOpLists});
#include "units.inc"
#undef UNIT
        return found;
    }();
    return units;
}

}  // namespace quire
