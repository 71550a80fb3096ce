// Numbers that suit one machine and not another, chosen by a measurement at load. They change the speed, never a result.
#pragma once

#include <cstdint>

namespace quire {

struct Tuning {
    int64_t ahead = 8192;     // bytes from the weights in use to those asked for
    int64_t tile_rows = 12;   // fewest rows that tile registers take
    int64_t row_streams = 1;  // column blocks that a single row reads at a time: 1, or more where a unit has kRowStreams
};

extern Tuning g_tuning;

}  // namespace quire
