// Tile registers (AMX) for a processor that has none: their instructions raise SIGILL, and this handler does what each is
// documented to do (Intel's Software Developer's Manual, volume 2) and goes on behind it. So the unit that runs is the object code
// that ships, with its registers and its order of loads and stores. What the processor would refuse (shapes that do not fit, a tile
// without a shape, a bad configuration) ends the program with the reason.
#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Tile {
    int rows, row_bytes;  // 0: the tile has no shape
    alignas(64) uint8_t data[kRows][kRowBytes];
};

// The layout that LDTILECFG reads and STTILECFG writes.
struct Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Configuration) == 64);

thread_local Tile g_tiles[kTiles];

[[noreturn]] void refuse(const char* reason) {
    const auto say = [](const char* text) { return write(STDERR_FILENO, text, std::strlen(text)); };
    const bool said = say("emulated tile registers: ") > 0 && say(reason) > 0 && say("\n") > 0;
    _exit(said ? 70 : 71);
}

Tile& shaped(int index) {
    if (index >= kTiles) refuse("there are tiles 0 to 7");
    if (!g_tiles[index].rows) refuse("a tile without a shape is used");
    return g_tiles[index];
}

void release() { std::memset(g_tiles, 0, sizeof g_tiles); }

void configure(const char* from) {
    Configuration c;
    std::memcpy(&c, from, sizeof c);
    release();
    if (c.palette == 0) return;
    if (c.palette != 1 || c.start_row) refuse("a configuration has another palette than 1, or a start row");
    for (const uint8_t byte : c.reserved)
        if (byte) refuse("a configuration's reserved bytes are not 0");
    for (int i = 0; i < 16; ++i) {
        if (i >= kTiles && (c.rows[i] || c.row_bytes[i])) refuse("a configuration has shapes for more than 8 tiles");
        if (c.rows[i] > kRows || c.row_bytes[i] > kRowBytes || !c.rows[i] != !c.row_bytes[i]) refuse("a configuration has a shape that no tile can take");
        if (i < kTiles) g_tiles[i].rows = c.rows[i], g_tiles[i].row_bytes = c.row_bytes[i];
    }
}

void load(Tile& t, const char* from, int64_t stride) {
    std::memset(t.data, 0, sizeof t.data);
    for (int r = 0; r < t.rows; ++r) std::memcpy(t.data[r], from + r * stride, static_cast<size_t>(t.row_bytes));
}

void store(const Tile& t, char* to, int64_t stride) {
    for (int r = 0; r < t.rows; ++r) std::memcpy(to + r * stride, t.data[r], static_cast<size_t>(t.row_bytes));
}

void check_product(int sum, int a, int b) {
    const Tile &s = shaped(sum), &x = shaped(a), &y = shaped(b);
    if (sum == a || sum == b || a == b) refuse("a product has the same tile twice");
    if (s.rows != x.rows || s.row_bytes != y.row_bytes || x.row_bytes != y.rows * 4) refuse("the shapes of a product do not fit");
    if (s.row_bytes % 4 || x.row_bytes % 4) refuse("a product's rows are not whole words");
}

// Whatever lies beyond the rows and columns of a sum becomes 0.
template <class Number, class Fn>
void each_sum(Tile& s, const Fn& value) {
    Tile to{s.rows, s.row_bytes, {}};
    for (int m = 0; m < s.rows; ++m)
        for (int n = 0; n < s.row_bytes / 4; ++n) {
            Number sum;
            std::memcpy(&sum, s.data[m] + n * 4, 4);
            sum = value(m, n, sum);
            std::memcpy(to.data[m] + n * 4, &sum, 4);
        }
    s = to;
}

// Sums wrap around.
template <class A, class B>
void multiply_bytes(int sum, int a, int b) {
    check_product(sum, a, b);
    const Tile &x = g_tiles[a], &y = g_tiles[b];
    each_sum<uint32_t>(g_tiles[sum], [&](int m, int n, uint32_t total) {
        for (int k = 0; k < x.row_bytes; ++k)
            total += static_cast<uint32_t>(static_cast<A>(x.data[m][k]) * static_cast<B>(y.data[k / 4][n * 4 + k % 4]));
        return total;
    });
}

