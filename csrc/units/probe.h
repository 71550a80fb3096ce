// What the machine can do at most: memory read, and the peak of each dot product. Benchmarks divide by these.
#pragma once

#include "unit.h"
#if defined(QUIRE_AMX)
#include "amx.h"
#endif

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kProbeChains = 16;  // independent sums: more than latency times issue width of any core so far

// Each thread reads `streams` places of a piece in turn: a Xeon with AMX reads 22 GB/s in one stream and 28 in four, other
// processors are best with one.
void probe_read(int64_t* out, const char* data, int64_t bytes, int64_t streams) {
    constexpr int64_t kPiece = 1 << 20;
    if (streams != 1 && streams != 2 && streams != 4) fail("probe_read: 1, 2 or 4 streams");
    *out = 0;
    parallel_for(bytes / kPiece, [&](int64_t piece, int) {
        I sum[4] = {set1_i(0), set1_i(0), set1_i(0), set1_i(0)};
        const int64_t part = kPiece / streams;
        for (int64_t i = 0; i < part; i += 256)
            for (int64_t at = piece * kPiece + i; at < (piece + 1) * kPiece; at += part)
                for (int j = 0; j < 4; ++j) sum[j] = add_i(sum[j], load_i(data + at + j * 64));
        const int32_t total = hsum_i(add_i(add_i(sum[0], sum[1]), add_i(sum[2], sum[3])));
        __atomic_fetch_add(out, int64_t{total}, __ATOMIC_RELAXED);
    });
}

enum class Probe { kF32, kBf16, kInt8 };

// Runs `rounds` rounds of 16 vector dot products on every thread, eight times.
template <Probe kProbe>
void probe_compute(int64_t* out, int64_t rounds) {
    *out = 0;
    parallel_for(8 * thread_count(), [&](int64_t index, int) {
        F f[kProbeChains];
        I n[kProbeChains];
        for (int j = 0; j < kProbeChains; ++j) {
            f[j] = set1(static_cast<float>(j));
            n[j] = set1_i(j);
        }
        const F a = set1(static_cast<float>(index) * 1e-9f), b = set1(0.5f);
        const U u = set1_u(static_cast<uint32_t>(index) * 0x01010101u), v = set1_u(0x01010101u);
        for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
            for (int j = 0; j < kProbeChains; ++j) {
                if constexpr (kProbe == Probe::kF32) f[j] = fma(a, b, f[j]);
                if constexpr (kProbe == Probe::kBf16) f[j] = dot_bf16(f[j], u, v);
                if constexpr (kProbe == Probe::kInt8) n[j] = dot8(n[j], u, v);
            }
        }
        F total = set1(0.0f);
        for (int j = 0; j < kProbeChains; ++j) total = add(total, add(f[j], to_f(n[j])));
        __atomic_fetch_add(out, static_cast<int64_t>(hsum(total) != 0.0f), __ATOMIC_RELAXED);
    });
}

void probe_f32(int64_t* out, int64_t rounds) { probe_compute<Probe::kF32>(out, rounds); }
void probe_bf16(int64_t* out, int64_t rounds) { probe_compute<Probe::kBf16>(out, rounds); }
void probe_int8(int64_t* out, int64_t rounds) { probe_compute<Probe::kInt8>(out, rounds); }

#if defined(QUIRE_AMX)
// Runs `rounds` rounds of four products of whole tile registers on every thread, eight times. The numbers are made up but not
// constant: products of zeros need less power and would run at a higher clock than real ones.
template <bool kInt8>
void probe_tiles(int64_t* out, int64_t rounds) {
    *out = 0;
    parallel_for(8 * thread_count(), [&](int64_t index, int) {
        alignas(64) uint16_t numbers[4][512];
        alignas(64) int32_t sums[256];
        uint32_t state = static_cast<uint32_t>(index) + 1;
        for (auto& tile : numbers) {
            for (uint16_t& number : tile) {
                state = state * 1664525u + 1013904223u;
                number = static_cast<uint16_t>(kInt8 ? state >> 16 : 0x3f80u | (state >> 16 & 0x807fu));  // bf16: +-1 to +-2
            }
        }
        TileShapes shapes;
        for (int i = 0; i < 8; ++i) shapes.set(i, 16, 64);
        const TileScope scope(shapes);
        tile_load<4>(numbers[0], 64);
        tile_load<5>(numbers[1], 64);
        tile_load<6>(numbers[2], 64);
        tile_load<7>(numbers[3], 64);
        for (int64_t r = 0; r < rounds; ++r) {
            if constexpr (kInt8) {
                tile_dot_s8<0, 4, 6>();
                tile_dot_s8<1, 4, 7>();
                tile_dot_s8<2, 5, 6>();
                tile_dot_s8<3, 5, 7>();
            } else {
                tile_dot_bf16<0, 4, 6>();
                tile_dot_bf16<1, 4, 7>();
                tile_dot_bf16<2, 5, 6>();
                tile_dot_bf16<3, 5, 7>();
            }
        }
        tile_store<0>(sums, 64);
        __atomic_fetch_add(out, int64_t{sums[0] != 0}, __ATOMIC_RELAXED);
    });
}

void probe_tiles_int8(int64_t* out, int64_t rounds) { probe_tiles<true>(out, rounds); }
void probe_tiles_bf16(int64_t* out, int64_t rounds) { probe_tiles<false>(out, rounds); }

// Runs `rounds` rounds of the exact sums of four groups, 16 rows by 16 columns, from the first-level cache on every thread,
// eight times: what is left of the peak when every group's sums must leave the tile, before any of them becomes a float.
template <int kGroup>
void probe_group_sums(int64_t* out, int64_t rounds) {
    *out = 0;
    parallel_for(8 * thread_count(), [&](int64_t index, int) {
        alignas(64) char x[kSide * kGroup];
        FewArea area;
        uint32_t state = static_cast<uint32_t>(index) + 1;
        const auto next = [&] { return static_cast<uint8_t>((state = state * 1664525u + 1013904223u) >> 24); };
        for (char& number : x) number = static_cast<char>(next());
        for (int i = 0; i < kSide * kGroup; ++i) area.weights[0][0][i] = next();
        constexpr int kBytes = kGroup < 64 ? kGroup : 64;
        TileShapes shapes;
        for (int i = 0; i < 4; ++i) shapes.set(i, kSide, 64);
        for (int i = 4; i < 6; ++i) shapes.set(i, kSide, kBytes);
        for (int i = 6; i < 8; ++i) shapes.set(i, kBytes / 4, 64);
        const TileScope scope(shapes);
        const void* w = area.weights[0][0];
        for (int64_t r = 0; r < rounds; ++r) {
            few_dots<kGroup, 0, 1>(x, kGroup, w, w, area);
            few_dots<kGroup, 1, 1>(x, kGroup, w, w, area);
            few_dots<kGroup, 0, 1>(x, kGroup, w, w, area);
            few_dots<kGroup, 1, 1>(x, kGroup, w, w, area);
        }
        __atomic_fetch_add(out, int64_t{area.sums[0][0][0] != 0}, __ATOMIC_RELAXED);
    });
}

void probe_tiles_g32(int64_t* out, int64_t rounds) { probe_group_sums<32>(out, rounds); }
void probe_tiles_g64(int64_t* out, int64_t rounds) { probe_group_sums<64>(out, rounds); }
void probe_tiles_g128(int64_t* out, int64_t rounds) { probe_group_sums<128>(out, rounds); }
#endif

}  // namespace
}  // namespace quire::QUIRE_UNIT
