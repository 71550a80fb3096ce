// Copying and scrubbing whole cache blocks, and moving single tokens.
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "registry.h"

namespace quire {
namespace {

// where [tensors][2] = (address, bytes of a block)
void copy_blocks(const int64_t* where, int64_t tensors, const int64_t* pairs, int64_t count, int64_t blocks) {
    for (int64_t i = 0; i < 2 * count; ++i)
        if (pairs[i] < 0 || pairs[i] >= blocks) fail("copy_blocks: a block lies outside the cache");
    parallel_for(tensors, [&](int64_t t, int) {
        auto* base = reinterpret_cast<char*>(where[2 * t]);
        const int64_t bytes = where[2 * t + 1];
        for (int64_t i = 0; i < count; ++i)
            if (pairs[2 * i] != pairs[2 * i + 1])
                std::memcpy(base + pairs[2 * i + 1] * bytes, base + pairs[2 * i] * bytes, static_cast<size_t>(bytes));
    });
}

void zero_blocks(const int64_t* where, int64_t tensors, const int64_t* ids, int64_t count, int64_t blocks) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= blocks) fail("zero_blocks: a block lies outside the cache");
    parallel_for(tensors, [&](int64_t t, int) {
        auto* base = reinterpret_cast<char*>(where[2 * t]);
        for (int64_t i = 0; i < count; ++i)
            std::memset(base + ids[i] * where[2 * t + 1], 0, static_cast<size_t>(where[2 * t + 1]));
    });
}

// How tokens lie in the cache of keys or of values of a layer (ops/layout.py): in each block, `block_bytes` from one to the next, for
// each head, `head_bytes` apart, rows of `row_bytes`, of which `side` lie side by side, a word of each, and behind them the tokens' scales, if there are any.
struct TokenRows {
    int64_t address, block_bytes, heads, head_bytes, row_bytes, side, word_bytes, scaled;
};

void move_token(const TokenRows& rows, int64_t block_size, int64_t source, int64_t destination) {
    const int64_t step = rows.side * rows.word_bytes;
    const auto place = [&](int64_t slot) {
        const int64_t offset = slot % block_size;
        return slot / block_size * rows.block_bytes + offset / rows.side * rows.side * rows.row_bytes + offset % rows.side * rows.word_bytes;
    };
    const auto scale = [&](int64_t slot) { return slot / block_size * rows.block_bytes + block_size * rows.row_bytes + slot % block_size * 4; };
    for (int64_t h = 0; h < rows.heads; ++h) {
        char* head = reinterpret_cast<char*>(rows.address) + h * rows.head_bytes;
        char* to = head + place(destination);
        const char* from = head + place(source);
        for (int64_t i = 0; i < rows.row_bytes; i += rows.word_bytes, from += step, to += step)
            std::memcpy(to, from, static_cast<size_t>(rows.word_bytes));
        if (rows.scaled) std::memcpy(head + scale(destination), head + scale(source), 4);
    }
}

void move_slots(const TokenRows* where, int64_t tensors, const int64_t* pairs, int64_t count, int64_t blocks, int64_t block_size) {
    for (int64_t i = 0; i < 2 * count; ++i)
        if (pairs[i] < 0 || pairs[i] >= blocks * block_size) fail("move_slots: a slot lies outside the cache");
    parallel_for(tensors, [&](int64_t t, int) {
        for (int64_t i = 0; i < count; ++i)
            if (pairs[2 * i] != pairs[2 * i + 1]) move_token(where[t], block_size, pairs[2 * i], pairs[2 * i + 1]);
    });
}

const OpEntry kOps[] = {op_entry<&copy_blocks>("copy_blocks"), op_entry<&zero_blocks>("zero_blocks"), op_entry<&move_slots>("move_slots")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