float bf16_at(const uint8_t* row, int index) {
    uint32_t bits = static_cast<uint32_t>(row[index * 2] | row[index * 2 + 1] << 8) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Two chains of fused multiply-adds over k, of the even numbers and of the odd ones; their sum is added last.
[[gnu::noinline]] void multiply_pairs(Tile& sum, const Tile& x, const Tile& y) {
    each_sum<float>(sum, [&](int m, int n, float total) {
        float even = 0.0f, odd = 0.0f;
        for (int k = 0; k < x.row_bytes / 4; ++k) {
            even = std::fma(bf16_at(x.data[m], 2 * k), bf16_at(y.data[k], 2 * n), even);
            odd = std::fma(bf16_at(x.data[m], 2 * k + 1), bf16_at(y.data[k], 2 * n + 1), odd);
        }
        return total + (even + odd);
    });
}

// Rounds to the nearest, ties to even, and takes denormal numbers for 0, whatever the thread has set.
void multiply_bf16(int sum, int a, int b) {
    check_product(sum, a, b);
    constexpr unsigned kFlushToZero = 1u << 15, kDenormalsAreZero = 1u << 6, kAllMasked = 0x1f80;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(kFlushToZero | kDenormalsAreZero | kAllMasked);
    multiply_pairs(g_tiles[sum], g_tiles[a], g_tiles[b]);
    _mm_setcsr(before);
}

constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

enum class Prefix { kNone, k66, kF3, kF2 };

// A three-byte VEX instruction of the map 0F38, 128 bits wide, W = 0: those of tiles are all of this form.
struct Instruction {
    Prefix prefix = Prefix::kNone;
    int opcode = 0, reg = 0, rm = 0, vvvv = 0;
    bool memory = false;
    char* base = nullptr;  // with the displacement
    int64_t index = 0;     // scaled; the step between rows
    int64_t bytes = 0;
};

char* address_of(int64_t at) { return reinterpret_cast<char*>(at); }

Instruction decode(const uint8_t* code, const greg_t* registers) {
    Instruction in;
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || code[2] & 0x84) refuse("an instruction that is none of tiles");
    in.prefix = static_cast<Prefix>(code[2] & 3);
    in.vvvv = ~code[2] >> 3 & 15;
    in.opcode = code[3];
    const int mod = code[4] >> 6, low = code[4] & 7;
    in.reg = (code[4] >> 3 & 7) + (code[1] & 0x80 ? 0 : 8);
    const int high_index = code[1] & 0x40 ? 0 : 8, high_base = code[1] & 0x20 ? 0 : 8;
    in.rm = low + high_base;
    in.bytes = 5;
    in.memory = mod != 3;
    if (!in.memory) return in;
    int base = low;
    if (low == 4) {
        const int sib = code[in.bytes++], index = (sib >> 3 & 7) + high_index;
        if (index != 4) in.index = registers[kRegisters[index]] << (sib >> 6);
        base = sib & 7;
    }
    int64_t displacement = 0;
    const bool wide = mod == 2 || (mod == 0 && base == 5);
    if (wide) {
        int32_t value;
        std::memcpy(&value, code + in.bytes, 4);
        displacement = value;
    } else if (mod == 1) {
        displacement = static_cast<int8_t>(code[in.bytes]);
    }
    in.bytes += wide ? 4 : mod == 1 ? 1 : 0;
    const bool no_base = mod == 0 && base == 5;
    const int64_t next = low == 4 ? 0 : reinterpret_cast<int64_t>(code) + in.bytes;  // without a base: relative to what follows, or to 0
    in.base = address_of((no_base ? next : registers[kRegisters[base + high_base]]) + displacement);
    return in;
}

void set_shapes(const Instruction& in) {  // opcode 49
    if (in.prefix == Prefix::kNone && in.memory) return configure(in.base + in.index);
    if (in.prefix == Prefix::kNone && in.reg == 0 && in.rm == 0) return release();
    if (in.prefix == Prefix::kF2 && !in.memory) {
        Tile& t = shaped(in.reg);
        std::memset(t.data, 0, sizeof t.data);
        return;
    }
    refuse("an unknown instruction with the opcode 49");
}

void move(const Instruction& in) {  // opcode 4b
    if (!in.memory || in.prefix == Prefix::kNone) refuse("an unknown instruction with the opcode 4b");
    Tile& t = shaped(in.reg);
    if (in.prefix == Prefix::kF3) store(t, in.base, in.index);
    else load(t, in.base, in.index);
}

void multiply(const Instruction& in) {  // opcodes 5c, 5e
    const int sum = in.reg, a = in.rm, b = in.vvvv;
    if (in.memory) refuse("a product with memory");
    if (in.opcode == 0x5c) {
        if (in.prefix != Prefix::kF3) refuse("an unknown product of halves");
        return multiply_bf16(sum, a, b);
    }
    switch (in.prefix) {
        case Prefix::kNone: return multiply_bytes<uint8_t, uint8_t>(sum, a, b);
        case Prefix::k66: return multiply_bytes<uint8_t, int8_t>(sum, a, b);
        case Prefix::kF3: return multiply_bytes<int8_t, uint8_t>(sum, a, b);
        case Prefix::kF2: return multiply_bytes<int8_t, int8_t>(sum, a, b);
    }
}

void on_illegal(int /*signal*/, siginfo_t* /*info*/, void* context) {
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const Instruction in = decode(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
    switch (in.opcode) {
        case 0x49: set_shapes(in); break;
        case 0x4b: move(in); break;
        case 0x5c:
        case 0x5e: multiply(in); break;
        default: refuse("an instruction that is none of tiles");
    }
    registers[REG_RIP] += in.bytes;
}

struct Installed {
    Installed() {
        struct sigaction action = {};
        action.sa_sigaction = on_illegal;
        action.sa_flags = SA_SIGINFO;
        if (sigaction(SIGILL, &action, nullptr)) refuse("no handler");
    }
} g_installed;

}  // namespace
