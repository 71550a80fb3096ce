// Ops of layers that keep a state: the delta rule, selective scans, and the gated norm behind them.
#include "delta_rule.h"
#include "gated_norm.h"
#include "ssm_scan.h"

namespace quire::QUIRE_UNIT {

constexpr OpEntry kOps[] = {
    op_entry<&delta_rule>("delta_rule"),
    op_entry<&ssm_scan>("ssm_scan"),
    op_entry<&gated_rmsnorm>("gated_rmsnorm"),
    op_entry<&scale_by_softplus>("scale_by_softplus"),
};
extern const OpList kRecurrentOps;
const OpList kRecurrentOps = list_of(kOps);

}  // namespace quire::QUIRE_UNIT
