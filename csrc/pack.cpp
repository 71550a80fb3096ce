// Packing of weight matrices [n, k] into blocks of 16 rows whose k axis is innermost but for a few values per lane:
//   4 bits  [n/16][k/8][16 lanes][4 bytes], byte j of a lane = codes k+j (low nibble) and k+4+j (high), both + 8
//   8 bits  [n/16][k/4][16][4], code + 128
//   bf16    [n/16][k/2][16][2]        f32 [n/16][k][16]
//   scales  [n/16][k/group][16]       zeros likewise
// Rows beyond n are filled with what contributes nothing.
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "registry.h"

namespace quire {
namespace {

constexpr int64_t kLanes = 16;

void check_sizes(int64_t n, int64_t k, int64_t multiple) {
    if (n < 1 || k < 1 || n > (int64_t{1} << 40) || k > (int64_t{1} << 40)) fail("pack: sizes must lie in [1, 2^40]");
    if (k % multiple) fail("pack: columns are not a multiple of what the layout holds together");
}

void pack_int4(uint8_t* out, const int8_t* codes, int64_t n, int64_t k) {
    check_sizes(n, k, 8);
    parallel_for((n + kLanes - 1) / kLanes, [&](int64_t block, int) {
        uint8_t* target = out + block * k * 8;
        for (int64_t at = 0; at < k; at += 8) {
            for (int64_t lane = 0; lane < kLanes; ++lane, target += 4) {
                const int64_t row = block * kLanes + lane;
                const int8_t* source = codes + row * k + at;
                for (int64_t j = 0; j < 4; ++j) {
                    const int low = row < n ? source[j] : 0, high = row < n ? source[j + 4] : 0;
                    target[j] = static_cast<uint8_t>(((low + 8) & 15) | ((high + 8) & 15) << 4);
                }
            }
        }
    });
}

void pack_int8(uint8_t* out, const int8_t* codes, int64_t n, int64_t k) {
    check_sizes(n, k, 4);
    parallel_for((n + kLanes - 1) / kLanes, [&](int64_t block, int) {
        uint8_t* target = out + block * k * kLanes;
        for (int64_t at = 0; at < k; at += 4) {
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                const int64_t row = block * kLanes + lane;
                for (int64_t j = 0; j < 4; ++j)
                    *target++ = static_cast<uint8_t>((row < n ? codes[row * k + at + j] : 0) + 128);
            }
        }
    });
}

// Groups of `pair` consecutive columns stay together; k is padded to a multiple of it with zeros.
template <class T>
void pack_floats(T* out, const T* values, int64_t n, int64_t k, int64_t pair) {
    check_sizes(n, k, 1);
    const int64_t padded = (k + pair - 1) / pair * pair;
    parallel_for((n + kLanes - 1) / kLanes, [&](int64_t block, int) {
        T* target = out + block * padded * kLanes;
        for (int64_t at = 0; at < padded; at += pair) {
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                const int64_t row = block * kLanes + lane;
                for (int64_t j = at; j < at + pair; ++j) *target++ = row < n && j < k ? values[row * k + j] : T{0};
            }
        }
    });
}

void pack_bf16(uint16_t* out, const uint16_t* values, int64_t n, int64_t k) { pack_floats(out, values, n, k, 2); }
void pack_f32(float* out, const float* values, int64_t n, int64_t k) { pack_floats(out, values, n, k, 1); }
void pack_scales16(uint16_t* out, const uint16_t* values, int64_t n, int64_t groups) { pack_floats(out, values, n, groups, 1); }
void pack_scales32(float* out, const float* values, int64_t n, int64_t groups) { pack_floats(out, values, n, groups, 1); }
void pack_zeros(int8_t* out, const int8_t* values, int64_t n, int64_t groups) { pack_floats(out, values, n, groups, 1); }

const OpEntry kOps[] = {
    op_entry<&pack_int4>("pack_int4"),         op_entry<&pack_int8>("pack_int8"),
    op_entry<&pack_bf16>("pack_bf16"),         op_entry<&pack_f32>("pack_f32"),
    op_entry<&pack_scales16>("pack_scales16"), op_entry<&pack_scales32>("pack_scales32"),
    op_entry<&pack_zeros>("pack_zeros"),
};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
