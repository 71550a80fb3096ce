// Where the fields of all descriptors lie, for tests/ops/test_descriptors.py, which holds the classes of Python to it.
#include "descriptors.h"

#include <cstddef>
#include <cstdio>

#include "matrix.h"
#include "registry.h"

namespace quire {
namespace {

struct Field {
    const char *descriptor, *name;
    size_t offset, size, whole;
};

#define FIELD(type, name) {#type, #name, offsetof(type, name), sizeof(type::name), sizeof(type)}

constexpr Field kFields[] = {
    FIELD(Matrix, kind), FIELD(Matrix, n), FIELD(Matrix, k), FIELD(Matrix, group), FIELD(Matrix, wide), FIELD(Matrix, digits),
    FIELD(Matrix, planes), FIELD(Matrix, codes), FIELD(Matrix, scales), FIELD(Matrix, zeros), FIELD(Matrix, mins), FIELD(Matrix, table),
    FIELD(Matrix, order), FIELD(Matrix, code_step), FIELD(Matrix, scale_step), FIELD(Matrix, zero_step), FIELD(Matrix, min_step),
    FIELD(Matrix, places),
    FIELD(CacheDescriptor, keys), FIELD(CacheDescriptor, values), FIELD(CacheDescriptor, kv_heads), FIELD(CacheDescriptor, d),
    FIELD(CacheDescriptor, block_size), FIELD(CacheDescriptor, blocks), FIELD(CacheDescriptor, format), FIELD(CacheDescriptor, step),
    FIELD(LatentCacheDescriptor, keys), FIELD(LatentCacheDescriptor, values), FIELD(LatentCacheDescriptor, rank),
    FIELD(LatentCacheDescriptor, rope), FIELD(LatentCacheDescriptor, block_size), FIELD(LatentCacheDescriptor, blocks),
    FIELD(LatentCacheDescriptor, bf16), FIELD(LatentCacheDescriptor, key_step), FIELD(LatentCacheDescriptor, value_step),
    FIELD(BatchDescriptor, cu_q), FIELD(BatchDescriptor, context), FIELD(BatchDescriptor, tables), FIELD(BatchDescriptor, tree),
    FIELD(BatchDescriptor, starts), FIELD(BatchDescriptor, sequences), FIELD(BatchDescriptor, max_blocks),
    FIELD(BatchDescriptor, states),
    FIELD(AttentionDescriptor, sinks), FIELD(AttentionDescriptor, alibi), FIELD(AttentionDescriptor, bias),
    FIELD(AttentionDescriptor, distances), FIELD(AttentionDescriptor, behind), FIELD(AttentionDescriptor, heads),
    FIELD(AttentionDescriptor, window), FIELD(AttentionDescriptor, after), FIELD(AttentionDescriptor, queries_only),
    FIELD(AttentionDescriptor, pool), FIELD(AttentionDescriptor, scale), FIELD(AttentionDescriptor, softcap),
    FIELD(ConvolutionDescriptor, weight), FIELD(ConvolutionDescriptor, bias), FIELD(ConvolutionDescriptor, taps),
    FIELD(ConvolutionDescriptor, width), FIELD(ConvolutionDescriptor, silu), FIELD(ConvolutionDescriptor, gated),
    FIELD(RopeDescriptor, table), FIELD(RopeDescriptor, q_norm), FIELD(RopeDescriptor, k_norm), FIELD(RopeDescriptor, positions),
    FIELD(RopeDescriptor, half), FIELD(RopeDescriptor, heads), FIELD(RopeDescriptor, eps),
    FIELD(SpansDescriptor, weight), FIELD(SpansDescriptor, start), FIELD(SpansDescriptor, count), FIELD(SpansDescriptor, span),
    FIELD(SpansDescriptor, centered), FIELD(SpansDescriptor, eps),
    FIELD(GatedNormDescriptor, weight), FIELD(GatedNormDescriptor, span), FIELD(GatedNormDescriptor, weights),
    FIELD(GatedNormDescriptor, sigmoid), FIELD(GatedNormDescriptor, gate_first), FIELD(GatedNormDescriptor, eps),
    FIELD(StateBatchDescriptor, cu_q), FIELD(StateBatchDescriptor, source), FIELD(StateBatchDescriptor, counts),
    FIELD(StateBatchDescriptor, target), FIELD(StateBatchDescriptor, sequences),
    FIELD(DeltaDescriptor, a), FIELD(DeltaDescriptor, dt_bias), FIELD(DeltaDescriptor, key_heads),
    FIELD(DeltaDescriptor, value_heads), FIELD(DeltaDescriptor, key_dim), FIELD(DeltaDescriptor, value_dim),
    FIELD(DeltaDescriptor, lower_bound), FIELD(DeltaDescriptor, beta_scale),
    FIELD(ScanDescriptor, a), FIELD(ScanDescriptor, d), FIELD(ScanDescriptor, dt_bias), FIELD(ScanDescriptor, heads),
    FIELD(ScanDescriptor, groups), FIELD(ScanDescriptor, head_dim), FIELD(ScanDescriptor, state),
    FIELD(ScanDescriptor, selective), FIELD(ScanDescriptor, low), FIELD(ScanDescriptor, high),
    FIELD(PoolDescriptor, bias), FIELD(PoolDescriptor, norm), FIELD(PoolDescriptor, table), FIELD(PoolDescriptor, positions),
    FIELD(PoolDescriptor, half), FIELD(PoolDescriptor, every), FIELD(PoolDescriptor, series), FIELD(PoolDescriptor, eps),
    FIELD(EntryReadsDescriptor, sinks), FIELD(EntryReadsDescriptor, heads), FIELD(EntryReadsDescriptor, window),
    FIELD(EntryReadsDescriptor, every), FIELD(EntryReadsDescriptor, most), FIELD(EntryReadsDescriptor, scale),
    FIELD(RoutingDescriptor, experts), FIELD(RoutingDescriptor, top_k), FIELD(RoutingDescriptor, score),
    FIELD(RoutingDescriptor, renormalize), FIELD(RoutingDescriptor, groups), FIELD(RoutingDescriptor, top_groups),
    FIELD(RoutingDescriptor, group_best), FIELD(RoutingDescriptor, scale), FIELD(RoutingDescriptor, jitter),
    FIELD(ExpertsDescriptor, matrices), FIELD(ExpertsDescriptor, bias), FIELD(ExpertsDescriptor, experts), FIELD(ExpertsDescriptor, n),
    FIELD(BetweenDescriptor, activation), FIELD(BetweenDescriptor, clamped), FIELD(BetweenDescriptor, alpha),
    FIELD(BetweenDescriptor, limit), FIELD(BetweenDescriptor, shift), FIELD(BetweenDescriptor, most),
    FIELD(PairsDescriptor, tokens), FIELD(PairsDescriptor, places), FIELD(PairsDescriptor, offsets), FIELD(PairsDescriptor, weights),
    FIELD(PairsDescriptor, room), FIELD(PairsDescriptor, x_rows), FIELD(PairsDescriptor, top_k),
    FIELD(HomesDescriptor, ranks), FIELD(HomesDescriptor, local), FIELD(HomesDescriptor, experts), FIELD(HomesDescriptor, copies),
    FIELD(HomesDescriptor, held), FIELD(HomesDescriptor, rank), FIELD(HomesDescriptor, world), FIELD(HomesDescriptor, idle),
    FIELD(RoundingDescriptor, divisors), FIELD(RoundingDescriptor, tries), FIELD(RoundingDescriptor, k),
    FIELD(RoundingDescriptor, stride), FIELD(RoundingDescriptor, group), FIELD(RoundingDescriptor, low),
    FIELD(RoundingDescriptor, high), FIELD(RoundingDescriptor, bits), FIELD(RoundingDescriptor, bf16),
    FIELD(ReaderDescriptor, threads), FIELD(ReaderDescriptor, piece), FIELD(ReaderDescriptor, cached),
};

// text [room]: a line "descriptor field offset bytes bytes-of-the-descriptor" for each field, and a zero behind them.
void descriptor_fields(char* text, int64_t room) {
    for (const Field& f : kFields) {
        const int written = std::snprintf(text, static_cast<size_t>(room), "%s %s %zu %zu %zu\n", f.descriptor, f.name, f.offset, f.size, f.whole);
        if (written < 0 || written >= room) fail("descriptor_fields: there is no room for the text");
        text += written;
        room -= written;
    }
}

const OpEntry kOps[] = {op_entry<&descriptor_fields>("descriptor_fields")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
