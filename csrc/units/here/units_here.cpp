// Prints the units that this processor runs, best first, for a build of the best alone.
#include <cstdio>

#include "processor.h"

int main() {
    const char* separator = "";
#define UNIT(name)                                  \
    if (quire::processor::name()) {                 \
        std::printf("%s%s", separator, #name);      \
        separator = ";";                            \
    }
#include "units.inc"
#undef UNIT
}
