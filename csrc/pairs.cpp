// The pairs (token, choice) of a mixture whose experts are divided over ranks: who computes which, and how outputs come to the ranks
// that sum them up. What it does is said in src/quire/parallel/pairs.py; all ranks compute the same of the same choices.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "registry.h"

namespace quire {
namespace {

constexpr int32_t kNobody = -1;
constexpr int64_t kRun = 16;  // pairs of one expert for which its weights are read once: they are not worth a second rank

struct Homes : HomesDescriptor {
    int64_t first(int64_t expert) const { return ranks[expert * copies]; }
    bool single(int64_t expert) const { return copies == 1 || ranks[expert * copies + 1] < 0; }
    int64_t least(int64_t expert, const std::vector<int64_t>& loads) const {
        int64_t best = first(expert);
        for (int64_t i = 1; i < copies && ranks[expert * copies + i] >= 0; ++i)
            if (loads[ranks[expert * copies + i]] < loads[best]) best = ranks[expert * copies + i];
        return best;
    }
};

void check_homes(const Homes& homes) {
    for (int64_t i = 0; i < homes.experts * homes.copies; ++i)
        if (homes.ranks[i] >= homes.world || (i % homes.copies == 0 && homes.ranks[i] < 0)) fail("divide_pairs: an expert has no such home");
}

int64_t runs_of(int64_t pairs) { return (pairs + kRun - 1) / kRun; }

// The rank that computes each pair. Experts of one home are given; then those of several send each run where least is to do.
void give_pairs(std::vector<int32_t>& holders, const std::vector<int64_t>& counts, const int32_t* ids, const Homes& homes) {
    std::vector<int64_t> loads(homes.world), first(homes.experts), seen(homes.experts), runs;
    for (int64_t e = 0; e < homes.experts; ++e)
        if (homes.single(e)) loads[homes.first(e)] += runs_of(counts[e]);
    for (int64_t e = 0; e < homes.experts; ++e) {
        first[e] = static_cast<int64_t>(runs.size());
        for (int64_t run = 0; run < (homes.single(e) ? 0 : runs_of(counts[e])); ++run) {
            runs.push_back(homes.least(e, loads));
            ++loads[runs.back()];
        }
    }
    for (size_t i = 0; i < holders.size(); ++i) {
        const int64_t e = ids[i];
        if (e >= homes.experts) continue;
        holders[i] = static_cast<int32_t>(homes.single(e) ? homes.first(e) : runs[first[e] + seen[e]++ / kRun]);
    }
}

// counted [experts + world + 1] grows by each expert's pairs, by each rank's, and by those of the rank that has most.
void count_pairs(int64_t* counted, const std::vector<int64_t>& counts, const std::vector<int32_t>& holders, const Homes& homes) {
    std::vector<int64_t> given(homes.world);
    for (const int32_t holder : holders)
        if (holder != kNobody) ++given[holder];
    for (int64_t e = 0; e < homes.experts; ++e) counted[e] += counts[e];
    for (int64_t rank = 0; rank < homes.world; ++rank) counted[homes.experts + rank] += given[rank];
    counted[homes.experts + homes.world] += *std::max_element(given.begin(), given.end());
}

// ids [rows, top_k]. tokens, order [rows * top_k], offsets [held + 1], sends [world], places [own rows * top_k].
void divide_pairs(int32_t* tokens, int32_t* order, int32_t* offsets, int32_t* sends, int32_t* places, int64_t* counted, const int32_t* ids,
                  const Homes* homes_at, int64_t rows, int64_t top_k) {
    const Homes& homes = *homes_at;
    const int64_t experts = homes.experts, copies = homes.copies, held = homes.held, rank = homes.rank, world = homes.world;
    const int32_t* local = homes.local;
    if (rows < 1 || top_k < 1 || experts < 1 || copies < 1 || held < 1 || world < 1 || rank < 0 || rank >= world || rows * top_k > INT32_MAX)
        fail("divide_pairs: sizes must be positive and fit 31 bits");
    check_homes(homes);
    const int64_t pairs = rows * top_k;
    std::vector<int64_t> counts(experts);
    for (int64_t i = 0; i < pairs; ++i) {
        if (ids[i] < 0 || ids[i] >= experts + homes.idle) fail("divide_pairs: there is no such expert");
        if (ids[i] < experts) ++counts[ids[i]];
    }
    std::vector<int32_t> holders(pairs, kNobody);
    give_pairs(holders, counts, ids, homes);
    count_pairs(counted, counts, holders, homes);

    std::fill_n(offsets, held + 1, 0);
    std::fill_n(sends, world, 0);
    std::fill_n(tokens, pairs, 0);
    std::fill_n(order, pairs, 0);
    const auto row_of = [&](int64_t r) { return (r * rows + world - 1) / world; };  // the first that rank r sums up
    for (int64_t i = 0; i < pairs; ++i) {
        if (holders[i] != rank) continue;
        if (local[ids[i]] < 0 || local[ids[i]] >= held) fail("divide_pairs: an expert is not where it should be");
        ++offsets[local[ids[i]] + 1];
    }
    for (int64_t e = 0; e < held; ++e) offsets[e + 1] += offsets[e];
    std::vector<int32_t> next(offsets, offsets + held);
    for (int64_t i = 0, sent = 0, to = 0; i < pairs; ++i) {
        if (holders[i] != rank) continue;
        const int32_t place = next[local[ids[i]]]++;
        tokens[place] = static_cast<int32_t>(i / top_k);
        order[sent++] = place;
        while (i / top_k >= row_of(to + 1)) ++to;
        ++sends[to];
    }
    const int64_t begin = row_of(rank) * top_k, end = row_of(rank + 1) * top_k;
    std::vector<int32_t> at(world + 1);
    for (int64_t i = begin; i < end; ++i)
        if (holders[i] != kNobody) ++at[holders[i] + 1];
    for (int64_t r = 0; r < world; ++r) at[r + 1] += at[r];
    for (int64_t i = begin; i < end; ++i) places[i - begin] = holders[i] == kNobody ? 0 : at[holders[i]]++;
}

const OpEntry kOps[] = {op_entry<&divide_pairs>("divide_pairs")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
