// Mixture of experts: the order of the pairs (token, choice) by expert.
#include <cstdint>

#include "registry.h"

namespace quire {
namespace {

// ids [rows, top_k] -> token of the i-th pair in order, place of each pair, offsets [experts + 1]. Counting sort, stable.
void sort_by_expert(int32_t* tokens, int32_t* places, int32_t* offsets, const int32_t* ids, int64_t rows, int64_t top_k, int64_t experts) {
    if (rows < 1 || top_k < 1 || experts < 1 || rows * top_k > INT32_MAX) fail("sort_by_expert: sizes must be positive and fit 31 bits");
    for (int64_t e = 0; e <= experts; ++e) offsets[e] = 0;
    for (int64_t i = 0; i < rows * top_k; ++i) {
        if (ids[i] < 0 || ids[i] >= experts) fail("sort_by_expert: there is no such expert");
        ++offsets[ids[i] + 1];
    }
    for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
    // offsets[e] runs ahead to the end of e's pairs, which is where e + 1 begins; afterwards all move back by one.
    for (int64_t i = 0; i < rows * top_k; ++i) {
        const int32_t place = offsets[ids[i]]++;
        places[i] = place;
        tokens[place] = static_cast<int32_t>(i / top_k);
    }
    for (int64_t e = experts; e > 0; --e) offsets[e] = offsets[e - 1];
    offsets[0] = 0;
}

const OpEntry kOps[] = {
    op_entry<&sort_by_expert>("sort_by_expert"),
};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
