// Penalties, biases, bans and allow-lists: edits of single logits. The definition is in src/quire/ops/sampling.py.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "pool.h"
#include "registry.h"

namespace quire {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// A row's edits as src/quire/ops/cpu/sampling.py packs them; a null pointer comes with count 0.
struct Edit {
    int64_t row;
    const int32_t* allowed;
    int64_t allowed_count;
    const int32_t* banned;
    int64_t banned_count;
    const int32_t* bias_ids;
    const float* bias;
    int64_t bias_count;
    const int32_t* seen;
    const int32_t* counts;
    int64_t seen_count;
    double repetition, frequency, presence;
    const uint32_t* mask;  // a bit for each id, or null; words for all of them
};
static_assert(sizeof(Edit) == 15 * 8);

void check_ids(const int32_t* ids, int64_t count, int64_t n) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= n) fail("penalize: a token id lies outside the vocabulary");
}

void allow_only(float* x, int64_t n, const int32_t* ids, int64_t count, float* saved) {
    for (int64_t i = 0; i < count; ++i) saved[i] = x[ids[i]];
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] < kInf ? -kInf : x[i];  // NaN and +inf must stay visible
    for (int64_t i = 0; i < count; ++i) x[ids[i]] = saved[i];
}

// Nearly all words are full or empty, within strings or between them: only others are looked at bit by bit.
void allow_bits(float* x, int64_t n, const uint32_t* mask) {
    for (int64_t begin = 0; begin < n; begin += 32) {
        const uint32_t word = mask[begin / 32];
        const int64_t count = std::min<int64_t>(32, n - begin);
        if (word == UINT32_MAX) continue;
        for (int64_t i = 0; i < count; ++i) {
            float& logit = x[begin + i];
            const bool hidden = !(word >> i & 1) && logit < kInf;
            logit = hidden ? -kInf : logit;
        }
    }
}

void apply(float* x, int64_t n, const Edit& e, float* saved) {
    if (e.mask) allow_bits(x, n, e.mask);
    if (e.allowed) allow_only(x, n, e.allowed, e.allowed_count, saved);
    for (int64_t i = 0; i < e.banned_count; ++i)
        if (x[e.banned[i]] < kInf) x[e.banned[i]] = -kInf;
    for (int64_t i = 0; i < e.bias_count; ++i) x[e.bias_ids[i]] += e.bias[i];
    const auto repetition = static_cast<float>(e.repetition), frequency = static_cast<float>(e.frequency),
               presence = static_cast<float>(e.presence);
    for (int64_t i = 0; i < e.seen_count; ++i) {
        float& logit = x[e.seen[i]];
        logit = logit > 0.0f ? logit / repetition : logit * repetition;
        logit -= frequency * static_cast<float>(e.counts[i]);
        if (e.counts[i] > 0) logit -= presence;
    }
}

void penalize(float* logits, int64_t rows, int64_t n, const Edit* edits, int64_t count) {
    if (rows < 1 || n < 1 || count < 0) fail("penalize: there must be rows and a vocabulary");
    int64_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Edit& e = edits[i];
        if (e.row < 0 || e.row >= rows) fail("penalize: a row lies outside the logits");
        check_ids(e.allowed, e.allowed_count, n);
        check_ids(e.banned, e.banned_count, n);
        check_ids(e.bias_ids, e.bias_count, n);
        check_ids(e.seen, e.seen_count, n);
        most = std::max(most, e.allowed_count);
    }
    std::vector<float> saved(static_cast<size_t>(most * thread_count()));
    parallel_for(count, [&](int64_t i, int thread) {
        apply(logits + edits[i].row * n, n, edits[i], saved.data() + most * thread);
    });
}

const OpEntry kOps[] = {op_entry<&penalize>("penalize")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
