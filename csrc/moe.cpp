// Mixture of experts: the order of the pairs (token, choice) by expert, and one linear per expert over its pairs. Which expert
// has how many pairs is read from memory when the op runs, so that a recorded step can be replayed for other tokens.
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "registry.h"

namespace quire {
namespace {

constexpr int64_t kMostSlots = 40;

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

// `table` [experts][slots]: the arguments of the linear op `op` with each expert's matrix: output, input, ..., rows, n, k, group.
// With `tokens`, the rows of an expert are first gathered into `gathered` [pairs, k].
void grouped_linear(float* out, const float* x, Optional<float> gathered, const int64_t* table, Optional<const int32_t> tokens,
                    const int32_t* offsets, int64_t op, int64_t slots, int64_t experts, int64_t x_rows, int64_t pairs, int64_t n, int64_t k) {
    const OpEntry& linear = op_of(op);
    const size_t arity = std::strlen(linear.signature);
    if (static_cast<int64_t>(arity) != slots || slots > kMostSlots || slots < 6 || std::strncmp(linear.signature, "pp", 2) != 0)
        fail("grouped_linear: the table does not hold calls of that op");
    if (tokens.ptr && !gathered.ptr) fail("grouped_linear: nowhere to gather rows");
    if (offsets[0] != 0 || offsets[experts] != pairs) fail("grouped_linear: offsets must run from 0 to the number of pairs");
    for (int64_t e = 0; e < experts; ++e)
        if (offsets[e + 1] < offsets[e]) fail("grouped_linear: offsets must ascend");
    for (int64_t i = 0; tokens.ptr && i < pairs; ++i)
        if (tokens.ptr[i] < 0 || tokens.ptr[i] >= x_rows) fail("grouped_linear: a token lies outside the batch");
    for (int64_t e = 0; e < experts; ++e) {
        const int64_t begin = offsets[e], rows = offsets[e + 1] - begin;
        if (rows == 0) continue;
        const float* from = x + begin * k;
        if (tokens.ptr) {
            parallel_ranges(rows, k, [&](int64_t first, int64_t last) {
                for (int64_t i = begin + first; i < begin + last; ++i)
                    std::memcpy(gathered.ptr + i * k, x + tokens.ptr[i] * k, static_cast<size_t>(k) * sizeof(float));
            });
            from = gathered.ptr + begin * k;
        }
        Slot call[kMostSlots];
        for (int64_t i = 0; i < slots; ++i) call[i].i = table[e * slots + i];
        call[0].i = reinterpret_cast<int64_t>(out + begin * n);
        call[1].i = reinterpret_cast<int64_t>(from);
        call[slots - 4].i = rows;
        linear.call(call);
    }
}

const OpEntry kOps[] = {
    op_entry<&sort_by_expert>("sort_by_expert"),
    op_entry<&grouped_linear>("grouped_linear"),
};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
