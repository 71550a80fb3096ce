// Layers that keep a matrix S [dk, dv] per sequence and head: who walks which rows, where states are read and where they are stored.
//
// What a row does to the matrix is a rule (delta_rule.h, ssm_scan.h): it lets S decay, adds a product of a column and a row, and reads S.
// Columns never meet, so a task is a sequence, a head and some columns. It takes a tile of columns at a time through a block of rows, so
// that the tile stays in the first cache. Sums go over the dk numbers of a column in their order: a row's bits depend on its own sequence
// alone, however that is cut.
#pragma once

#include "math.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int kTileVectors = 2;  // of a tile of columns
constexpr int64_t kTileColumns = 16 * kTileVectors;
constexpr int64_t kBlockRows = 16;         // rows whose gates are computed together, as the lanes of a vector
constexpr int64_t kMostTaskColumns = 256;  // of which a task keeps states

// A tile of a state: its first number, and the way from one of its dk rows to the next.
struct StateTile {
    float* at;
    int64_t step;
};

// The state that the thread's next task begins with, fetched line by line while this one computes: a decode waits for memory, and
// states are too far apart for the processor to foresee (measured on a Zen 3: 6.2 instead of 8.5 us a head of 128 x 128).
struct Ahead {
    const float* at = nullptr;
    int64_t row = 0, gap = 0;    // numbers of a row, and between two
    int64_t left = 0, rows = 0;  // numbers of this row and rows that are left

    void fetch() {
        if (!rows) return;
        prefetch_far(at);
        at += 16;
        left -= 16;
        if (left > 0) return;
        at += left + gap;
        left = row;
        --rows;
    }
};

// A row of the batch as one head sees it.
struct HeadRow {
    const float *q, *k;    // [dk], what is read along and what is added along
    const float* v;        // [dv]
    float* out;            // [dv]
    float rate, decay;     // beta of the delta rule or the time step of a scan, and what S is multiplied by
    const float* decays;   // [dk], of channels that have their own
    const float* seen_by;  // [dk], what a delta is read along: k, times those decays
    const float* steps;    // [dv], time steps of channels that have their own, as they are given
    float skip;            // D of a scan
};

// Vector c of a row of a tile; only a tile of one vector may have fewer columns.
template <int kVectors>
QUIRE_INLINE F load_tile(const float* p, int c, int lanes) {
    if constexpr (kVectors > 1) return load(p + 16 * c);
    return load_lanes(p, lanes);
}
template <int kVectors>
QUIRE_INLINE void store_tile(float* p, int c, F v, int lanes) {
    if constexpr (kVectors > 1) {
        store(p + 16 * c, v);
    } else {
        store_lanes(p, v, lanes);
    }
}

// All states of a layer: `slots` of them, `step` numbers apart, each [heads, dk, dv].
struct States {
    float* at;
    int64_t slots, step, dk, dv;
};

// visit.operator()<vectors>(column, lanes) for the tiles of columns first .. last.
template <class Visit>
QUIRE_INLINE void for_tiles(int64_t first, int64_t last, const Visit& visit) {
    for (; last - first >= kTileColumns; first += kTileColumns) visit.template operator()<kTileVectors>(first, 16);
    for (; first < last; first += 16) visit.template operator()<1>(first, last - first < 16 ? static_cast<int>(last - first) : 16);
}

// The rows of one sequence, one head, and columns first .. last.
template <class Rule>
struct HeadWalk {
    const Rule& rule;
    const States& states;
    const int32_t *counts, *target;  // of the sequence
    int64_t head, first, last;
    float* room;  // for a block of rows, as the rule needs it
    float* own;   // [columns, dk], a tile after the other: the state while it is in no slot
    Ahead ahead;

    static constexpr int64_t kOwn = -1;

    template <int kVectors>
    StateTile tile(int64_t place, int64_t column) const {
        if (place == kOwn) return {own + (column - first) * states.dk, 16 * kVectors};
        return {states.at + place * states.step + head * states.dk * states.dv + column, states.dv};
    }

    void copy(int64_t from, int64_t to) const {
        for_tiles(first, last, [&]<int kVectors>(int64_t column, int lanes) {
            const StateTile source = tile<kVectors>(from, column), copied = tile<kVectors>(to, column);
            for (int64_t i = 0; i < states.dk; ++i)
                for (int c = 0; c < kVectors; ++c)
                    store_tile<kVectors>(copied.at + i * copied.step, c, load_tile<kVectors>(source.at + i * source.step, c, lanes), lanes);
        });
    }

    // Puts the state after `count` rows, which lies at `place`, wherever else it is stored.
    void keep(int64_t count, int64_t place) const {
        for (int n = 0; n < 2; ++n)
            if (target[n] >= 0 && counts[n] == count && target[n] != place) copy(place, target[n]);
    }

    // The slot to which the state after `count` rows goes, or kOwn.
    int64_t place_after(int64_t count) const {
        for (int n = 0; n < 2; ++n)
            if (target[n] >= 0 && counts[n] == count) return target[n];
        return kOwn;
    }

