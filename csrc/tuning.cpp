#include "tuning.h"

#include "registry.h"

namespace quire {

Tuning g_tuning;

namespace {

void set_tuning(int64_t ahead, int64_t tile_rows, int64_t row_streams) {
    if (ahead < 0 || ahead > (int64_t{1} << 20)) fail("set_tuning: bytes ahead must lie in [0, 2^20]");
    if (tile_rows < 1 || row_streams < 1) fail("set_tuning: rows and streams are at least one");
    g_tuning = {ahead, tile_rows, row_streams};
}

const OpEntry kOps[] = {op_entry<&set_tuning>("set_tuning")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
