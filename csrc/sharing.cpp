#include "sharing.h"

#include <algorithm>
#include <utility>

namespace quire {

int64_t g_tiles_read = 0;

namespace {

// Insertion: lists are short and mostly in order, and what is equal must keep its order.
template <class Before>
void sort_stable(Sharer* list, int64_t count, const Before& before) {
    for (int64_t i = 1; i < count; ++i) {
        const Sharer moved = list[i];
        int64_t at = i;
        for (; at > 0 && before(moved, list[at - 1]); --at) list[at] = list[at - 1];
        list[at] = moved;
    }
}

// Leading tokens that `a` and `b` have in the same blocks, at least `known`; `known` where b sees no tile of them. a.first <= b.first.
int64_t in_common(const SharedTables& t, const Sharer& a, const Sharer& b, int64_t known) {
    const int32_t *x = t.tables + a.sequence * t.max_blocks, *y = t.tables + b.sequence * t.max_blocks;
    const int64_t limit = std::min(a.limit, b.limit), end = (limit + t.block_size - 1) / t.block_size;
    int64_t i = std::max(b.first, known / t.block_size);
    while (i < end && x[i] == y[i]) ++i;
    const int64_t tokens = std::min(i * t.block_size, limit) / t.tile * t.tile;
    return tokens > std::max(known, b.first * t.block_size / t.tile * t.tile) ? tokens : known;
}

// A list that has `known` tokens in common: those that share more with its first come behind it, most first, and those of
// them that part from it at one place are arranged in turn; then the same with the first of the others.
void arrange_from(const SharedTables& t, Sharer* list, int64_t count, int64_t known) {
    while (count > 1) {
        for (int64_t i = 1; i < count; ++i) list[i].common = in_common(t, list[0], list[i], known);
        sort_stable(list + 1, count - 1, [](const Sharer& a, const Sharer& b) { return a.common > b.common; });
        int64_t begin = 1;
        while (begin < count && list[begin].common > known) {
            int64_t end = begin + 1;
            while (end < count && list[end].common == list[begin].common) ++end;
            arrange_from(t, list + begin, end - begin, list[begin].common);
            begin = end;
        }
        list += begin;
        count -= begin;
    }
}

}  // namespace

int64_t arrange(const SharedTables& t, Sharer* list, int64_t count) {
    // The first of any run must read from the earliest block on, as the others are compared with it alone.
    sort_stable(list, count, [](const Sharer& a, const Sharer& b) { return a.first < b.first; });
    for (int64_t i = 0; i < count; ++i) list[i].common = 0;
    arrange_from(t, list, count, 0);
    // Alone: shares nothing with the one before it, nor the next with it.
    const auto alone = [&](int64_t i) { return !list[i].common && (i + 1 == count || !list[i + 1].common); };
    int64_t sharing = 0;
    for (int64_t i = 0; i < count; ++i)
        if (!alone(i)) std::swap(list[sharing++], list[i]);
    return sharing;
}

}  // namespace quire
