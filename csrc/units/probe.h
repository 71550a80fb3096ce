// What the machine can do at most: memory read, and the peak of each dot product. Benchmarks divide by these.
#pragma once

constexpr int64_t kProbeChains = 16;  // independent sums: more than latency times issue width of any core so far

void probe_read(int64_t* out, const char* data, int64_t bytes) {
    constexpr int64_t kPiece = 1 << 20;
    *out = 0;
    parallel_for(bytes / kPiece, [&](int64_t piece, int) {
        I sum[4] = {set1_i(0), set1_i(0), set1_i(0), set1_i(0)};
        for (int64_t i = 0; i < kPiece; i += 256)
            for (int j = 0; j < 4; ++j) sum[j] = add_i(sum[j], load_i(data + piece * kPiece + i + j * 64));
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