    // Rows first_row .. first_row + count of the batch, from the state at `place`, kOwn: zeros.
    void run(int64_t first_row, int64_t count, int64_t place) {
        if (place == kOwn) std::fill_n(own, (last - first + 15) / 16 * 16 * states.dk, 0.0f);
        keep(0, place);
        for (int64_t at = 0, end; at < count; at = end) {
            end = at + kBlockRows < count ? at + kBlockRows : count;
            for (int n = 0; n < 2; ++n)
                if (target[n] >= 0 && counts[n] > at && counts[n] < end) end = counts[n];
            const int64_t to = place_after(end);
            HeadRow rows[kBlockRows];
            rule.prepare(rows, room, head, first_row + at, end - at);
            for_tiles(first, last, [&]<int kVectors>(int64_t column, int lanes) {
                rule.template advance<kVectors>(rows, end - at, column, lanes, tile<kVectors>(place, column), tile<kVectors>(to, column),
                                                tile<kVectors>(kOwn, column), ahead);
            });
            place = to;
            keep(end, place);
        }
    }
};

// Throws when the batch names rows or slots that are not there.
inline void check_states(const StateBatchDescriptor& b, int64_t rows, int64_t slots) {
    if (b.cu_q[0] != 0 || b.cu_q[b.sequences] != rows) fail("recurrent states: cu_q must run from 0 to the number of rows");
    for (int64_t s = 0; s < b.sequences; ++s) {
        const int64_t count = int64_t{b.cu_q[s + 1]} - b.cu_q[s];
        if (count < 0) fail("recurrent states: cu_q must ascend");
        if (b.source[s] < -1 || b.source[s] >= slots) fail("recurrent states: a slot that is read lies outside the states");
        for (int64_t i = 2 * s; i < 2 * s + 2; ++i) {
            if (b.target[i] < -1 || b.target[i] >= slots) fail("recurrent states: a slot that is stored lies outside the states");
            if (b.target[i] < 0) continue;
            if (b.counts[i] < 0 || b.counts[i] > count) fail("recurrent states: a state is stored after more rows than there are");
        }
    }
}

// How sequences, heads and columns are shared out. Where the first two are few, columns are, too.
struct Tasks {
    const States& states;
    const StateBatchDescriptor& batch;
    int64_t heads, together, parts;  // columns of a task, and tasks that share a head

    Tasks(const States& all, const StateBatchDescriptor& b, int64_t h) : states(all), batch(b), heads(h) {
        const int64_t walks = std::max(b.sequences * heads, int64_t{1}), tiles = (all.dv + kTileColumns - 1) / kTileColumns;
        const int64_t wanted = (4 * int64_t{thread_count()} + walks - 1) / walks;
        together = std::clamp(tiles / wanted, int64_t{1}, kMostTaskColumns / kTileColumns) * kTileColumns;
        parts = (all.dv + together - 1) / together;
    }

    int64_t count() const { return batch.sequences * heads * parts; }
    int64_t sequence(int64_t task) const { return task / (heads * parts); }
    int64_t head(int64_t task) const { return task / parts % heads; }
    int64_t first(int64_t task) const { return task % parts * together; }
    int64_t last(int64_t task) const { return std::min(first(task) + together, states.dv); }

    // Of a task of few rows, which is the only kind that waits for memory.
    Ahead ahead(int64_t task, int64_t rows) const {
        if (rows > kBlockRows || task + 1 >= count()) return {};
        const int64_t slot = batch.source[sequence(task + 1)], from = first(task + 1), columns = last(task + 1) - from;
        if (slot < 0) return {};
        const float* at = states.at + slot * states.step + head(task + 1) * states.dk * states.dv + from;
        return {at, columns, states.dv - columns, columns, states.dk};
    }
};

// Walks all sequences and heads.
template <class Rule>
void walk_states(const Rule& rule, const States& states, const StateBatchDescriptor& batch, int64_t rows, int64_t heads) {
    check_states(batch, rows, states.slots);
    const Tasks tasks(states, batch, heads);
    if (!tasks.count()) return;
    const int64_t room = (rule.room() + 15) / 16 * 16, own = tasks.together * states.dk;
    auto* memory = static_cast<float*>(scratch(Scratch::kWork, sizeof(float) * static_cast<size_t>((room + own) * thread_count())));
    parallel_for(tasks.count(), [&](int64_t task, int thread) {
        const int64_t s = tasks.sequence(task), count = int64_t{batch.cu_q[s + 1]} - batch.cu_q[s];
        float* mine = memory + thread * (room + own);
        HeadWalk<Rule> walk{rule, states, batch.counts + 2 * s, batch.target + 2 * s, tasks.head(task), tasks.first(task), tasks.last(task),
                            mine, mine + room, tasks.ahead(task, count)};
        walk.run(batch.cu_q[s], count, batch.source[s]);
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
