// Vector functions shared by the kernels; every unit rounds them alike, save for the portable one's missing FMA and numbers below 2^-126 (kLeastPower).
#pragma once

#include "lanes.h"

namespace quire::QUIRE_UNIT {
namespace {

// 2^x, relative error below 2e-7 for x in [-126, 128); 0 below -126.5, +inf above 128, exactly 1 at 0, NaN stays NaN.
// A degree-6 minimax polynomial on [-0.5, 0.5].
QUIRE_INLINE F exp2(F x) {
    x = vmin(set1(128.0f), vmax(set1(-127.0f), x));
    const I n = round_i(x);
    const F f = sub(x, to_f(n));
    F p = set1(1.5403530e-4f);
    p = fma(p, f, set1(1.3333558e-3f));
    p = fma(p, f, set1(9.6181291e-3f));
    p = fma(p, f, set1(5.5504109e-2f));
    p = fma(p, f, set1(2.4022651e-1f));
    p = fma(p, f, set1(6.9314718e-1f));
    p = fma(p, f, set1(1.0f));
    return mul(p, exp2_int(n));
}

// x = n + f, n the integer nearest to x.
QUIRE_INLINE void split_power(F x, F& n, F& f) {
#if defined(__AVX512DQ__)
    f = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    n = sub(x, f);
#else
    n = round_f(x);
    f = sub(x, n);
#endif
}

// 2^x for kLeastPower <= x <= 16, exactly 1 at 0; NaN stays NaN. Relative error below 2e-7, or 4e-6 when `kCoarse`: enough for
// what is rounded to bf16 next.
template <bool kCoarse>
QUIRE_INLINE F exp2_within(F x) {
    F n, f;
    split_power(x, n, f);
    F p = set1(kCoarse ? 9.58285246e-3f : 1.32647264e-3f);
    if constexpr (!kCoarse) p = fma(p, f, set1(9.67151270e-3f));
    p = fma(p, f, set1(kCoarse ? 5.59064255e-2f : 5.55073375e-2f));
    p = fma(p, f, set1(kCoarse ? 2.40240986e-1f : 2.40222421e-1f));
    p = fma(p, f, set1(kCoarse ? 6.93124193e-1f : 6.93146978e-1f));
    p = fma(p, f, set1(1.0f));
    return scale2(p, n);
}

// The same for any x <= 16.
template <bool kCoarse>
QUIRE_INLINE F exp2_below(F x) { return exp2_within<kCoarse>(vmax(set1(kLeastPower), x)); }

// e^x. The product with log2(e) is split in two so that large arguments keep their relative precision.
QUIRE_INLINE F vexp(F x) {
    x = vmin(set1(88.8f), vmax(set1(-88.0f), x));
    const I n = round_i(mul(x, set1(1.44269504f)));
    const F nf = to_f(n);
    const F f = fma(nf, set1(2.12194440e-4f), fma(nf, set1(-0.693359375f), x));
    F p = set1(1.9875691500e-4f);
    p = fma(p, f, set1(1.3981999507e-3f));
    p = fma(p, f, set1(8.3334519073e-3f));
    p = fma(p, f, set1(4.1665795894e-2f));
    p = fma(p, f, set1(1.6666665459e-1f));
    p = fma(p, f, set1(5.0000001201e-1f));
    p = fma(mul(p, f), f, add(f, set1(1.0f)));
    return mul(p, exp2_int(n));
}

// Relative error below 3e-7: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel. NaN stays NaN.
QUIRE_INLINE F vtanh(F x) {
    const F z = mul(x, x);
    F p = set1(-5.70498872745e-3f);
    p = fma(p, z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    const F large = sub(set1(1.0f), div(set1(2.0f), add(vexp(add(x, x)), set1(1.0f))));
    return where_less(vabs(x), set1(0.625f), fma(mul(p, z), x, x), large);
}

// log(1 + e^x), relative error below 4e-7. Beyond the larger of x and 0 it is log(1 + u) = 2 artanh(u / (2 + u)) of u = e^-|x|, by its series.
QUIRE_INLINE F softplus(F x) {
    const F u = vexp(sub(set1(0.0f), vabs(x)));
    const F s = div(u, add(u, set1(2.0f)));
    const F z = mul(s, s);
    F p = set1(1.0f / 15.0f);
    p = fma(p, z, set1(1.0f / 13.0f));
    p = fma(p, z, set1(1.0f / 11.0f));
    p = fma(p, z, set1(1.0f / 9.0f));
    p = fma(p, z, set1(1.0f / 7.0f));
    p = fma(p, z, set1(1.0f / 5.0f));
    p = fma(p, z, set1(1.0f / 3.0f));
    p = fma(p, z, set1(1.0f));
    return fma(add(s, s), p, vmax(set1(0.0f), x));
}

// x / (1 + e^-t)
QUIRE_INLINE F times_sigmoid(F x, F t) { return div(x, add(set1(1.0f), vexp(sub(set1(0.0f), t)))); }

// Odd rational minimax approximation of erf on [-4, 4], error below 3 units in the last place.
QUIRE_INLINE F verf(F x) {
    x = vmin(set1(4.0f), vmax(set1(-4.0f), x));
    const F z = mul(x, x);
    F p = set1(-2.72614225801306e-10f);
    p = fma(p, z, set1(2.77068142495902e-08f));
    p = fma(p, z, set1(-2.10102402082508e-06f));
    p = fma(p, z, set1(-5.69250639462346e-05f));
    p = fma(p, z, set1(-7.34990630326855e-04f));
    p = fma(p, z, set1(-2.95459980854025e-03f));
    p = fma(p, z, set1(-1.60960333262415e-02f));
    F q = set1(-1.45660718464996e-05f);
    q = fma(q, z, set1(-2.13374055278905e-04f));
    q = fma(q, z, set1(-1.68282697438203e-03f));
    q = fma(q, z, set1(-7.37332916720468e-03f));
    q = fma(q, z, set1(-1.42647390514189e-02f));
    return div(mul(x, p), q);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
