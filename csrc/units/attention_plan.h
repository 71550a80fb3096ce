// Who walks which keys: spans of rows, the tasks of a call, and the pieces that are computed before them.
//
// A task is a span and a head. Where tasks are few, and where sequences share blocks, every split of it is a piece, and the
// task merges them in the order in which it would have computed them. Spans that share blocks of a split share its piece.
// Where states are wanted instead of rows all tasks are cut, and splits whose blocks others have are left out.
#pragma once

#include "attention.h"
#include "pieces.h"

namespace quire::QUIRE_UNIT {
namespace {

struct AttentionPlan {
    const AttentionCall& c;
    int64_t threads = thread_count();
    Span* spans;  // first those that share, next to whom they share most with
    AttentionTask *tasks, *pieces;
    State* states;  // per task that is cut and split
    int64_t span_count = 0, sharing = 0, splits = 0, task_count = 0, piece_count = 0, state_count = 0;
    int64_t together = 0;  // most spans of a piece
    bool apart = false;    // all tasks are cut
    float* room = nullptr;

    AttentionPlan(const AttentionCall& call, int64_t sequences) : c(call) {
        int64_t most = 0;
        for (int64_t s = 0; s < sequences; ++s) most += (rows(s) + tokens() - 1) / tokens();
        Pieces size{nullptr};
        (void)size.take<Sharer>(sequences);
        (void)size.take<Span>(most);
        Pieces memory{static_cast<char*>(scratch(Scratch::kSpans, static_cast<size_t>(size.used)))};
        auto* list = memory.take<Sharer>(sequences);
        spans = memory.take<Span>(most);
        find_sharers(list, sequences);
        for (int64_t i = 0; i < sequences; ++i) {
            const int64_t s = list[i].sequence, count = rows(s);
            for (int64_t first = 0; first < count; first += tokens())
                add_span(s, first, first + tokens() < count ? first + tokens() : count, list[i].common);
            if (i + 1 == sharing) share_out();
        }
        const int64_t all = span_count * c.cache.kv_heads;
        apart = c.starts || (all < 8 * threads && splits > span_count);
    }

    // Floats of the states that pieces leave.
    int64_t state_floats() const {
        int64_t floats = 0;
        for (const Span* s = spans; s != spans + span_count; ++s)
            if (cut(s)) floats += split_count(*s) * State::floats(s->tokens() * c.group, c.padded);
        return floats * c.cache.kv_heads;
    }

    // Fills `tasks` and `pieces`; states are put at `at`.
    void make_tasks(float* at) {
        room = at;
        const int64_t all = splits * c.cache.kv_heads;
        Pieces size{nullptr};
        (void)size.take<AttentionTask>(span_count * c.cache.kv_heads + all);
        (void)size.take<State>(all);
        Pieces memory{static_cast<char*>(scratch(Scratch::kTasks, static_cast<size_t>(size.used)))};
        tasks = memory.take<AttentionTask>(span_count * c.cache.kv_heads + all);
        pieces = tasks + span_count * c.cache.kv_heads;
        states = memory.take<State>(all);
        for (const Span *s = spans, *next; s != spans + span_count; s = next) {
            next = s < spans + sharing ? spans + sharing : s + 1;
            while (next != spans + span_count && next->sequence == s->sequence) ++next;
            for (int64_t head = 0; head < c.cache.kv_heads; ++head) make_tasks_of(s, next, head);
        }
    }

   private:
    int64_t rows(int64_t s) const { return int64_t{c.cu_q[s + 1]} - c.cu_q[s]; }
    // Tokens that a span has at most.
    int64_t tokens() const { return c.group >= kQueryRows ? 1 : kQueryRows / c.group; }
    // Whether every split of the span is a piece.
    bool cut(const Span* s) const { return apart || s < spans + sharing; }
    static int64_t split_begin(const Span& s) { return s.from / kSplit; }
    static int64_t split_end(const Span& s) { return (s.to + kSplit - 1) / kSplit; }
    static int64_t split_count(const Span& s) { return split_end(s) - split_begin(s); }

    // All sequences, those first that share blocks: of few rows, so that a pass has room for others, and without branches.
    void find_sharers(Sharer* list, int64_t sequences) {
        for (int64_t s = 0; s < sequences; ++s) {
            const int64_t count = rows(s), limit = c.context[s] - count + 1;
            const bool may = count > 0 && !c.after && 2 * count * c.group <= kQueryRows && c.undrafted(s) == count;
            list[s] = {s, may ? c.from(limit) / c.cache.block_size : 0, may ? limit : 0, 0};
        }
        sharing = arrange({c.tables, c.max_blocks, c.cache.block_size, kTile}, list, sequences);
    }

    void add_span(int64_t s, int64_t first, int64_t last, int64_t common) {
        const int64_t count = rows(s), base = c.context[s] - count, undrafted = c.undrafted(s);
        const int64_t lowest = c.from(base + (c.tree ? 0 : first) + 1);  // a drafted row may lie before its slot
        Span& span = spans[span_count++];
        span = {s, first, last, lowest, c.to(base + last, c.context[s]), base,
                undrafted < count ? base + undrafted : INT64_MAX / 2, common};
        splits += split_count(span);
    }

    // Many sharers in a piece read least, but every thread must have some pieces; where that leaves one, nothing is shared.
    void share_out() {
        const int64_t most = splits * c.cache.kv_heads / (2 * threads);
        together = most < tokens() ? most : tokens();
        if (together < 2) sharing = 0;
    }

    // The tasks of one head and of the spans first..last, and their pieces, if they are cut.
    void make_tasks_of(const Span* first, const Span* last, int64_t head) {
        AttentionTask* own = tasks + task_count;
        int64_t begin = INT64_MAX, end = 0;
        for (const Span* s = first; s != last; ++s) {
            AttentionTask& task = tasks[task_count++];
            task = {s, 1, s->tokens() * c.group, head, split_begin(*s), split_end(*s), {}, nullptr};
            begin = task.split_begin < begin ? task.split_begin : begin;
            end = task.split_end > end ? task.split_end : end;
            if (!cut(s)) continue;
            task.parts = states + state_count;
            state_count += split_count(*s);
        }
        if (!cut(first)) return;
        for (int64_t split = begin; split < end; ++split)
            for (const Span *s = first, *next; s != last; s = next) {
                next = s + 1;
                if (split < split_begin(*s) || split >= split_end(*s) || !c.held(*s, split)) continue;
                int64_t rows = s->tokens() * c.group;
                while (next != last && joins(*next, split, rows) && next - s < together) rows += next++->tokens() * c.group;
                add_piece(s, next, rows, head, split, own + (s - first));
            }
    }

    // Whether a span walks with the one before it, whose piece has `rows` rows: they share the split's first tile.
    bool joins(const Span& s, int64_t split, int64_t rows) const {
        return s.common > split * kSplit && split_begin(s) <= split && rows + s.tokens() * c.group <= kQueryRows;
    }

    // A piece of the spans first..last, whose tasks are `of`, and where each of them finds its rows' state.
    void add_piece(const Span* first, const Span* last, int64_t rows, int64_t head, int64_t split, const AttentionTask* of) {
        const State state = State::at(room, rows, c.padded);
        room += State::floats(rows, c.padded);
        pieces[piece_count++] = {first, last - first, rows, head, split, split + 1, state, nullptr};
        for (int64_t r = 0; first != last; r += first++->tokens() * c.group, ++of)
            const_cast<State*>(of->parts)[split - of->split_begin] = {state.most + r, state.sum + r, state.acc + r * c.padded};
    }
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
