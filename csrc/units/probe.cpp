// Limits of this machine, for the tuner and benchmarks.
#include "probe.h"

namespace quire::QUIRE_UNIT {

constexpr OpEntry kOps[] = {
    op_entry<&probe_read>("probe_read"),
    op_entry<&probe_f32>("probe_f32"),
    op_entry<&probe_bf16>("probe_bf16"),
    op_entry<&probe_int8>("probe_int8"),
#if defined(QUIRE_AMX)
    op_entry<&probe_tiles_int8>("probe_tiles_int8"),
    op_entry<&probe_tiles_bf16>("probe_tiles_bf16"),
    op_entry<&probe_tiles_g32>("probe_tiles_g32"),
    op_entry<&probe_tiles_g64>("probe_tiles_g64"),
    op_entry<&probe_tiles_g128>("probe_tiles_g128"),
#endif
};
extern const OpList kProbeOps;
const OpList kProbeOps = list_of(kOps);

}  // namespace quire::QUIRE_UNIT
