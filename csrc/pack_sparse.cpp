// Packed matrices of bf16, int8 and int4 without their zeros; the layout is described in sparse.h.
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>

#include "matrix.h"
#include "pool.h"
#include "registry.h"
#include "sparse.h"

namespace quire {

#if defined(QUIRE_EMULATE_AVX512)
const bool g_expands = true;
#elif defined(QUIRE_X86)
const bool g_expands = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bw");
}();
#else
const bool g_expands = false;
#endif

namespace {

// What a chunk of 512 dense numbers becomes: `sieve` writes those that are not zero and the bits that say which, and returns how many
// bytes they take; so does `bytes` by the bits.
struct Bf16 {
    static constexpr int64_t kDense = 1024;  // bytes of a chunk
    static int64_t sieve(uint8_t* to, uint64_t (&masks)[8], const uint8_t* chunk) {
        int64_t count = 0;
        for (int part = 0; part < 8; ++part) {
            uint64_t mask = 0;
            for (int i = 0; i < 64; ++i) {
                uint16_t number;
                std::memcpy(&number, chunk + part * 128 + i * 2, 2);
                std::memcpy(to + count * 2, &number, 2);
                const bool kept = (number & 0x7fff) != 0;
                mask |= static_cast<uint64_t>(kept) << i;
                count += kept;
            }
            masks[part] = mask;
        }
        return 2 * count;
    }
    static int64_t bytes(const uint64_t (&masks)[8]) {
        int64_t count = 0;
        for (const uint64_t mask : masks) count += std::popcount(mask);
        return 2 * count;
    }
};

struct Int8 {
    static constexpr int64_t kDense = 512;
    static int64_t sieve(uint8_t* to, uint64_t (&masks)[8], const uint8_t* chunk) {
        int64_t count = 0;
        for (int part = 0; part < 8; ++part) {
            uint64_t mask = 0;
            for (int i = 0; i < 64; ++i) {
                const auto code = static_cast<uint8_t>(chunk[part * 64 + i] ^ 0x80);
                to[count] = code;
                mask |= static_cast<uint64_t>(code != 0) << i;
                count += code != 0;
            }
            masks[part] = mask;
        }
        return count;
    }
    static int64_t bytes(const uint64_t (&masks)[8]) { return Bf16::bytes(masks) / 2; }
};

struct Int4 {
    static constexpr int64_t kDense = 256;
    static int64_t sieve(uint8_t* to, uint64_t (&masks)[8], const uint8_t* chunk) {
        int64_t done = 0;
        for (int part = 0; part < 8; part += 2) {
            uint8_t codes[2][65] = {};
            int count[2] = {};
            for (int half = 0; half < 2; ++half) {
                uint64_t mask = 0;
                for (int i = 0; i < 64; ++i) {
                    const auto code = static_cast<uint8_t>((chunk[part / 2 * 64 + i] >> (half * 4) & 15) ^ 8);
                    codes[half][count[half]] = code;
                    mask |= static_cast<uint64_t>(code != 0) << i;
                    count[half] += code != 0;
                }
                codes[half][count[half]] = 0;
                masks[part + half] = mask;
            }
            const int longer = count[0] > count[1] ? count[0] : count[1];
            for (int i = 0; i < longer; ++i) to[done++] = static_cast<uint8_t>(codes[0][i] | codes[1][i] << 4);
        }
        return done;
    }
    static int64_t bytes(const uint64_t (&masks)[8]) {
        int64_t all = 0;
        for (int part = 0; part < 8; part += 2) {
            const int low = std::popcount(masks[part]), high = std::popcount(masks[part + 1]);
            all += low > high ? low : high;
        }
        return all;
    }
};

template <class Fn>
void with_kind(int64_t kind, const Fn& fn) {
    switch (static_cast<Kind>(kind)) {
        case Kind::kSparse16: return fn(Bf16{});
        case Kind::kSparse8: return fn(Int8{});
        case Kind::kSparse4: return fn(Int4{});
        default: fail("sparse: not a kind of matrix without zeros");
    }
}

void check_sizes(int64_t blocks, int64_t k) {
    if (blocks < 1 || k < 1 || blocks > (int64_t{1} << 36) || k > (int64_t{1} << 40)) fail("sparse: sizes must lie in [1, 2^40]");
    if (k % kSparseColumns) fail("sparse: columns are not a multiple of 32");
}

// Of a dense packed matrix: numbers that are not zero, and the bytes of its longest block without zeros.
void count_sparse(int64_t* kept, int64_t* longest, const uint8_t* dense, int64_t blocks, int64_t k, int64_t kind) {
    check_sizes(blocks, k);
    with_kind(kind, [&]<class Form>(Form) {
        std::atomic<int64_t> all{0}, most{0};
        parallel_for(blocks, [&](int64_t block, int) {
            int64_t numbers = 0, bytes = 0;
            uint8_t ignored[Form::kDense + 2];
            uint64_t masks[8];
            for (int64_t chunk = 0; chunk < k / kSparseColumns; ++chunk) {
                const uint8_t* from = dense + (block * (k / kSparseColumns) + chunk) * Form::kDense;
                bytes += kSparseMasks + Form::sieve(ignored, masks, from);
                for (const uint64_t mask : masks) numbers += std::popcount(mask);
            }
            all.fetch_add(numbers, std::memory_order_relaxed);
            for (int64_t seen = most.load(); seen < bytes && !most.compare_exchange_weak(seen, bytes);) {
            }
        });
        *kept = all.load();
        *longest = most.load();
    });
}

// A dense packed matrix without its zeros, `step` bytes a block.
void pack_sparse(uint8_t* out, const uint8_t* dense, int64_t blocks, int64_t k, int64_t kind, int64_t step) {
    check_sizes(blocks, k);
    with_kind(kind, [&]<class Form>(Form) {
        std::atomic<bool> fits{true};
        parallel_for(blocks, [&](int64_t block, int) {
            uint8_t* to = out + block * step;
            const uint8_t* end = to + step - kSparseSlack;
            for (int64_t chunk = 0; chunk < k / kSparseColumns; ++chunk) {
                const uint8_t* from = dense + (block * (k / kSparseColumns) + chunk) * Form::kDense;
                uint64_t masks[8];
                uint8_t numbers[Form::kDense + 2];
                const int64_t bytes = Form::sieve(numbers, masks, from);
                if (end - to < kSparseMasks + bytes) return fits.store(false);
                std::memcpy(to, masks, sizeof masks);
                std::memcpy(to + kSparseMasks, numbers, static_cast<size_t>(bytes));
                to += kSparseMasks + bytes;
            }
            std::memset(to, 0, static_cast<size_t>(out + (block + 1) * step - to));
        });
        if (!fits.load()) fail("pack_sparse: a block is longer than its step");
    });
}

// *fits: whether every block, as its masks say, ends within its `step` bytes: what a reader relies on.
void check_sparse(int64_t* fits, const uint8_t* codes, int64_t blocks, int64_t k, int64_t kind, int64_t step) {
    check_sizes(blocks, k);
    with_kind(kind, [&]<class Form>(Form) {
        std::atomic<bool> good{true};
        parallel_for(blocks, [&](int64_t block, int) {
            const uint8_t* at = codes + block * step;
            const uint8_t* end = at + step - kSparseSlack;
            for (int64_t chunk = 0; chunk < k / kSparseColumns; ++chunk) {
                if (end - at < kSparseMasks) return good.store(false);
                uint64_t masks[8];
                std::memcpy(masks, at, sizeof masks);
                at += kSparseMasks + Form::bytes(masks);
                if (at > end) return good.store(false);
            }
        });
        *fits = good.load();
    });
}

const OpEntry kOps[] = {
    op_entry<&count_sparse>("count_sparse"),
    op_entry<&pack_sparse>("pack_sparse"),
    op_entry<&check_sparse>("check_sparse"),
};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
