// Packed matrices of bf16, int8 and int4 of whose numbers at most two of each four columns are not zero; the layout is described in
// sparse.h.
#include <atomic>
#include <cstdint>
#include <cstring>

#include "matrix.h"
#include "pool.h"
#include "registry.h"
#include "sparse.h"

namespace quire {
namespace {

// A row's number in a dense chunk of 32 columns (0: a zero), and number `at` of a piece put into a chunk of this layout.
struct Bf16 {
    static constexpr int64_t kDense = 1024, kChunk = 576;
    static constexpr int kEach = 2;  // numbers of a row and piece
    static int get(const uint8_t* chunk, int row, int column) {
        uint16_t number;
        std::memcpy(&number, chunk + column / 2 * 64 + row * 4 + column % 2 * 2, 2);
        return number & 0x7fff ? number : 0;
    }
    static void put(uint8_t* to, int piece, int at, int number, int place) {
        uint16_t places;
        const auto half = static_cast<uint16_t>(number);
        std::memcpy(&places, to + at * 2, 2);
        places = static_cast<uint16_t>(places | place << (2 * piece));
        std::memcpy(to + at * 2, &places, 2);
        std::memcpy(to + kPositions + piece * 64 + at * 2, &half, 2);
    }
};

struct Int8 {
    static constexpr int64_t kDense = 512, kChunk = 320;
    static constexpr int kEach = 4;
    static int get(const uint8_t* chunk, int row, int column) { return chunk[column / 4 * 64 + row * 4 + column % 4] ^ 0x80; }
    static void put(uint8_t* to, int piece, int at, int number, int place) {
        to[at] = static_cast<uint8_t>(to[at] | place << (2 * piece));
        to[kPositions + piece * 64 + at] = static_cast<uint8_t>(number);
    }
};

struct Int4 {
    static constexpr int64_t kDense = 256, kChunk = 192;
    static constexpr int kEach = 4;
    static int get(const uint8_t* chunk, int row, int column) {
        return (chunk[column / 8 * 64 + row * 4 + column % 4] >> (column / 4 % 2 * 4) & 15) ^ 8;
    }
    static void put(uint8_t* to, int piece, int at, int number, int place) {
        to[at] = static_cast<uint8_t>(to[at] | place << (2 * piece));
        uint8_t& both = to[kPositions + piece / 2 * 64 + at];
        both = static_cast<uint8_t>(both | number << (piece % 2 * 4));
    }
};

template <class Fn>
void with_kind(int64_t kind, const Fn& fn) {
    switch (static_cast<Kind>(kind)) {
        case Kind::kTwoOfFour16: return fn(Bf16{});
        case Kind::kTwoOfFour8: return fn(Int8{});
        case Kind::kTwoOfFour4: return fn(Int4{});
        default: fail("sparse24: not a kind of matrix with two of four numbers");
    }
}

// A chunk, or false where four columns of a row have more than two numbers. Columns are taken in the order in which dot products of
// bf16 pairs add them up.
template <class Form>
bool pack_chunk(uint8_t* to, const uint8_t* chunk) {
    constexpr int kOrder[] = {1, 0, 3, 2};
    std::memset(to, 0, static_cast<size_t>(Form::kChunk));
    for (int row = 0; row < 16; ++row) {
        for (int four = 0; four < kSparseColumns / 4; ++four) {
            int places[4], count = 0, empty = 4;
            for (const int place : kOrder) {
                if (Form::get(chunk, row, four * 4 + place)) places[count++] = place;
                else places[--empty] = place;
            }
            if (count > 2) return false;
            for (int i = 0; i < 2; ++i) {
                const int number = Form::get(chunk, row, four * 4 + places[i]);
                if constexpr (Form::kEach == 2) Form::put(to, four, row * 2 + 1 - i, number, places[i]);
                else Form::put(to, four / 2, row * 4 + four % 2 * 2 + i, number, places[i]);
            }
        }
    }
    return true;
}

// *fits: whether the matrix has no more than two numbers in any four columns; then, if there is an `out`, it is packed into it.
void pack_sparse24(Optional<uint8_t> out, int64_t* fits, const uint8_t* dense, int64_t blocks, int64_t k, int64_t kind) {
    if (blocks < 1 || k < 1 || blocks > (int64_t{1} << 36) || k > (int64_t{1} << 40)) fail("sparse24: sizes must lie in [1, 2^40]");
    if (k % kSparseColumns) fail("sparse24: columns are not a multiple of 32");
    with_kind(kind, [&]<class Form>(Form) {
        std::atomic<bool> good{true};
        const int64_t chunks = k / kSparseColumns;
        parallel_for(blocks, [&](int64_t block, int) {
            uint8_t unused[Form::kChunk];
            for (int64_t chunk = block * chunks; chunk < (block + 1) * chunks && good.load(std::memory_order_relaxed); ++chunk)
                if (!pack_chunk<Form>(out.ptr ? out.ptr + chunk * Form::kChunk : unused, dense + chunk * Form::kDense)) good.store(false);
        });
        *fits = good.load();
    });
}

const OpEntry kOps[] = {op_entry<&pack_sparse24>("pack_sparse24")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
